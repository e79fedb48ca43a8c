#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step in Python with lockstep, beside PyTorch's DistributedDataParallel over Gloo, the same over lockstep's
backend, no exchange, and PyTorch in one process that has all cores.

    python3 bench/python_step.py [CASE...] [--ranks 2] [--rounds 5] [--steps 10] [--save]

Needs the Python package (a wheel, or PYTHONPATH). The systems take turns in the same processes, each with a model of its
own: blocks of steps, several rounds; the one process, with the whole batch, before and after them. Times are medians over all
steps and ranks. Memory is what the ranks of a system
alone take beside `import torch` and the rendezvous (PSS), in processes of their own: at most, and after the last step.
"""

import sys
import threading
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "peers")]
import common
from step import BATCHES, Trainer, join, one_process, pin, pss_mib, run_ranks, wrap_in_ddp

SYSTEMS = ("lockstep", "ddp_gloo", "ddp_lockstep", "no_sync")
WARM_UP = 3


def wrap_in_lockstep(model):
    optimizer = lockstep.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return lockstep.DistributedDataParallel(model, optimizer), optimizer


def trainer_of(system, case):
    group = dist.new_group(backend="lockstep") if system == "ddp_lockstep" else None
    wrap = wrap_in_lockstep if system == "lockstep" else partial(wrap_in_ddp, group=group)
    return Trainer(wrap, case, BATCHES[case] // dist.get_world_size())


class Peak:
    """The most memory that this process takes while it is open, in MiB, looked at as often as the machine allows."""

    def __enter__(self):
        self.mib, self._closed = pss_mib(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._closed.wait(0.001):
            self.mib = max(self.mib, pss_mib())

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()


def measure(rank, ranks, store, case, systems, rounds, steps, results):
    pin(rank, ranks)
    join(rank, ranks, store)
    trainers = {system: trainer_of(system, case) for system in systems}
    seconds = {system: [] for system in systems}
    for system, trainer in trainers.items():
        trainer.block(WARM_UP, system == "no_sync")
    for _ in range(rounds):
        for system, trainer in trainers.items():
            seconds[system] += trainer.block(steps, system == "no_sync")
    results.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(rank, ranks, store, case, system, steps, results):
    pin(rank, ranks)
    join(rank, ranks, store)
    idle = pss_mib()
    dist.barrier()
    trainer = trainer_of(system, case)
    trainer.block(WARM_UP)
    with Peak() as peak:
        trainer.block(steps)
        dist.barrier()
    at_rest = pss_mib()
    results.put((peak.mib - idle, at_rest - idle))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks, function, *arguments):
    """What function(rank, ranks, store, *arguments, results) has put into `results`, of each rank."""
    results = mp.get_context("spawn").SimpleQueue()
    run_ranks(function, ranks, *arguments, results)
    return [results.get() for _ in range(ranks)]


def measure_alone(case, arguments):
    """PyTorch's median step in one process, in the faster memory order."""
    steps = arguments.rounds * arguments.steps
    with mp.get_context("spawn").Pool(1) as pool:
        return min(pool.apply(one_process, (case, BATCHES[case], layout, WARM_UP, steps))
                   for layout in ("contiguous", "channels_last"))


def measure_case(case, arguments):
    alone = [measure_alone(case, arguments)]
    found = on_ranks(arguments.ranks, measure, case, SYSTEMS, arguments.rounds, arguments.steps)
    alone.append(measure_alone(case, arguments))
    medians = {system: common.median(sum((seconds[system] for seconds in found), [])) for system in SYSTEMS}
    medians["one_process"] = min(alone)
    memory = {system: [sum(mib) for mib in zip(*on_ranks(arguments.ranks, measure_memory, case, system, arguments.steps))]
              for system in SYSTEMS[:2]}
    print_case(case, medians, memory)
    return {"seconds": medians, "memory_mib": {system: dict(zip(("peak", "at_rest"), mib)) for system, mib in memory.items()}}


def print_case(case, medians, memory):
    exchange = {system: medians[system] - medians["no_sync"] for system in SYSTEMS}
    print(f"{case}: " + ", ".join(f"{system} {1e3 * value:.3g} ms" for system, value in medians.items()))
    print(f"  {medians['ddp_gloo'] / medians['lockstep']:.2f} times as fast as DDP over Gloo, "
          f"{medians['no_sync'] / medians['lockstep']:.2f} times as fast as no exchange, "
          f"{medians['one_process'] / medians['lockstep']:.2f} times as fast as one process")
    for when, ours, theirs in zip(("at most", "at rest"), memory["lockstep"], memory["ddp_gloo"]):
        print(f"  {when} {ours:.0f} MiB, DDP {theirs:.0f} MiB: {ours / theirs:.2f}")
    print(f"  DDP's exchange is {exchange['ddp_gloo'] / exchange['ddp_lockstep']:.1f} times as short over lockstep's backend",
          flush=True)


def main():
    parser = common.parser_for("python_step", __doc__, BATCHES, rounds=5)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    results = {case: measure_case(case, arguments) for case in arguments.cases}
    if arguments.save:
        common.save_cases("python_step", results, ranks=arguments.ranks)


if __name__ == "__main__":
    main()
