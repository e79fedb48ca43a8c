# SPDX-License-Identifier: Apache-2.0
"""Contrastive learning: two views of a sample are to be closer than the views of all others, on all ranks."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def views(source, count=6):
    """Two noisy looks at the same points."""
    points = torch.randn(count, 10, generator=source)
    return [points + 0.2 * torch.randn(count, 10, generator=source) for _ in range(2)]


def info_nce(first, second, temperature=0.2):
    """Over the global batch; the gradient goes back to the ranks whose views they are."""
    everybody = torch.cat(torch.distributed.nn.all_gather(second))
    mine = dist.get_rank() * len(first) + torch.arange(len(first))
    return nn.functional.cross_entropy(first @ everybody.T / temperature, mine)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    encoder = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 8))
    model = DistributedDataParallel(encoder)  # lockstep: model = lockstep.DistributedDataParallel(encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # lockstep: optimizer = lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(400 + dist.get_rank())
    for _ in range(20):
        first, second = (nn.functional.normalize(part, dim=1) for part in model(torch.cat(views(source))).chunk(2))
        loss = (info_nce(first, second) + info_nce(second, first)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module.state_dict()
