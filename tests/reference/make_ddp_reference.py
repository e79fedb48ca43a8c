# SPDX-License-Identifier: Apache-2.0
"""Makes lenet_ddp.safetensors: what PyTorch's own DistributedDataParallel does with LeNet in 20 steps on two ranks.

    PYTHONPATH=.deps/pytorch python3 tests/reference/make_ddp_reference.py

Weights, images and order come from formulas (see `ramp`), so that the C++ test starts from the same ones. The file holds,
for each parameter, every 97th value in float64 and the norm of the whole, and the loss of each step.
"""
import json
import os
import struct
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

STEPS, BATCH, RANKS, STRIDE = 20, 10, 2, 97


def ramp(count, seed):
    """`count` values in [-0.5, 0.5) that any language computes alike."""
    return ((torch.arange(count, dtype=torch.int64) * 7919 + seed * 104729) % 1009).double() / 1009 - 0.5


def lenet():
    net = nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)).double()
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_((ramp(parameter.numel(), i) * 0.2).reshape(parameter.shape))
    return net


def batch(step):
    data = ramp(BATCH * 784, 1000 + step).reshape(BATCH, 1, 28, 28)
    target = (torch.arange(BATCH) * 3 + step) % 10
    return data, target


def write_safetensors(path, tensors):
    header, blob = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F64", "shape": list(tensor.shape), "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + blob)


def train(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    net = nn.parallel.DistributedDataParallel(lenet())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    part = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
    losses = []
    for step in range(STEPS):
        data, target = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(data[part]), target[part])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / RANKS)
    if rank == 0:
        tensors = {"losses": torch.stack(losses)}
        for i, parameter in enumerate(net.parameters()):
            flat = parameter.detach().flatten()
            tensors[f"parameter.{i}"] = flat[::STRIDE]
            tensors[f"norm.{i}"] = flat.norm()
        write_safetensors(Path(__file__).with_name("lenet_ddp.safetensors"), tensors)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(free_port,), nprocs=RANKS)
