# SPDX-License-Identifier: Apache-2.0
"""What sgemm reaches on one core while the others are as busy: GFLOP/s of 1024 x 1024 products, one process per core."""
import json
import sys
import time

import torch


def measure(rank, ranks, queue):
    torch.set_num_threads(1)
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    for _ in range(5):
        a @ b
    rates = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        rates.append(2 * 1024**3 / (time.perf_counter() - start) / 1e9)
    queue.put(sorted(rates)[len(rates) // 2])


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(measure, args=(ranks, queue), nprocs=ranks)
    print(json.dumps({"gflops_per_core": min(queue.get() for _ in range(ranks))}))
