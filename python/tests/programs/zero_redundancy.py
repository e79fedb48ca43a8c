# SPDX-License-Identifier: Apache-2.0
"""ZeroRedundancyOptimizer: each rank keeps the optimizer's state of its part of the parameters. Its state is gathered on rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(22)
    net = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 4))
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    source = torch.Generator().manual_seed(2200 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(8, 5, generator=source)
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    moments = torch.zeros(1)
    if dist.get_rank() == 0:
        moments += sum(state["exp_avg_sq"].sum() for state in optimizer.state_dict()["state"].values())
    dist.broadcast(moments, 0)
    return {**net.state_dict(), "moments": moments}
