#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads with the `tensorboard` package what `lockstep report --tensorboard` wrote: $1 is the command.

The curves are those of the metrics, a resumed run goes on with them and replaces what was drawn beyond its checkpoint, and
hyperparameters are what they should be.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DEPS = Path(__file__).resolve().parent.parent / ".deps"
PACKAGES = [str(DEPS / "tensorboard"), str(DEPS / "torch-imports")]
sys.path[:0] = PACKAGES

import numpy  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tensorboard.plugins.hparams import plugin_data_pb2  # noqa: E402

COMMAND = str(Path(sys.argv[1]).resolve())


def train(folder, steps, *flags, code=0, **more):
    options = {"model": "lenet", "data": "synthetic:64x1x28x28", "batch-size": 16, "lr": 0.01, "threads": 1, "max-steps": steps,
               "checkpoint-every": 2, "checkpoint-dir": f"{folder}/checkpoints", "metrics": f"{folder}/metrics.jsonl"} | more
    command = [COMMAND, "train", "--quiet", *flags] + [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == code, (command, done.returncode, done.stderr)
    return done.stderr


def curves(folder):
    name = Path(folder).name
    subprocess.run([COMMAND, "report", folder, "--tensorboard", f"{folder}/curves"], check=True, timeout=120, stderr=subprocess.DEVNULL,
                   env={**os.environ, "PYTHONPATH": ":".join(PACKAGES)})
    return EventAccumulator(f"{folder}/curves/{name}", size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(read, tag):
    return {point.step: point.value for point in read.Scalars(tag)}


def metrics(folder, event):
    return [line for line in map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines()) if line["event"] == event]


def expect_curves_of_the_metrics(folder, steps):
    read = curves(folder)
    losses = {line["step"]: line["loss"] for line in metrics(folder, "step")}  # the last one of each step
    drawn = points(read, "step/loss")
    assert len(read.Scalars("step/loss")) == len(drawn), "a step is drawn twice"
    assert list(drawn) == list(range(steps)), list(drawn)
    numpy.testing.assert_allclose([losses[step] for step in drawn], list(drawn.values()), rtol=1e-6)
    assert points(read, "step/learning_rate")[0] == numpy.float32(0.01)
    epochs = [line["train_loss"] for line in metrics(folder, "epoch")]
    drawn = points(read, "epoch/train_loss")  # an epoch has four steps
    assert list(drawn) == [4 * epoch + 3 for epoch in range(steps // 4)], drawn
    numpy.testing.assert_allclose(epochs[-len(drawn):], list(drawn.values()), rtol=1e-6)


def plugin_data(read, tag):
    content = read.SummaryMetadata(tag).plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def expect_settings(folder):
    read = curves(folder)
    start = plugin_data(read, "_hparams_/session_start_info").session_start_info.hparams
    assert start["batch_size"].number_value == 16 and start["model"].string_value == "lenet", start
    assert start["lr"].number_value == 0.01 and start["optimizer"].string_value == "sgd", start
    assert start["strategy"].string_value == "ddp" and start["ranks"].number_value == 2, start
    named = {info.name for info in plugin_data(read, "_hparams_/experiment").experiment.hparam_infos}
    assert named == set(start), named ^ set(start)


def session_end(folder):
    return plugin_data(curves(folder), "_hparams_/session_end_info").session_end_info.status


def main():
    with tempfile.TemporaryDirectory() as folder:
        train(folder, 7, ranks=2)
        expect_curves_of_the_metrics(folder, 7)
        expect_settings(folder)
        assert session_end(folder) == 1, "not a success"

        kept, *lost = sorted(Path(folder, "checkpoints").glob("step-*"))
        for checkpoint in lost:  # as if the run had died before it wrote them
            checkpoint.unlink()
        train(folder, 13, "--resume", ranks=2)
        assert metrics(folder, "resume")[0]["step"] == int(kept.stem.removeprefix("step-")) < 7
        expect_curves_of_the_metrics(folder, 13)
        without = subprocess.run([COMMAND, "report", folder, "--tensorboard", f"{folder}/none"], stderr=subprocess.PIPE, text=True,
                                 env={**os.environ, "PYTHONPATH": ""})
        assert without.returncode == 1 and "pip install tensorboard" in without.stderr, without

    with tempfile.TemporaryDirectory() as folder:
        train(folder, 4, code=1, lr=1e30)
        assert session_end(folder) == 2, "not a failure"


if __name__ == "__main__":
    main()
