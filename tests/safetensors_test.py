#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads with the `safetensors` package what `lockstep train` saved, in one file and in shards: $1 is the command.

Shards and the single file hold the same tensors, and a run can go on from shards with another number of ranks.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DEPS = Path(__file__).resolve().parent.parent / ".deps"
sys.path[:0] = [str(DEPS / "frameworks"), str(DEPS / "torch-imports")]

import numpy  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

COMMAND = str(Path(sys.argv[1]).resolve())
SHARD_BYTES = 100_000  # fc1.weight of LeNet is larger


def train(checkpoints, steps, ranks, *flags):
    options = {"model": "lenet", "data": "synthetic:64x1x28x28", "batch-size": 16, "threads": 1, "ranks": ranks, "max-steps": steps,
               "checkpoint-dir": checkpoints}
    command = [COMMAND, "train", "--quiet", *flags] + [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(command, check=True, timeout=120)


def load_shards(folder, stem):
    index = json.loads(Path(folder, f"{stem}.safetensors.index.json").read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(Path(folder, name))
        assert all(index["weight_map"][tensor] == name for tensor in shard), name
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= SHARD_BYTES, name
        tensors |= shard
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def main():
    with tempfile.TemporaryDirectory() as folder:
        shards = ["--checkpoint-shard-bytes", str(SHARD_BYTES)]
        train(f"{folder}/one", 2, 2)
        train(f"{folder}/many", 2, 2, *shards)
        one = load_file(Path(folder, "one", "step-00000002.safetensors"))
        many = load_shards(f"{folder}/many", "step-00000002")
        assert len(list(Path(folder, "many").glob("*-of-*"))) > 2
        assert set(one) == set(many)
        assert "model.fc1.weight" in one
        for name, tensor in one.items():
            numpy.testing.assert_array_equal(tensor, many[name], err_msg=name)
        train(f"{folder}/many", 3, 1, "--resume", *shards)
        load_shards(f"{folder}/many", "step-00000003")


main()
