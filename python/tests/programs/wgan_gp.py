# SPDX-License-Identifier: Apache-2.0
"""WGAN with a gradient penalty: the critic is trained through the gradient of its own output; several critic steps for one of
the generator."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # lockstep: from lockstep import DistributedDataParallel as DDP
from torch.optim import Adam  # lockstep: from lockstep import Adam


def penalty(critic, real, made, source):
    share = torch.rand(len(real), 1, generator=source)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    generator = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)))
    critic = DDP(nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1)))
    generators, critics = Adam(generator.parameters(), lr=1e-3), Adam(critic.parameters(), lr=2e-3)
    source = torch.Generator().manual_seed(300 + dist.get_rank())
    for _ in range(7):
        for _ in range(3):
            real = torch.randn(12, 2, generator=source) * 0.3 + 1
            with torch.no_grad():
                made = generator(torch.randn(12, 3, generator=source))
            loss = critic(made).mean() - critic(real).mean() + 10 * penalty(critic, real, made, source)
            critics.zero_grad()
            loss.backward()
            critics.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        generators.zero_grad()
        (-critic(generator(torch.randn(12, 3, generator=source))).mean()).backward()
        generators.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
    return {**generator.module.state_dict(prefix="generator."), **critic.module.state_dict(prefix="critic.")}
