# SPDX-License-Identifier: Apache-2.0
"""L-BFGS with a line search on the whole data; the closure's loss is the mean over all ranks, so that all decide alike."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(21)
    net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    source = torch.Generator().manual_seed(2100 + dist.get_rank())
    x = torch.randn(40, 3, generator=source)
    y = torch.sin(x.sum(1, keepdim=True))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    losses = [optimizer.step(closure) for _ in range(5)]
    return {**net.state_dict(), "losses": torch.stack(losses)}
