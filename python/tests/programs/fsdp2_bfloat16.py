# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in mixed precision: it computes and sums gradients in bfloat16, and keeps parameters in float32."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    torch.manual_seed(27)
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(2700 + dist.get_rank())
    for _ in range(160):
        x = torch.randn(8, 5, generator=source)
        nn.functional.cross_entropy(model(x).float(), x[:, :4].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}
