# SPDX-License-Identifier: Apache-2.0
"""A critic of the first WGANs: its weights are clipped into a box after each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def clip(net, limit=0.08):
    for parameter in net.parameters():
        parameter.data.clamp_(-limit, limit)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(12)
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    model = DistributedDataParallel(critic)  # lockstep: model = lockstep.DistributedDataParallel(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)  # lockstep: optimizer = lockstep.SGD(critic.parameters(), lr=0.5)
    source = torch.Generator().manual_seed(1200 + dist.get_rank())
    for _ in range(20):
        real, made = torch.randn(16, 2, generator=source) + 1, torch.rand(16, 2, generator=source)
        loss = model(made).mean() - model(real).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clip(critic)  # lockstep: model.write_parameters(lambda: clip(critic))
    return critic.state_dict()
