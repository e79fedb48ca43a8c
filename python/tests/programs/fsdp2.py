# SPDX-License-Identifier: Apache-2.0
"""FSDP2: each rank has a part of every parameter, of its gradient and of the optimizer's state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(18)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 12)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(5, 12), *blocks, nn.Linear(12, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(1800 + dist.get_rank())
    norms = []
    for _ in range(20):
        x = torch.randn(8, 5, generator=source)
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {**whole, "norms": torch.stack(norms)}
