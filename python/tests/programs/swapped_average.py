# SPDX-License-Identifier: Apache-2.0
"""The averaged weights are put into the model to validate it, every fifth step, and those of training back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def validate(net, average, x):
    kept = [each.clone() for each in net.parameters()]
    for parameter, mean in zip(net.parameters(), average):
        parameter.copy_(mean)
    score = net(x).square().mean()
    for parameter, value in zip(net.parameters(), kept):
        parameter.copy_(value)
    return score


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(29)
    net = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 1))
    average = [each.detach().clone() for each in net.parameters()]
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.Adam(net.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(2900 + dist.get_rank())
    scores = []
    for step in range(20):
        x = torch.randn(12, 6, generator=source)
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).cos()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(average, net.parameters()):
            mean.lerp_(parameter.detach(), 0.1)
        if step % 5 == 4:
            score = validate(net, average, torch.linspace(-1, 1, 24).view(4, 6))  # lockstep: score = model.write_parameters(lambda: validate(net, average, torch.linspace(-1, 1, 24).view(4, 6)))
            scores.append(score)
    return {**net.state_dict(), "scores": torch.stack(scores)}
