# SPDX-License-Identifier: Apache-2.0
"""Parametrised weights: spectral norm, whose power iteration is in buffers, and weight norm; orthogonal by a penalty."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(33)
    net = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)  # lockstep: optimizer = lockstep.SGD(net.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(3300 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(10, 6, generator=source)
        scores = model(x)
        last = net[4].weight
        penalty = (last @ last.T - torch.eye(2)).square().sum()
        loss = nn.functional.cross_entropy(scores, (x.prod(1) > 0).long()) + 0.01 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.state_dict()
