# SPDX-License-Identifier: Apache-2.0
"""Accelerate over lockstep, as docs/python-frameworks.md has it, against plain PyTorch on one rank and against Accelerate's own."""

import os
import subprocess
import sys
import tempfile
import unittest

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.accelerate import Accelerator
from support import expect_error, expect_import_error, layers, run_ranks, samples

MAX_NORM = 0.1


def make(kind=Accelerator, **options):
    """An Accelerator, as in a process of its own."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return kind(cpu=True, **options)


def state_of_plain_torch():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, labels in DataLoader(samples(), batch_size=16):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(accelerator, model, optimizer, loader, clip="clip_grad_norm_"):
    """Returns the norms."""
    norms = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                norms.append(getattr(accelerator, clip)(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def prepare(accelerator, optim, model=None, batch_size=8):
    model = model or layers()
    return accelerator.prepare(model, optim.AdamW(model.parameters(), lr=1e-2), DataLoader(samples(), batch_size))


def whole_step(batches_per_step):
    """lockstep's own step; with two batches a step, of half the size."""
    accelerator = make(gradient_accumulation_steps=batches_per_step)
    model, optimizer, loader = prepare(accelerator, lockstep, batch_size=8 // batches_per_step)
    train(accelerator, model, optimizer, loader)
    assert type(model) is lockstep.DistributedDataParallel and not model.mean_in_grad
    torch.testing.assert_close(accelerator.get_state_dict(model), state_of_plain_torch())
    assert accelerator.unwrap_model(model) is model.module
    assert accelerator.gather(torch.tensor([dist.get_rank()])).tolist() == [0, 1]


def wrapped_by_the_program():
    accelerator, model = make(), layers()
    optimizer = lockstep.AdamW(model.parameters(), lr=1e-2)
    model = lockstep.DistributedDataParallel(model, optimizer)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=8))
    assert prepared is model
    train(accelerator, model, optimizer, loader)
    torch.testing.assert_close(model.module.state_dict(), state_of_plain_torch())


def exchange_only():
    """PyTorch's DDP, which Accelerate's own prepare() makes, over the backend."""
    accelerator = make(accelerate.Accelerator)
    model, optimizer, loader = prepare(accelerator, torch.optim)
    train(accelerator, model, optimizer, loader)
    assert type(model) is torch.nn.parallel.DistributedDataParallel
    torch.testing.assert_close(model.module.state_dict(), state_of_plain_torch())


def expect_as_accelerates_own(optim, clip="clip_grad_norm_", tolerance=1e-6, handlers=(), **options):
    states, norms = [], []
    for kind, its_optim in ((accelerate.Accelerator, torch.optim), (Accelerator, optim)):
        accelerator = make(kind, kwargs_handlers=[make_handler() for make_handler in handlers], **options)
        model, optimizer, loader = prepare(accelerator, its_optim)
        norms.append(train(accelerator, model, optimizer, loader, clip))
        states.append(accelerator.unwrap_model(model).state_dict())
        assert model(samples().tensors[0]).dtype == torch.float32
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(norms[1], norms[0], rtol=tolerance, atol=tolerance)


def as_accelerates_own():
    for optim in (lockstep, torch.optim):
        expect_as_accelerates_own(optim)
        expect_as_accelerates_own(optim, clip="clip_grad_value_")
        expect_as_accelerates_own(optim, mixed_precision="bf16")
        expect_as_accelerates_own(optim, handlers=[lambda: DistributedDataParallelKwargs(bucket_cap_mb=1, static_graph=True)])


def save_and_load(folder):
    accelerator = make()
    model, optimizer, loader = prepare(accelerator, lockstep)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, loader)
    there = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.load_state(folder)
    torch.testing.assert_close(model.module.state_dict(), state_of_plain_torch())
    train(accelerator, model, optimizer, loader)
    torch.testing.assert_close(model.module.state_dict(), there, rtol=0, atol=0)

    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    loaded = layers()
    accelerate.load_checkpoint_in_model(loaded, folder)
    torch.testing.assert_close(loaded.state_dict(), there, rtol=0, atol=0)


def prepare_again():
    """With torch's optimizer each rank has parameters of its own, although they were in memory that ranks share."""
    accelerator = make()
    first, optimizer, loader = prepare(accelerator, lockstep)
    train(accelerator, first, optimizer, loader)
    expected = layers()
    expected.load_state_dict(accelerator.get_state_dict(first))
    states = []
    for kind, model in ((Accelerator, first.module), (accelerate.Accelerator, expected)):
        accelerator = make(kind)
        model, optimizer, loader = prepare(accelerator, torch.optim, model)
        train(accelerator, model, optimizer, loader)
        states.append(model.module.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)
    expect_error(lockstep.UsageError, "prepared again", lambda: first(samples().tensors[0]))


def evaluate_first_and_leave_frozen_models():
    accelerator, model, frozen = make(), layers(), layers().requires_grad_(False)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert accelerator.prepare(frozen) is frozen
    model, optimizer, loader = prepare(accelerator, lockstep, model)
    train(accelerator, model, optimizer, loader)
    torch.testing.assert_close(model.module.state_dict(), state_of_plain_torch())


def use_wrongly():
    accelerator = make()
    model, _, _ = prepare(accelerator, torch.optim)
    expect_error(lockstep.UsageError, "trigger_sync", lambda: accelerator.trigger_sync_in_backward(model))
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = prepare(accelerator, lockstep)
    inputs, labels = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        expect_error(lockstep.UsageError, "clip after the last backward()", lambda: accelerator.backward(loss))


def each_way(folder):
    whole_step(1)
    whole_step(2)
    wrapped_by_the_program()
    exchange_only()
    as_accelerates_own()
    save_and_load(folder)
    prepare_again()
    evaluate_first_and_leave_frozen_models()
    use_wrongly()


STARTED = """
import torch.distributed as dist
from lockstep.accelerate import Accelerator
accelerator = Accelerator(cpu=True)
assert (accelerator.num_processes, dist.get_backend()) == (2, "lockstep"), dist.get_backend()
accelerator.print("started")
"""


class Accelerate(unittest.TestCase):
    def test_each_way_trains_like_plain_torch_on_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, each_way, folder)

    def test_makes_the_process_group_with_lockstep(self):
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "program.py")
            with open(program, "w") as file:
                file.write(STARTED)
            start = ("lockstep", "run", "--nproc-per-node", "2", "--", sys.executable, program)
            self.assertIn("started", subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True).stdout)

    def test_names_what_is_not_there(self):
        for before, named in (
            ("sys.modules['accelerate'] = None", "accelerate"),
            ("import accelerate; accelerate.Accelerator.prepare_model = lambda: 0", "_models"),
        ):
            expect_import_error("lockstep.accelerate", before, named)


if __name__ == "__main__":
    unittest.main()
