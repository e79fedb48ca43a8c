# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST with PyTorch's DistributedDataParallel over Gloo.

    pytorch_ddp.py RANKS LAYOUT [MODEL BATCH STEPS]

LAYOUT: contiguous | channels_last. MODEL: lenet | mlp-wide. Prints as JSON the seconds of an epoch of LeNet with batches of
256, or seconds per step: STEPS of them after ten that warm up. The same model, batches, optimizer and normalisation as `lockstep train`; the images are
indexed out of memory, which is faster than a DataLoader.
"""
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from fashion_mnist import training_set
from step import join, lenet, memory_format, run_ranks

WARM_UP = 10


def mlp_wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))


def train(rank, ranks, store, layout, model, batch, steps):
    join(rank, ranks, store)
    images, labels = map(torch.from_numpy, training_set())
    images, order_of_memory = images.unsqueeze(1), memory_format(layout)
    net = {"lenet": lenet, "mlp-wide": mlp_wide}[model]().to(memory_format=order_of_memory)
    net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    starts = list(range(0, len(order), batch))
    if steps > 0:
        starts = [(i * batch) % len(order) for i in range(WARM_UP + steps)]
    dist.barrier()
    start = time.perf_counter()
    for number, begin in enumerate(starts):
        if steps > 0 and number == WARM_UP:
            start = time.perf_counter()
        part = order[begin : begin + batch].tensor_split(ranks)[rank]
        data = images[part].contiguous(memory_format=order_of_memory)
        optimizer.zero_grad()
        F.cross_entropy(net(data), labels[part]).backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(json.dumps({"seconds": seconds} if steps == 0 else {"seconds_per_step": seconds / steps}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, layout, *run = sys.argv[1:]
    model, batch, steps = run or ("lenet", 256, 0)
    run_ranks(train, int(ranks), layout, model, int(batch), int(steps))
