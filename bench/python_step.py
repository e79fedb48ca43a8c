#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step in Python with lockstep, beside PyTorch's DistributedDataParallel over Gloo, the same over lockstep's
backend, and no exchange.

    python3 bench/python_step.py [CASE...] [--ranks 2] [--rounds 5] [--steps 10] [--save]

Needs the Python package (a wheel, or PYTHONPATH). The systems take turns in the same processes, each with a model of its
own: blocks of steps, several rounds. Times are medians over all steps and ranks. Memory is what the ranks of a system
alone take beside `import torch` and the rendezvous (PSS), in processes of their own.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "peers")]
import common
from step import CASES, pss_mib, samples

# Of a rank, and the memory format of both systems: those of `lockstep bench step` on two ranks.
CASES_HERE = {
    "mlp": (16, torch.contiguous_format),
    "alexnet": (4, torch.channels_last),
    "lenet": (128, torch.channels_last),
    "resnet18-32": (32, torch.channels_last),
    "gpt": (4, torch.contiguous_format),
}
SYSTEMS = ("lockstep", "ddp_gloo", "ddp_lockstep", "no_sync")
WARM_UP = 3


class Trainer:
    """One system with a model of its own."""

    def __init__(self, system, case, group):
        batch, memory_format = CASES_HERE[case]
        make, shape, classes = CASES[case]
        torch.manual_seed(1)
        model, (self.data, self.target) = make(), samples(shape, classes, batch)
        if shape is not None and len(shape) == 3:
            model = model.to(memory_format=memory_format)
            self.data = self.data.contiguous(memory_format=memory_format)
        self.no_sync = system == "no_sync"
        if system == "lockstep":
            self.optimizer = lockstep.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            self.model = lockstep.DistributedDataParallel(model, self.optimizer)
        else:
            self.model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def step(self):
        start = time.perf_counter()
        with self.model.no_sync() if self.no_sync else nullcontext():
            loss = F.cross_entropy(self.model(self.data).flatten(0, -2), self.target.flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def block(self, steps):
        dist.barrier()
        return [self.step() for _ in range(steps)]


def measure(rank, ranks, store, case, systems, rounds, steps, results):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank::ranks] or os.sched_getaffinity(0))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.new_group(backend="lockstep") if "ddp_lockstep" in systems else None
    idle = pss_mib()
    trainers = {system: Trainer(system, case, group if system == "ddp_lockstep" else None) for system in systems}
    seconds = {system: [] for system in systems}
    for trainer in trainers.values():
        trainer.block(WARM_UP)
    for _ in range(rounds):
        for system, trainer in trainers.items():
            seconds[system] += trainer.block(steps)
    dist.barrier()
    results.put((seconds, pss_mib() - idle))
    dist.barrier()
    dist.destroy_process_group()


def run(case, systems, arguments):
    """Seconds of every step by system, of all ranks; and what the ranks take together in MiB."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        values = (arguments.ranks, folder + "/store", case, systems, arguments.rounds, arguments.steps, results)
        mp.spawn(measure, values, nprocs=arguments.ranks)
    found = [results.get() for _ in range(arguments.ranks)]
    return {system: sum((seconds[system] for seconds, _ in found), []) for system in systems}, sum(mib for _, mib in found)


def measure_case(case, arguments):
    seconds, _ = run(case, SYSTEMS, arguments)
    medians = {system: common.median(values) for system, values in seconds.items()}
    memory = {system: run(case, (system,), argparse.Namespace(**{**vars(arguments), "rounds": 1}))[1] for system in SYSTEMS[:2]}
    exchange = {system: medians[system] - medians["no_sync"] for system in SYSTEMS}
    print(f"{case}: " + ", ".join(f"{system} {1e3 * value:.1f} ms" for system, value in medians.items()))
    print(f"  {medians['ddp_gloo'] / medians['lockstep']:.2f} times as fast as DDP over Gloo, "
          f"{medians['no_sync'] / medians['lockstep']:.2f} times as fast as no exchange; "
          f"{memory['lockstep']:.0f} MiB, DDP {memory['ddp_gloo']:.0f} MiB: {memory['lockstep'] / memory['ddp_gloo']:.2f}")
    print(f"  DDP's exchange is {exchange['ddp_gloo'] / exchange['ddp_lockstep']:.1f} times as short over lockstep's backend", flush=True)
    return {"seconds": medians, "memory_mib": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES_HERE), metavar="CASE", help=", ".join(CASES_HERE))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each system in a round")
    parser.add_argument("--save", action="store_true", help="keep the result in bench/results/python_step.json")
    arguments = parser.parse_args()
    results = {case: measure_case(case, arguments) for case in arguments.cases}
    if arguments.save:
        common.save("python_step", {"ranks": arguments.ranks, "cases": results})


if __name__ == "__main__":
    main()
