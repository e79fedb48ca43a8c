# SPDX-License-Identifier: Apache-2.0
"""Writes the metrics of runs as TensorBoard shows them, with PyPI's tensorboard: scalars such as step/loss, and the
settings as hyperparameters."""

from pathlib import Path

from common import Error, number
from metrics import summed

try:
    from google.protobuf.struct_pb2 import Value
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise Error(f"--tensorboard needs PyPI's tensorboard: {error}", next="pip install tensorboard") from None

COMPARED = ("epoch/val_accuracy", "epoch/val_loss", "epoch/train_loss", "epoch/samples_per_second")


def scalars(event):
    shown = {key: value for key, value in event.items() if number(value) is not None and key not in ("epoch", "step")}
    return [{"tag": f"{event['event']}/{key}", "simple_value": value} for key, value in shown.items()]


def hparams(**content):
    plugin = {"plugin_name": "hparams", "content": HParamsPluginData(**content).SerializeToString()}
    return [{"tag": f"_hparams_/{tag}", "metadata": {"plugin_data": plugin}} for tag in content]


def protobuf(value):
    if isinstance(value, bool):
        return Value(bool_value=value)
    return Value(string_value=str(value)) if number(value) is None else Value(number_value=value)


def summaries(metrics):
    """(step, seconds since the start, values of a Summary)"""
    settings = {key: value for key, value in metrics.start.get("settings", {}).items() if value is not None}
    if "ranks" in metrics.end:
        settings["ranks"] = metrics.end["ranks"]  # a number, whatever --ranks says
    names, tags = [{"name": name} for name in settings], [{"name": {"tag": tag}} for tag in COMPARED]
    yield 0, 0, hparams(experiment={"hparam_infos": names, "metric_infos": tags})
    yield 0, 0, hparams(session_start_info={"hparams": {name: protobuf(value) for name, value in settings.items()}})
    seconds = 0
    for step in metrics.steps:
        seconds += step["seconds"]
        for event in (step, *(epoch for last, epoch in metrics.epochs if last == step["step"])):
            yield step["step"], seconds, scalars(event)
    status = "STATUS_SUCCESS" if metrics.end.get("event") == "run" else "STATUS_FAILURE"
    yield 0, seconds, hparams(session_end_info={"status": status})


def write_curves(folder, runs):
    """A folder per run, whose former curves are replaced. `runs`: Metrics by name."""
    for name, metrics in runs.items():
        place = Path(folder, name.replace("/", "_"))
        for former in place.glob("events.out.tfevents.*"):
            former.unlink()
        began = metrics.path.stat().st_mtime - summed(metrics.steps, "seconds")
        writer = EventFileWriter(str(place))
        for step, seconds, values in summaries(metrics):
            writer.add_event(Event(wall_time=began + seconds, step=step, summary={"value": values}))
        writer.close()
