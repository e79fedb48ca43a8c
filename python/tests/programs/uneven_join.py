# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs: rank r has 20 - 3 r batches; join() lets the others go on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batches(rank):
    source = torch.Generator().manual_seed(2400 + rank)
    for _ in range(20 - 3 * rank):
        x = torch.randn(8, 4, generator=source)
        yield x, x.sin().sum(1, keepdim=True)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(24)
    net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)  # lockstep: optimizer = lockstep.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    with model.join():
        for x, y in batches(dist.get_rank()):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return net.state_dict()
