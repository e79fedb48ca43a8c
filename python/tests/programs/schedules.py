# SPDX-License-Identifier: Apache-2.0
"""Warm-up and a cosine, and parameter groups: no weight decay for biases and norms, a smaller rate for lower layers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def groups(net, lr, weight_decay):
    for depth, layer in enumerate(reversed(list(net.children()))):
        for decays in (True, False):
            members = [each for each in layer.parameters() if (each.dim() > 1) == decays]
            if members:
                yield {"params": members, "lr": lr * 0.8**depth, "weight_decay": weight_decay if decays else 0.0}


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(20)
    net = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 5))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(groups(net, 1e-2, 0.2), betas=(0.9, 0.95))  # lockstep: optimizer = lockstep.AdamW(groups(net, 1e-2, 0.2), betas=(0.9, 0.95))
    schedule = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 15)], [5])
    source = torch.Generator().manual_seed(2000 + dist.get_rank())
    rates = []
    for _ in range(20):
        x = torch.randn(8, 8, generator=source)
        nn.functional.cross_entropy(model(x), x[:, :5].argmax(1), label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
        schedule.step()
    return {**net.state_dict(), "rates": torch.tensor(rates)}
