# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST with PyTorch's DistributedDataParallel over Gloo.

    pytorch_ddp.py RANKS LAYOUT [MODEL BATCH STEPS]

LAYOUT: contiguous | channels_last. MODEL: lenet | mlp-wide. Prints as JSON the seconds of an epoch of LeNet with batches of
256, or seconds per step: STEPS of them after ten that warm up. The same model, batches, optimizer and normalisation as `lockstep train`; the images are
indexed out of memory, which is faster than a DataLoader.
"""
import gzip
import json
import struct
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FOLDER = "/usr/share/datasets/fashion-mnist/"
WARM_UP = 10


def read_idx(name):
    raw = gzip.open(FOLDER + name).read()
    shape = struct.unpack(">" + "I" * raw[3], raw[4 : 4 + 4 * raw[3]])
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp_wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))


def train(rank, ranks, layout, model, batch, steps, store):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method="file://" + store)
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    images = ((read_idx("train-images-idx3-ubyte.gz").float() / 255 - 0.2860) / 0.3530).unsqueeze(1)
    labels = read_idx("train-labels-idx1-ubyte.gz").long()
    net = nn.parallel.DistributedDataParallel({"lenet": lenet, "mlp-wide": mlp_wide}[model]().to(memory_format=memory_format))
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
        data = images[part].contiguous(memory_format=memory_format)
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
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(int(ranks), layout, model, int(batch), int(steps), folder + "/store"),
                                    nprocs=int(ranks))
