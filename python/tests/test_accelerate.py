# SPDX-License-Identifier: Apache-2.0
"""Accelerate beside lockstep, as docs/python-frameworks.md has it, against one rank of plain PyTorch."""

import os
import tempfile
import unittest

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from support import layers, run_ranks, samples

MAX_NORM = 0.1


def accelerator(**options):
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    return Accelerator(cpu=True, **options)


def state_of_plain_torch():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, labels in DataLoader(samples(), batch_size=16):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(accelerate, model, optimizer, loader):
    for inputs, labels in loader:
        with accelerate.accumulate(model):
            accelerate.backward(nn.functional.cross_entropy(model(inputs), labels))
            if isinstance(optimizer.optimizer, lockstep.AdamW):
                optimizer.optimizer.clip_grad_norm(MAX_NORM)
            else:
                accelerate.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.module.state_dict(), state_of_plain_torch())


def whole_step(batches_per_step):
    """lockstep's own step; with two batches a step, of half the size."""
    accelerate = accelerator(gradient_accumulation_steps=batches_per_step)
    model = layers()
    loader = DataLoader(samples(), batch_size=8 // batches_per_step)
    optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    model = lockstep.DistributedDataParallel(model, optimizer)
    optimizer, loader = accelerate.prepare(optimizer, loader)
    train(accelerate, model, optimizer, loader)
    assert accelerate.unwrap_model(model) is model
    assert accelerate.gather(torch.tensor([dist.get_rank()])).tolist() == [0, 1]


def exchange_only():
    """PyTorch's DDP, which prepare() makes, over the backend."""
    accelerate = accelerator()
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerate.prepare(model, optimizer, DataLoader(samples(), batch_size=8))
    train(accelerate, model, optimizer, loader)
    assert type(model) is torch.nn.parallel.DistributedDataParallel
    assert dist.get_backend() == "lockstep"


def save_and_load(folder):
    accelerate = accelerator()
    model = layers()
    optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    model = lockstep.DistributedDataParallel(model, optimizer)
    optimizer, loader = accelerate.prepare(optimizer, DataLoader(samples(), batch_size=8))
    accelerate.register_for_checkpointing(model)
    train(accelerate, model, optimizer, loader)
    accelerate.save_state(folder)
    for inputs, labels in loader:  # away from what was saved
        accelerate.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    accelerate.load_state(folder)
    torch.testing.assert_close(model.module.state_dict(), state_of_plain_torch())


def each_way(folder):
    whole_step(1)
    whole_step(2)
    exchange_only()
    save_and_load(folder)


class Accelerate(unittest.TestCase):
    def test_each_way_trains_like_plain_torch_on_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, each_way, folder)


if __name__ == "__main__":
    unittest.main()
