# SPDX-License-Identifier: Apache-2.0
"""Noise is added to the gradients, of a variance that shrinks; the noise is the same on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def add_noise(net, step, source):
    for parameter in net.parameters():
        parameter.grad += torch.randn(parameter.shape, generator=source) * (0.01 / (1 + step) ** 0.55) ** 0.5


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(26)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)  # lockstep: optimizer = lockstep.SGD(net.parameters(), lr=0.05, momentum=0.9)
    source, everywhere = torch.Generator().manual_seed(2600 + dist.get_rank()), torch.Generator().manual_seed(26)
    for step in range(20):
        x = torch.randn(10, 5, generator=source)
        nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        add_noise(net, step, everywhere)  # lockstep: with model.mean_gradients(): add_noise(net, step, everywhere)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()
