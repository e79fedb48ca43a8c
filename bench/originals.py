#!/usr/bin/env python3
"""Strategies beside the systems that they come from, on LeNet and on a model heavy in parameters (20 M), in turn.

    bench/originals.py [ROUNDS [MODEL]]

Two devices or workers of one core each; Fashion-MNIST, SGD with momentum. `tools/setup.sh originals` fetches the peers.
"""
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from common import LOCKSTEP, ROOT, last_json, machine, median, peer_environment, save

WARM_UP = 10
CASES = {"lenet": (256, 60), "mlp-wide": (32, 40)}  # batch, steps


def lockstep(model, *options):
    batch, steps = CASES[model]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        subprocess.run([LOCKSTEP, "train", "--model", model, "--data", "fashion-mnist", "--batch-size", str(batch), "--lr",
                        "0.01", "--momentum", "0.9", "--ranks", "2", "--threads", "1", "--max-steps", str(WARM_UP + steps),
                        "--quiet", "--metrics", metrics, *options], check=True)
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "step"][WARM_UP:]
    return sum(seconds) / len(seconds)


def python_with(folder, **variables):
    return {**os.environ, "PYTHONPATH": str(ROOT / ".deps" / folder), **variables}


def pytorch(model):
    command = [sys.executable, ROOT / "bench/peers/pytorch_ddp.py", "2", "channels_last", model, *map(str, CASES[model])]
    return last_json(command, env=peer_environment())["seconds_per_step"]


def tensorflow(model):
    command = [sys.executable, ROOT / "bench/peers/tensorflow_mirrored.py", model, *map(str, CASES[model])]
    return last_json(command, env=python_with("tensorflow"))["seconds_per_step"]


def mxnet_device(model):
    command = [sys.executable, ROOT / "bench/peers/mxnet_kvstore.py", "device", "2", model, *map(str, CASES[model])]
    return last_json(command, env=python_with("mxnet", OMP_NUM_THREADS="1"), stderr=subprocess.DEVNULL)["seconds_per_step"]


def mxnet_dist(kind, model):
    """A scheduler, a server and two workers, as MXNet's documentation starts them by hand."""
    variables = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(random.randrange(20000, 30000)),
                 "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "2", "DMLC_INTERFACE": "lo", "OMP_NUM_THREADS": "1"}
    worker = [sys.executable, ROOT / "bench/peers/mxnet_kvstore.py", kind, "1", model, *map(str, CASES[model])]
    roles = [("scheduler", [sys.executable, "-c", "import mxnet"]), ("server", [sys.executable, "-c", "import mxnet"]),
             ("worker", worker), ("worker", worker)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                env=python_with("mxnet", DMLC_ROLE=role, **variables)) for role, command in roles]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return next(json.loads(line)["seconds_per_step"] for output in outputs for line in output.splitlines() if line[:1] == "{")


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
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    models = sys.argv[2:3] or list(CASES)
    for needed in ("pytorch", "mxnet", "tensorflow"):
        if not (ROOT / ".deps" / needed / ".complete").exists():
            sys.exit(f"originals: {needed} is not here; run tools/setup.sh originals first")
    print(f"{machine()}; {rounds} rounds in turn")
    result = {"rounds": rounds}
    for model in models:
        found = {name: [] for name in RUNS}
        for _ in range(rounds):
            for name, run in RUNS.items():
                found[name].append(run(model))
        medians = {name: median(values) for name, values in found.items()}
        print(f"\n{model}, batch {CASES[model][0]}: a step{'':14} ms   the original takes")
        for name, seconds in medians.items():
            original = ORIGINALS.get(name)
            print(f"{name:32} {1e3 * seconds:9.1f}" + (f"   {medians[original] / seconds:5.2f} x" if original else ""))
        result[model] = found
    save("originals", result)


if __name__ == "__main__":
    main()
