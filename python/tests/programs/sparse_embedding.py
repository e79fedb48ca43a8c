# SPDX-License-Identifier: Apache-2.0
"""Bags of words: the embeddings have sparse gradients and an optimizer of their own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS = 50


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 8, mode="sum", sparse=True)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, words):
        return self.head(self.words(words))


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(31)
    net = Bags()
    model = DistributedDataParallel(net)  # lockstep: model = lockstep.DistributedDataParallel(net)
    optimizers = torch.optim.SparseAdam(net.words.parameters(), lr=1e-2), torch.optim.Adam(net.head.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(3100 + dist.get_rank())
    for _ in range(20):
        words = torch.randint(WORDS, (8, 5), generator=source)
        nn.functional.cross_entropy(model(words), words.sum(1) % 3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()
