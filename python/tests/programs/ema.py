# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the weights, which is what is evaluated in the end."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Average:
    def __init__(self, net, decay):
        self.decay, self.net = decay, copy.deepcopy(net).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, net):
        for mine, now in zip(self.net.parameters(), net.parameters()):
            mine.mul_(self.decay).add_(now, alpha=1 - self.decay)
        for mine, now in zip(self.net.buffers(), net.buffers()):
            mine.copy_(now)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.SiLU(), nn.Linear(20, 1))
    average = Average(net, 0.9)
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(800 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(12, 6, generator=source)
        loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model.module)
    score = average.net(torch.linspace(-1, 1, 24).view(4, 6))
    return {**net.state_dict(), **average.net.state_dict(prefix="average."), "score": score.detach()}
