# SPDX-License-Identifier: Apache-2.0
"""A step of PyTorch's DDP on a parameter-heavy model, over lockstep and over Gloo, beside the same step without exchange.

    python3 python/bench_ddp.py --ranks 2 --steps 15

All take turns in the same processes, so that they meet the same machine. Medians over all steps and ranks.
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep  # noqa: F401  registers the backend


def mlp():
    """25.1 M parameters."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 4096))


class Trainer:
    def __init__(self, group, batch_size, zero_in_place):
        self.model = DistributedDataParallel(mlp(), process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.zero_in_place = zero_in_place
        self.data = torch.randn(batch_size, 1024)
        self.target = torch.randint(4096, (batch_size,))

    def seconds_of_a_step(self, exchange):
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if exchange else self.model.no_sync():
            self.optimizer.zero_grad(set_to_none=not self.zero_in_place)
            nn.functional.cross_entropy(self.model(self.data), self.target).backward()
        self.optimizer.step()
        return time.perf_counter() - start


def measure(rank, arguments, store, results):
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.ranks))
    dist.init_process_group("lockstep", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    trainers = {"lockstep": Trainer(None, arguments.batch_size, arguments.zero_in_place)}
    trainers["gloo"] = Trainer(dist.new_group(backend="gloo"), arguments.batch_size, arguments.zero_in_place)
    seconds = {"lockstep": [], "gloo": [], "no_sync": []}
    for step in range(arguments.steps + 2):
        for name, taken in seconds.items():
            trainer = trainers.get(name, trainers["lockstep"])
            one = trainer.seconds_of_a_step(exchange=name != "no_sync")
            if step >= 2:
                taken.append(one)
    results.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def report(all_seconds):
    medians = {name: statistics.median(sum((one[name] for one in all_seconds), [])) for name in all_seconds[0]}
    print(f"{'':10} {'step, ms':>10} {'exchange, ms':>14}")
    for name, seconds in medians.items():
        print(f"{name:10} {1e3 * seconds:10.1f} {1e3 * (seconds - medians['no_sync']):14.1f}")
    exchange = {name: seconds - medians["no_sync"] for name, seconds in medians.items()}
    print(f"the exchange is {exchange['gloo'] / exchange['lockstep']:.1f} times as short as over gloo")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="of a rank")
    parser.add_argument("--zero-in-place", action="store_true",
                        help="zero_grad(set_to_none=False): gradients stay in DDP's buckets, and DDP need not copy them there")
    arguments = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (arguments, os.path.join(folder, "store"), results), nprocs=arguments.ranks)
    report([results.get() for _ in range(arguments.ranks)])


if __name__ == "__main__":
    main()
