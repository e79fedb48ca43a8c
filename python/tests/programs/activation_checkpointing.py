# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: the forward of each block, dropout included, is made again in backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(depth))
        self.leave = nn.Linear(width, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(22)
    model = DistributedDataParallel(Deep())  # lockstep: model = lockstep.DistributedDataParallel(Deep())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(2200 + dist.get_rank())  # of dropout
    for _ in range(20):
        x = torch.randn(8, 6)
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict()
