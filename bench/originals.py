#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Strategies beside the systems that they come from, on LeNet and on a model heavy in parameters (20 M), in turn.

    bench/originals.py [ROUNDS [MODEL]]

Two devices or workers of one core each; Fashion-MNIST, SGD with momentum. `tools/setup.sh originals` fetches the peers.
"""
import subprocess
import sys

from common import machine, median, require_peers, rounds, run_mxnet, run_peer, save, take_turns, train

WARM_UP = 10
CASES = {"lenet": (256, 60), "mlp-wide": (32, 40)}  # batch, steps


def lockstep(model, *options):
    batch, steps = CASES[model]
    events = train("--model", model, "--data", "fashion-mnist", "--batch-size", batch, "--lr", 0.01, "--momentum", 0.9,
                   "--ranks", 2, "--threads", 1, "--max-steps", WARM_UP + steps, *options)
    seconds = [event["seconds"] for event in events if event["event"] == "step"][WARM_UP:]
    return sum(seconds) / len(seconds)


def pytorch(model):
    return run_peer("pytorch_ddp.py", 2, "channels_last", model, *CASES[model])["seconds_per_step"]


def tensorflow(model):
    return run_peer("tensorflow_mirrored.py", model, *CASES[model], package="tensorflow",
                    threads=None)["seconds_per_step"]


def mxnet_device(model):
    return run_peer("mxnet_kvstore.py", "device", 2, model, *CASES[model], package="mxnet",
                    stderr=subprocess.DEVNULL)["seconds_per_step"]


def mxnet_dist(kind, model):
    return run_mxnet(2, "mxnet_kvstore.py", kind, "1", model, *CASES[model])["seconds_per_step"]


RUNS = {
    "lockstep ddp": lambda m: lockstep(m, "--strategy", "ddp"),
    "lockstep towers": lambda m: lockstep(m, "--strategy", "towers"),
    "lockstep data_parallel": lambda m: lockstep(m, "--strategy", "data_parallel"),
    "lockstep kvstore local": lambda m: lockstep(m, "--strategy", "kvstore", "--kvstore", "local"),
    "lockstep kvstore dist_sync": lambda m: lockstep(m, "--strategy", "kvstore", "--kvstore", "dist_sync"),
    "lockstep kvstore dist_async": lambda m: lockstep(m, "--strategy", "kvstore", "--kvstore", "dist_async"),
    "PyTorch DDP, Gloo": pytorch,
    "TensorFlow MirroredStrategy": tensorflow,
    "MXNet device": mxnet_device,
    "MXNet dist_sync": lambda m: mxnet_dist("dist_sync", m),
    "MXNet dist_async": lambda m: mxnet_dist("dist_async", m),
}
ORIGINALS = {"lockstep ddp": "PyTorch DDP, Gloo", "lockstep towers": "TensorFlow MirroredStrategy",
             "lockstep kvstore local": "MXNet device", "lockstep kvstore dist_sync": "MXNet dist_sync",
             "lockstep kvstore dist_async": "MXNet dist_async"}


def main():
    count = rounds(3)
    models = sys.argv[2:3] or list(CASES)
    require_peers("originals", "pytorch", "mxnet", "tensorflow")
    print(f"{machine()}; {count} rounds in turn")
    result = {"rounds": count}
    for model in models:
        found = take_turns(count, {name: lambda run=run: run(model) for name, run in RUNS.items()})
        medians = {name: median(values) for name, values in found.items()}
        print(f"\n{model}, batch {CASES[model][0]}: a step{'':14} ms   the original takes")
        for name, seconds in medians.items():
            original = ORIGINALS.get(name)
            print(f"{name:32} {1e3 * seconds:9.1f}" + (f"   {medians[original] / seconds:5.2f} x" if original else ""))
        result[model] = found
    save("originals", result)


if __name__ == "__main__":
    main()
