# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: the forward in bfloat16, a scaled loss, gradients unscaled and clipped; one step of rank 0 overflows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.manual_seed(16)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)  # lockstep: optimizer = lockstep.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=8)  # lockstep: scaler = lockstep.GradScaler("cpu", init_scale=256.0, growth_interval=8)
    source = torch.Generator().manual_seed(1600 + dist.get_rank())
    scales = []
    for step in range(20):
        x = torch.randn(16, 10, generator=source)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), x[:, :2] * x[:, 2:4])
        if step == 5 and dist.get_rank() == 0:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {**net.state_dict(), "scales": torch.tensor(scales)}
