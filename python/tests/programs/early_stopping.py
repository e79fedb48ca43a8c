# SPDX-License-Identifier: Apache-2.0
"""Early stopping: the validation loss is the mean over all ranks' parts; the best weights come back in the end."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def points(seed, count):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=source)
    return x, x[:, :1].sign() + torch.randn(count, 1, generator=source)


@torch.no_grad()
def validation_loss(model, x, y):
    model.eval()
    sums = torch.stack([(model(x) - y).square().sum(), torch.tensor(float(len(y)))])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(patience=3):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(14)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.0), nn.Linear(48, 1)))  # lockstep: model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.0), nn.Linear(48, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=2e-2)
    x, y = points(1400 + dist.get_rank(), 12)
    held = points(1450 + dist.get_rank(), 20 + dist.get_rank())
    best, since, losses = float("inf"), 0, []
    while since < patience and len(losses) < 20:
        for part in range(3):
            loss = nn.functional.mse_loss(model(x[part::3]), y[part::3])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(validation_loss(model, *held))
        since = 0 if losses[-1] < best else since + 1
        if since == 0:
            best, kept = losses[-1], copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return {**model.module.state_dict(), "losses": torch.tensor(losses)}
