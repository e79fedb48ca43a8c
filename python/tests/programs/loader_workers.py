# SPDX-License-Identifier: Apache-2.0
"""A DataLoader with worker processes that make samples, and a collate function; it is iterated again in each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, number):
        source = torch.Generator().manual_seed(number)
        length, frequency = 8 + number % 5, number % 4
        wave = torch.sin(torch.arange(length, dtype=torch.float64) * (1 + frequency) / 2)
        return wave + 0.1 * torch.randn(length, generator=source, dtype=torch.float64), frequency


def collate(samples):
    waves, labels = zip(*samples)
    return nn.utils.rnn.pad_sequence(waves, batch_first=True).unsqueeze(1), torch.tensor(labels)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(28)
    net = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(Waves(), shuffle=True)
    loader = DataLoader(Waves(), 4, sampler=sampler, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _, (waves, labels) in zip(range(10), loader):
            nn.functional.cross_entropy(model(waves), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()
