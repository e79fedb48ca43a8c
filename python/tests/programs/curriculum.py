# SPDX-License-Identifier: Apache-2.0
"""A curriculum: an LSTM adds numbers of sequences that grow; lengths differ within a batch and are packed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, x, lengths):
        _, (hidden, _) = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(hidden[-1]).squeeze(1)


def batch(source, longest):
    lengths = torch.randint(2, longest + 1, (8,), generator=source)
    x = torch.rand(8, longest, 2, generator=source)
    x[..., 1] = (x[..., 1] > 0.5) & (torch.arange(longest) < lengths[:, None])
    return x, lengths, x.prod(-1).sum(1)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(13)
    model = DistributedDataParallel(Adder())  # lockstep: model = lockstep.DistributedDataParallel(Adder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(1300 + dist.get_rank())
    for step in range(20):
        x, lengths, sums = batch(source, longest=3 + step // 2)
        loss = nn.functional.mse_loss(model(x, lengths), sums)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # lockstep: lockstep.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict()
