# SPDX-License-Identifier: Apache-2.0
"""A small residual network for images, channels last, in float32, with batch normalisation of each rank's own batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        )
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.path(x) + self.short(x))


def main():
    torch.manual_seed(34)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), Block(8, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    net = net.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)  # lockstep: optimizer = lockstep.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    source = torch.Generator().manual_seed(3400 + dist.get_rank())
    for _ in range(20):
        labels = torch.randint(4, (8,), generator=source)
        images = torch.randn(8, 3, 12, 12, generator=source) + labels.view(8, 1, 1, 1) * torch.linspace(-1, 1, 12)
        loss = nn.functional.cross_entropy(model(images.contiguous(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in net.named_parameters()}  # buffers are each rank's own
