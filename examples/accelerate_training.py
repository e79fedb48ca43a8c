# SPDX-License-Identifier: Apache-2.0
"""A small classifier with Accelerate: lockstep run --nproc-per-node 2 -- python examples/accelerate_training.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.accelerate import Accelerator


def points():
    """1,024 points around the ten unit vectors."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (1024,), generator=generator)
    return TensorDataset(torch.eye(10)[labels] + 0.3 * torch.randn(1024, 10, generator=generator), labels)


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(points(), batch_size=16, shuffle=True)
    optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    inputs, labels = points().tensors
    accelerator.print(f"accuracy {(model(inputs).argmax(1) == labels).float().mean():.3f}")


if __name__ == "__main__":
    main()
