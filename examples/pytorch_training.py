# SPDX-License-Identifier: Apache-2.0
"""A small classifier in plain PyTorch: lockstep run --nproc-per-node 2 -- python examples/pytorch_training.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep


def points():
    """1,024 points around the ten unit vectors."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (1024,), generator=generator)
    return TensorDataset(torch.eye(10)[labels] + 0.3 * torch.randn(1024, 10, generator=generator), labels)


def main():
    dist.init_process_group("lockstep")
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10))
    sampler = DistributedSampler(points())
    loader = DataLoader(points(), batch_size=16, sampler=sampler)
    model = lockstep.DistributedDataParallel(model)
    optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    inputs, labels = points().tensors
    if dist.get_rank() == 0:
        print(f"accuracy {(model(inputs).argmax(1) == labels).float().mean():.3f}")


if __name__ == "__main__":
    main()
