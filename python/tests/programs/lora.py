# SPDX-License-Identifier: Apache-2.0
"""LoRA: low-rank matrices beside frozen linear layers; the optimizer has these alone, and the checkpoint too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LoRA(nn.Module):
    def __init__(self, linear, rank=2, scale=4.0):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.down.T) @ self.up.T


def add_lora(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRA(child))
        else:
            add_lora(child)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(10)
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4)).requires_grad_(False)
    add_lora(net)
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)  # lockstep: optimizer = lockstep.AdamW(trained, lr=1e-2, weight_decay=0.1)
    source = torch.Generator().manual_seed(1000 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(8, 6, generator=source)
        nn.functional.cross_entropy(model(x), x[:, :4].argmin(1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return net.state_dict()
