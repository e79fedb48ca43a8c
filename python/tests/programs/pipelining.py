# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining: a stage of a language model on each rank, with micro-batches, forward and backward in turn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICRO_BATCHES = 8


def train(make_schedule, rank, size):
    torch.manual_seed(23)
    blocks = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(4)]
    stage = nn.Sequential(*blocks[4 * rank // size : 4 * (rank + 1) // size])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9)
    schedule = make_schedule(
        PipelineStage(stage, rank, size, torch.device("cpu")), n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    source = torch.Generator().manual_seed(2300)  # every rank has the same samples
    for _ in range(10):
        x = torch.randn(16, 10, generator=source)
        inputs = (x,) if rank == 0 else ()
        targets = {"target": x.roll(1, 1).tanh()} if rank == size - 1 else {}
        schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in stage.parameters()])
    all_stages = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(all_stages, mine)
    return torch.cat(all_stages)


def main():
    torch.set_default_dtype(torch.float64)
    rank, size = dist.get_rank(), dist.get_world_size()
    return {each.__name__: train(each, rank, size) for each in (ScheduleGPipe, Schedule1F1B)}
