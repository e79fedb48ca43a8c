# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the samples of all ranks. PyTorch's SyncBatchNorm takes no tensors of the CPU, so this program has
one of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel


class SyncBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count, mean, square = all_reduce(torch.stack([torch.ones_like(x[0]) * len(x), x.sum(0), x.square().sum(0)]))
        mean, square = mean / count, square / count
        variance = square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def layer(inputs, outputs):
    norm = SyncBatchNorm(outputs)  # lockstep: norm = lockstep.SyncBatchNorm(outputs)
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), norm, nn.ReLU())


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(19)
    net = nn.Sequential(layer(6, 16), layer(16, 16), nn.Linear(16, 3))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)  # lockstep: optimizer = lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    source = torch.Generator().manual_seed(1900 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(6, 6, generator=source) + dist.get_rank()  # the ranks' means differ
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return {**net.state_dict(), "score": model(torch.linspace(-1, 1, 24).view(4, 6)).detach()}
