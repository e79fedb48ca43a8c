#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step on the cores of one machine, as PyTorch's users write it: AdamW, gradients clipped by norm, one global batch.
lockstep, PyTorch's DDP over Gloo, and one process on all cores.

    bench/one_machine.py [CASE...] [--rounds 3] [--steps 10] [--save]

bert is BERT base (110 M parameters, masked tokens); it needs Hugging Face's transformers. All need lockstep's Python package (a
wheel, or PYTHONPATH). The systems take turns, each in processes of its own: 2 ranks that share the cores, or one process that has
them all. Times are medians over all steps of rank 0; the range is that of the rounds' medians.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "peers")]
import common
import step as models

RANKS = 2
WARM_UP = 3
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
BATCHES = {**models.BATCHES, "bert": 8}  # of all ranks


def with_torch(model):
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    return wrapped, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def with_lockstep(model):
    optimizer = lockstep.AdamW(model.parameters(), **ADAMW)
    return lockstep.DistributedDataParallel(model, optimizer), optimizer


def clip_with(library):
    return lambda trainer: library.clip_grad_norm_(trainer.model.parameters(), 1.0)


# The backend of its process group, if it has one, what wraps its model, and what clips.
SYSTEMS = {
    "lockstep": ("lockstep", with_lockstep, lambda trainer: trainer.optimizer.clip_grad_norm(1.0)),
    "lockstep.clip_grad_norm_": ("lockstep", with_lockstep, clip_with(lockstep)),
    "DDP over Gloo": ("gloo", with_torch, clip_with(torch.nn.utils)),
    "one process": (None, with_torch, clip_with(torch.nn.utils)),
}


def job(case, name, steps):
    """What a rank does. Rank 0 prints the seconds of its steps, and the memory (PSS) of all ranks in MiB, after backward()."""
    backend, wrap, clip = SYSTEMS[name]
    if backend:
        dist.init_process_group(backend)
    trainer = models.Trainer(wrap, case, BATCHES[case] // (RANKS if backend else 1))
    seconds = []
    for step in range(WARM_UP + steps):
        start = time.perf_counter()
        trainer.loss().backward()
        if step == WARM_UP - 1:
            mebibytes = round(models.summed(models.pss_mib()))
        clip(trainer)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({"seconds": seconds[WARM_UP:], "mebibytes": mebibytes}), flush=True)
    if backend:
        dist.destroy_process_group()


def run(case, name, steps):
    this = [sys.executable, __file__, "--job", name, case, f"--steps={steps}"]
    is_alone = SYSTEMS[name][0] is None
    command = this if is_alone else [common.LOCKSTEP, "run", "--nproc-per-node", str(RANKS), "--", *this]
    threads = os.cpu_count() if is_alone else max(1, os.cpu_count() // RANKS)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    line = next(line for line in done.stdout.splitlines() if '{"seconds"' in line)
    return json.loads(line[line.index("{"):])


def measure(case, arguments):
    found = common.take_turns(arguments.rounds, {name: lambda name=name: run(case, name, arguments.steps) for name in SYSTEMS})
    medians = {name: statistics.median(sum((each["seconds"] for each in runs), [])) for name, runs in found.items()}
    base = medians["lockstep"]
    rounds = {name: [statistics.median(each["seconds"]) for each in runs] for name, runs in found.items()}
    for name, of_rounds in rounds.items():
        spread = common.spread([1e3 * seconds for seconds in of_rounds])
        mebibytes = max(each["mebibytes"] for each in found[name])
        print(f"{case:12} {name:26} {1e3 * medians[name]:8.1f} ms ({spread})  {medians[name] / base:5.2f} x  {mebibytes:6} MiB", flush=True)
    return {name: {"seconds": medians[name], "round_medians": rounds[name], "mebibytes": max(each["mebibytes"] for each in found[name])} for name in SYSTEMS}


def main():
    parser = common.parser_for("one_machine", __doc__, BATCHES, rounds=3)
    parser.add_argument("--job", help="NAME: what a rank of this system does")
    arguments = parser.parse_args()
    if arguments.job:
        return job(arguments.cases[0], arguments.job, arguments.steps)
    print(f"{arguments.rounds} rounds in turn, torch {torch.__version__}\n{common.machine()}\n")
    found = {case: measure(case, arguments) for case in arguments.cases}
    if arguments.save:
        common.save_cases("one_machine", found, torch=torch.__version__, ranks=RANKS, batches=BATCHES)


if __name__ == "__main__":
    main()
