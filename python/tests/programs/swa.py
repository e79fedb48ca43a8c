# SPDX-License-Identifier: Apache-2.0
"""Stochastic weight averaging with torch.optim.swa_utils, and the statistics of batch normalisation made anew in the end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(15)
    net = nn.Sequential(nn.Linear(7, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)  # lockstep: optimizer = lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    average = AveragedModel(net)
    cosine, swa = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12), SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    source = torch.Generator().manual_seed(1500 + dist.get_rank())
    for step in range(20):
        x = torch.randn(16, 7, generator=source)
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 10:
            average.update_parameters(net)
            swa.step()
        else:
            cosine.step()
    everywhere = torch.Generator().manual_seed(15)  # the same batches on all ranks
    update_bn([torch.randn(16, 7, generator=everywhere) for _ in range(4)], average)
    trained = {name: value for name, value in net.named_parameters()}
    return {**{name: value.detach() for name, value in trained.items()}, **average.module.state_dict(prefix="average.")}
