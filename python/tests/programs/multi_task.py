# SPDX-License-Identifier: Apache-2.0
"""Several tasks on one body: their losses are weighted so that the tasks' gradients at the last shared layer have one norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU())
        self.label, self.value, self.rebuilt = nn.Linear(12, 3), nn.Linear(12, 1), nn.Linear(12, 6)

    def forward(self, x):
        hidden = self.body(x)
        return self.label(hidden), self.value(hidden), self.rebuilt(hidden)


def weights(losses, shared):
    norms = torch.stack([torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses])
    dist.all_reduce(norms)
    return norms.mean() / (norms + 1e-6)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(25)
    net = MultiTask()
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.Adam(net.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(2500 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(10, 6, generator=source)
        label, value, rebuilt = model(x)
        mse = nn.functional.mse_loss
        losses = [nn.functional.cross_entropy(label, x[:, :3].argmax(1)), mse(value, x.norm(dim=1, keepdim=True)), mse(rebuilt, x)]
        loss = (weights(losses, net.body[2].weight) * torch.stack(losses)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.state_dict()
