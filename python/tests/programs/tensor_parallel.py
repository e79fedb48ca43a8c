# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with DTensor: the ranks share out the columns of a block's first layer and the rows of its second."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(6, 12), *(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 12)) for _ in range(2)), nn.Linear(12, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (1, 2):
        parallelize_module(model[block], mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    source = torch.Generator().manual_seed(2100)  # every rank has the same samples
    losses = []
    for _ in range(20):
        x = torch.randn(8, 6, generator=source)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()}
    return {**whole, "losses": torch.stack(losses)}
