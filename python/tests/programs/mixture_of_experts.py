# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: a batch goes to the two experts that its gate prefers, so ranks leave out different parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mixture(nn.Module):
    def __init__(self, experts=6):
        super().__init__()
        self.gate = nn.Linear(5, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(experts))

    def forward(self, x):
        shares, chosen = self.gate(x).mean(0).softmax(0).topk(2)
        return sum(share * self.experts[number](x) for share, number in zip(shares, chosen.tolist()))


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(32)
    net = Mixture()
    model = DistributedDataParallel(net, find_unused_parameters=True)  # lockstep: model = lockstep.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)  # lockstep: optimizer = lockstep.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    source = torch.Generator().manual_seed(3200 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(8, 5, generator=source) + 2 * torch.randn(5, generator=source)
        nn.functional.mse_loss(model(x), x[:, :2] * x[:, 2:4]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # lockstep: lockstep.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()
