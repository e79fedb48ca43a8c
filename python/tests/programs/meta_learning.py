# SPDX-License-Identifier: Apache-2.0
"""MAML: forward makes two steps of gradient descent on a task, and the loss is that of the weights after them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

mse_loss = nn.functional.mse_loss


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
        self.rates = nn.Parameter(torch.full((2,), 0.05))

    def forward(self, x, y, asked):
        weights = dict(self.net.named_parameters())
        for rate in self.rates:
            loss = mse_loss(functional_call(self.net, weights, x), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: value - rate * gradient for (name, value), gradient in zip(weights.items(), gradients)}
        return functional_call(self.net, weights, asked)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(30)
    model = DistributedDataParallel(Learner())  # lockstep: model = lockstep.DistributedDataParallel(Learner())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=5e-3)
    source = torch.Generator().manual_seed(3000 + dist.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        height, phase = torch.rand(2, generator=source)
        x, asked = 6 * torch.rand(2, 10, 1, generator=source) - 3
        loss = mse_loss(model(x, height * (x + phase).sin(), asked), height * (asked + phase).sin())
        loss.backward()
        optimizer.step()
    return model.module.state_dict()
