#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a user waits for beside the steps: starting, checkpoints, publishing, encryption, a trace. Each beside the same without
it, in turn.

    bench/what_waits.py [--only WHAT...] [--models lenet mlp-wide] [--rounds 5] [--steps 150] [--every 50] [--rate 1000] [--save]

start:       from the command to the end of LeNet's first step; needs lockstep's Python package (a wheel, or PYTHONPATH)
checkpoint, metrics, top, trace: from start to end of `lockstep train` with two ranks, that many steps: a checkpoint in every
             --every of them; --metrics; `lockstep top` looking on; --trace
tunnel:      a step of two hosts, network namespaces with a link of --rate Mb/s (0: not shaped), encrypted and with
             --insecure-network; a fifth of the steps. Needs to be root, or user namespaces

A ratio is the median of those of all rounds.
"""
import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from functools import partial

import common
from common import BIN, LOCKSTEP, ROOT, median

BATCHES = {"lenet": 256, "mlp-wide": 32}
WARM_UP = 5
IN_TRAINING = ("checkpoint", "metrics", "top", "trace")
WHAT = ("start", *IN_TRAINING, "tunnel")
OTHERWISE = "without"

# Two hosts with a rank each. Arguments: the link's rate, options of `lockstep run`, and the command of a rank.
TWO_HOSTS = f"""
set -euo pipefail
. {ROOT}/tests/hosts/hosts.sh
rate=$1 options=$2
shift 2
make_hosts n1 n2
if [ "$rate" != 0 ]; then
  for host in n1 n2; do
    tc qdisc add dev "to-$host" root tbf rate "${{rate}}mbit" burst 125000 limit 2000000
    tc -n "$host" qdisc add dev eth0 root tbf rate "${{rate}}mbit" burst 125000 limit 2000000
  done
fi
on() {{
  on_host "n$(($1 + 1))" {LOCKSTEP} run --nnodes 2 --node-rank "$1" --nproc-per-node 1 --master-addr 10.77.0.11 \\
    --master-port 29500 $options -- "${{@:2}}"
}}
on 1 "$@" &
on 0 "$@"
wait $!
"""
IN_NAMESPACES = ("unshare", "--map-root-user", "--user", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child",
                 "--mount-proc")


def options_of(model, steps, *options):
    return [*map(str, ("--model", model, "--data", "fashion-mnist", "--batch-size", BATCHES[model], "--threads", 1, "--lr", 0.01,
                       "--max-steps", steps, *options))]


def compare(title, base, rounds, runs):
    """Lets the runs take turns, and prints each beside one of them."""
    seconds = common.take_turns(rounds, runs)
    ratios = {name: median([own / other for own, other in zip(values, seconds[base])]) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{title:28} {name:36} {median(values):9.4f} s ({common.spread(values):>14}) {ratios[name]:7.3f} x", flush=True)
    print()
    return {"beside": base, "seconds": seconds, "ratios": ratios}


# ---- the start

def start_of(arguments):
    python = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = ROOT / "bench/first_step.py"
    train = [LOCKSTEP, "train", *options_of("lenet", 1), "--metrics", "/dev/stdout", "--quiet", "--ranks"]
    two_ranks = [LOCKSTEP, "run", "--nproc-per-node", 2, "--", sys.executable, script, "lockstep"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, script, "torch"]
    first_steps = {
        "PyTorch, one process": partial(common.seconds_until, "is done", [sys.executable, script, "torch"], python),
        "lockstep train, one process": partial(common.seconds_until, '"event":"step"', [*train, 1]),
        "lockstep in Python, one process": partial(common.seconds_until, "is done", [sys.executable, script, "lockstep"], python),
        "torchrun and DDP, two ranks": partial(common.seconds_until, "is done", torchrun, python),
        "lockstep train, two ranks": partial(common.seconds_until, '"event":"step"', [*train, 2]),
        "lockstep run and Python, two ranks": partial(common.seconds_until, "is done", two_ranks, python),
    }
    imports = {name: partial(common.seconds_until, "here", [sys.executable, "-c", f"{name}; print('here')"], python)
               for name in ("import torch", "import lockstep")}
    return {"first step": compare("first step", "PyTorch, one process", arguments.rounds, first_steps),
            "import": compare("import", "import torch", arguments.rounds, imports)}


# ---- beside the steps

def train(model, arguments, what):
    """The seconds of the whole command."""
    with tempfile.TemporaryDirectory(dir=BIN.parent) as folder:  # on a disk, where /tmp may be memory
        options = {"checkpoint": ("--checkpoint-dir", folder, "--checkpoint-every", arguments.every),
                   "metrics": ("--metrics", f"{folder}/metrics.jsonl"), "trace": ("--trace", f"{folder}/trace.json")}
        command = [LOCKSTEP, "train", *options_of(model, arguments.steps, "--ranks", 2, *options.get(what, ())), "--quiet"]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - start


def train_looked_at(model, arguments):
    with subprocess.Popen([LOCKSTEP, "top", "--json"], stdout=subprocess.PIPE) as top:
        try:
            top.stdout.readline()
            return train(model, arguments, None)
        finally:
            top.kill()


def steps_with(model, arguments):
    runs = {OTHERWISE: partial(train, model, arguments, None)}
    for what in IN_TRAINING:
        if what in arguments.only:
            runs[what] = partial(train_looked_at, model, arguments) if what == "top" else partial(train, model, arguments, what)
    return compare(f"{model}, {arguments.steps} steps", OTHERWISE, arguments.rounds, runs)


# ---- between hosts

def seconds_of_step(model, arguments, options):
    """Of the median step after the first ones."""
    command = [*IN_NAMESPACES, "bash", "-c", TWO_HOSTS, "bash", str(arguments.rate), options, LOCKSTEP, "train"]
    steps = WARM_UP + arguments.steps // 5
    events = common.train(*options_of(model, steps), command=command, LOCKSTEP_SECRET=secrets.token_hex(32))
    return median([event["seconds"] for event in events if event["event"] == "step"][WARM_UP:])


def tunnel(model, arguments):
    runs = {OTHERWISE: partial(seconds_of_step, model, arguments, "--insecure-network"),
            "tunnel": partial(seconds_of_step, model, arguments, "")}
    return compare(f"{model}, a step, {arguments.rate} Mb/s", OTHERWISE, arguments.rounds, runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--rate", type=int, default=1000, help="of the link between hosts, Mb/s; 0: not shaped")
    parser.add_argument("--save", action="store_true", help="keep these figures in bench/results/what_waits.json")
    arguments = parser.parse_args()
    print(f"{arguments.rounds} rounds in turn\n{common.machine()}\n")
    found = start_of(arguments) if "start" in arguments.only else {}
    for model in arguments.models:
        if set(IN_TRAINING) & set(arguments.only):
            found[f"{model}, steps"] = steps_with(model, arguments)
        if "tunnel" in arguments.only:
            found[f"{model}, tunnel, {arguments.rate} Mb/s"] = tunnel(model, arguments)
    if arguments.save:
        common.save_cases("what_waits", found, steps=arguments.steps, every=arguments.every)


if __name__ == "__main__":
    main()
