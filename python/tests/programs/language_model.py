# SPDX-License-Identifier: Apache-2.0
"""A small transformer that predicts the next token, with gradients accumulated over three batches and clipped."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH, WIDTH, ACCUMULATED = 17, 12, 16, 3


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens):
        return self.head(self.block(self.tokens(tokens) + self.places, src_mask=self.mask, is_causal=True))


def batches():
    """Each token is the sum of the two before it."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    while True:
        text = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
        for i in range(2, LENGTH + 1):
            text[:, i] = (text[:, i - 1] + text[:, i - 2]) % VOCABULARY
        yield text[:, :-1], text[:, 1:]


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = DistributedDataParallel(LanguageModel())  # lockstep: model = lockstep.DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # lockstep: optimizer = lockstep.AdamW(model.parameters(), lr=3e-3)
    norms = []
    for number, (tokens, targets) in zip(range(20 * ACCUMULATED), batches()):
        last = (number + 1) % ACCUMULATED == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            (loss / ACCUMULATED).backward()
        if last:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # lockstep: norm = lockstep.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
    return {**model.module.state_dict(), "norms": torch.stack(norms)}
