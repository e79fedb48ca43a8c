#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step on the cores of one machine, as PyTorch's users write it: AdamW, gradients clipped by norm, one global batch.
lockstep, PyTorch's DDP over Gloo, and one process on all cores.

    bench/one_machine.py [CASE...] [--rounds 3] [--steps 10] [--save]

bert is BERT base (110 M parameters, masked tokens); it needs Hugging Face's transformers. All need lockstep's Python package (a
wheel, or PYTHONPATH). The systems take turns, each in processes of its own: 2 ranks that share the cores, or one process that has
them all. Times are medians over all steps of rank 0; the range is that of the rounds' medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lockstep

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "peers")]
import common
import step as models

RANKS = 2
WARM_UP = 3
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
BATCHES = {"lenet": 256, "mlp": 32, "alexnet": 8, "resnet18-32": 64, "gpt": 8, "bert": 8}  # of all ranks
CHANNELS_LAST = {"lenet", "alexnet", "resnet18-32"}


def bert(batch):
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(attn_implementation="sdpa"))
    tokens = torch.randint(1000, 30000, (batch, 128))
    return model, lambda wrapped: wrapped(input_ids=tokens, labels=tokens).loss


def of_the_peers(case, batch):
    make, shape, classes = models.CASES[case]
    model, (data, target) = make(), models.samples(shape, classes, batch)
    if case in CHANNELS_LAST:
        model, data = model.to(memory_format=torch.channels_last), data.to(memory_format=torch.channels_last)
    return model, lambda wrapped: F.cross_entropy(wrapped(data).flatten(0, -2), target.flatten())


def with_torch(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    return wrapped, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def with_lockstep(clip):
    def make(model):
        optimizer = lockstep.AdamW(model.parameters(), **ADAMW)
        return lockstep.DistributedDataParallel(model, optimizer), optimizer, lambda: clip(model, optimizer)

    return make


# The backend of its process group, if it has one, and what makes its model.
SYSTEMS = {
    "lockstep": ("lockstep", with_lockstep(lambda _, optimizer: optimizer.clip_grad_norm(1.0))),
    "lockstep.clip_grad_norm_": ("lockstep", with_lockstep(lambda model, _: lockstep.clip_grad_norm_(model.parameters(), 1.0))),
    "DDP over Gloo": ("gloo", with_torch),
    "one process": (None, with_torch),
}


def memory_of_ranks():
    """Of all ranks together, what they share counted once: MiB. Parameters, gradients and the optimizer's state, after backward()."""
    with open("/proc/self/smaps_rollup") as file:
        kibibytes = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    total = torch.tensor(kibibytes / 1024)
    if dist.is_initialized():
        dist.all_reduce(total)
    return round(total.item())


def job(case, name, steps):
    """What a rank does. Rank 0 prints the seconds of its steps, and the memory of all ranks."""
    backend, make = SYSTEMS[name]
    if backend:
        dist.init_process_group(backend)
    torch.manual_seed(1)
    batch = BATCHES[case] // (RANKS if backend else 1)
    model, loss_of = bert(batch) if case == "bert" else of_the_peers(case, batch)
    wrapped, optimizer, clip = make(model)
    seconds = []
    for step in range(WARM_UP + steps):
        start = time.perf_counter()
        loss_of(wrapped).backward()
        if step == WARM_UP - 1:
            mebibytes = memory_of_ranks()
        clip()
        optimizer.step()
        optimizer.zero_grad()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(BATCHES), metavar="CASE", help=", ".join(BATCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each system in a round")
    parser.add_argument("--save", action="store_true", help="keep it in bench/results/one_machine.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        return job(arguments.cases[0], arguments.job, arguments.steps)
    print(f"{arguments.rounds} rounds in turn, torch {torch.__version__}\n{common.machine()}\n")
    found = {case: measure(case, arguments) for case in arguments.cases}
    if arguments.save:
        kept = common.kept("one_machine").get("cases", {})
        common.save("one_machine", {"torch": torch.__version__, "ranks": RANKS, "batches": BATCHES, "cases": {**kept, **found}})


if __name__ == "__main__":
    main()
