# SPDX-License-Identifier: Apache-2.0
"""Writes the metrics of runs as TensorBoard shows them, with PyPI's tensorboard: scalars such as step/loss, and the
settings as hyperparameters."""

from pathlib import Path

from common import Error, number
from metrics import summed

try:
    from google.protobuf.struct_pb2 import Value
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise Error(f"--tensorboard needs PyPI's tensorboard: {error}", next="pip install tensorboard") from None

COMPARED = ("epoch/val_accuracy", "epoch/val_loss", "epoch/train_loss", "epoch/samples_per_second")


def scalars(event):
    shown = {key: value for key, value in event.items() if number(value) is not None and key not in ("epoch", "step")}
    kind = event["event"]
    return Summary(value=[Summary.Value(tag=f"{kind}/{key}", simple_value=value) for key, value in shown.items()])


def hparams(tag, **content):
    data = plugin_data_pb2.HParamsPluginData(**content).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=data)
    return Summary(value=[Summary.Value(tag=f"_hparams_/{tag}", metadata=SummaryMetadata(plugin_data=plugin))])


def protobuf(value):
    if isinstance(value, bool):
        return Value(bool_value=value)
    return Value(string_value=str(value)) if number(value) is None else Value(number_value=value)


def summaries(metrics):
    """(step, seconds since the start, Summary)"""
    settings = {key: value for key, value in metrics.start.get("settings", {}).items() if value is not None}
    if "ranks" in metrics.end:
        settings["ranks"] = metrics.end["ranks"]  # a number, whatever --ranks says
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=name) for name in settings],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in COMPARED],
    )
    yield 0, 0, hparams("experiment", experiment=experiment)
    values = {name: protobuf(value) for name, value in settings.items()}
    yield 0, 0, hparams("session_start_info", session_start_info=plugin_data_pb2.SessionStartInfo(hparams=values))
    seconds = 0
    for step in metrics.steps:
        seconds += step["seconds"]
        for event in (step, *(epoch for last, epoch in metrics.epochs if last == step["step"])):
            yield step["step"], seconds, scalars(event)
    status = api_pb2.STATUS_SUCCESS if metrics.end.get("event") == "run" else api_pb2.STATUS_FAILURE
    yield 0, seconds, hparams("session_end_info", session_end_info=plugin_data_pb2.SessionEndInfo(status=status))


def write_curves(folder, runs):
    """A folder per run, whose former curves are replaced. `runs`: Metrics by name."""
    for name, metrics in runs.items():
        place = Path(folder, name.replace("/", "_"))
        for former in place.glob("events.out.tfevents.*"):
            former.unlink()
        began = metrics.path.stat().st_mtime - summed(metrics.steps, "seconds")
        writer = EventFileWriter(str(place))
        for step, seconds, summary in summaries(metrics):
            writer.add_event(Event(wall_time=began + seconds, step=step, summary=summary))
        writer.close()
