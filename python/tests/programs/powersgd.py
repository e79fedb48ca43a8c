# SPDX-License-Identifier: Apache-2.0
"""torch's PowerSGD hook: after three steps, matrices of rank 2 are exchanged in place of gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(27)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # lockstep: optimizer = lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(2700 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(16, 8, generator=source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    return net.state_dict()
