# SPDX-License-Identifier: Apache-2.0
"""Distillation: a small model learns the softened outputs of a large frozen one, and the labels; the teacher is no replica."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel


def main(temperature=3.0):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(11)
    teacher = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5)).eval().requires_grad_(False)
    student = nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5))
    model = DistributedDataParallel(student)  # lockstep: model = lockstep.DistributedDataParallel(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.Adam(student.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(1100 + dist.get_rank())
    for _ in range(20):
        x = torch.randn(16, 9, generator=source)
        with torch.no_grad():
            wanted = teacher(x)
        found = model(x)
        soft = kl_div((found / temperature).log_softmax(1), (wanted / temperature).softmax(1), reduction="batchmean")
        loss = 0.7 * temperature**2 * soft + 0.3 * cross_entropy(found, wanted.argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**student.state_dict(), **teacher.state_dict(prefix="teacher.")}
