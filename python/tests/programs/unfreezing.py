# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: the head alone at first, then layer after layer from the top, each with a smaller learning rate."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    model = DistributedDataParallel(net, find_unused_parameters=True)  # lockstep: model = lockstep.DistributedDataParallel(net)
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[4].parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.AdamW(net[4].parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(700 + dist.get_rank())
    for step in range(20):
        if step in (7, 14):
            layer = net[2] if step == 7 else net[0]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.07 / step})
        x = torch.randn(10, 8, generator=source)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()
