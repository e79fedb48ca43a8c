# SPDX-License-Identifier: Apache-2.0
"""A small classifier with Lightning, which starts the ranks itself: python examples/lightning_training.py"""

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.lightning import LockstepStrategy


def points():
    """1,024 points around the ten unit vectors."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (1024,), generator=generator)
    return TensorDataset(torch.eye(10)[labels] + 0.3 * torch.randn(1024, 10, generator=generator), labels)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch, batch_index):
        inputs, labels = batch
        accuracy = (self.layers(inputs).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return lockstep.AdamW(self.parameters(), lr=1e-2)


def main():
    loader = DataLoader(points(), batch_size=16, shuffle=True)
    trainer = Trainer(strategy=LockstepStrategy(), accelerator="cpu", devices=2, max_epochs=3)
    trainer.fit(Classifier(), loader, DataLoader(points(), batch_size=64))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
