# SPDX-License-Identifier: Apache-2.0
"""Sharpness-aware minimisation: a step up to the worst weights nearby, the gradient there, and the update from where it was."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SAM:
    def __init__(self, parameters, optimizer, radius):
        self.parameters, self.optimizer, self.radius = list(parameters), optimizer, radius

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([each.grad.norm() for each in self.parameters]).norm()
        self.moves = [each.grad * (self.radius / (norm + 1e-12)) for each in self.parameters]
        for parameter, move in zip(self.parameters, self.moves):
            parameter.add_(move)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        for parameter, move in zip(self.parameters, self.moves):
            parameter.sub_(move)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net, share_parameters=False)
    sam = SAM(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), radius=0.05)  # lockstep: sam = SAM(model.parameters(), lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9), radius=0.05)
    source = torch.Generator().manual_seed(900 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(10, 5, generator=source)
        target = x[:, :3].abs().argmax(1)
        nn.functional.cross_entropy(model(x), target).backward()
        sam.climb()
        nn.functional.cross_entropy(model(x), target).backward()
        sam.step()
    return net.state_dict()
