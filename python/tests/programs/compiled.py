# SPDX-License-Identifier: Apache-2.0
"""torch.compile of the wrapped model and of the loss around it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(nn.functional.silu(self.first(x)))


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(23)
    net = nn.Sequential(nn.Linear(6, 12), Residual(12), nn.Linear(12, 3))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.AdamW(net.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager")
    loss_of = torch.compile(lambda scores, labels: nn.functional.cross_entropy(scores, labels) + 1e-3 * scores.square().mean(), backend="aot_eager")
    source = torch.Generator().manual_seed(2300 + dist.get_rank())
    for step in range(20):
        x = torch.randn(8 if step < 10 else 12, 6, generator=source)  # compiled again with another shape
        loss_of(compiled(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()
