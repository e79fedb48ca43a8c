# SPDX-License-Identifier: Apache-2.0
"""Stops in the middle of an epoch, and goes on from a checkpoint: model, optimizer, schedule, place in the epoch."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def samples():
    source = torch.Generator().manual_seed(17)
    x = torch.randn(96, 6, generator=source)
    return TensorDataset(x, x[:, :3].argmax(1))


def train(checkpoint, until):
    """Steps up to `until`, of 6 samples on each rank; returns a checkpoint."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    if checkpoint is not None:
        net.load_state_dict(checkpoint["model"])
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    step = 0
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        step = checkpoint["step"]
    sampler = DistributedSampler(samples(), shuffle=True, seed=3)
    loader = DataLoader(samples(), batch_size=6, sampler=sampler, drop_last=True)
    while step < until:
        sampler.set_epoch(step // len(loader))
        for number, (x, y) in enumerate(loader):
            if number < step % len(loader) or step == until:
                continue
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step % len(loader) == 0:
                break
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step}


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(17)
    file = io.BytesIO()
    torch.save(train(None, until=9), file)
    file.seek(0)
    torch.manual_seed(99)  # a new process begins with other weights
    resumed = train(torch.load(file), until=20)
    states = {f"{name}.{number}": value for number, state in resumed["optimizer"]["state"].items() for name, value in state.items()}
    return {**resumed["model"], **states}
