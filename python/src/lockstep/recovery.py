# SPDX-License-Identifier: Apache-2.0
"""A training loop of your own that survives the loss of ranks, under lockstep run --max-restarts N.

    @lockstep.recover                                                       # 1
    def main():
        ... model, optimizer, DistributedDataParallel and loader, as usual
        recovery = lockstep.Recovery(model, optimizer, loader, scheduler=scheduler)   # 2
        for epoch in recovery.epochs(10):
            for inputs, labels in recovery.batches():
                ... forward, backward(), optimizer.step(), scheduler.step(), zero_grad()
            ... validation, output, what else ends an epoch

When a rank dies, the launcher starts another in its place, and main() starts over on every rank. Recovery then puts back what it has
kept in memory that the launcher holds, and all go on after that step, with the bits of an undisturbed run.
"""

import ctypes
import functools
import gc
import io
import itertools
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep import _C, _worlds
from lockstep.data import DataLoader, Sampler
from lockstep.ddp import DistributedDataParallel

__all__ = ["Recovery", "recover"]

_PATIENCE = timedelta(minutes=1)  # for the launcher, which sees the end of a process at once


# ---- Around the loop


def recover(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the function, and again after each loss of a rank that the launcher replaces; returns what it returns.

    Everything that belongs to the training has to be made in the function: process group, model, optimizer, loader. After a loss
    they are let go, torch.distributed is left, and the random generators are what they were before the first call. Without a
    launcher that replaces ranks this is a call of the function."""

    @functools.wraps(function)
    def run(*arguments, **named):
        if not _C.replaces_ranks():
            return function(*arguments, **named)
        begin = _random_states(torch.device("cpu"))
        while True:
            try:
                return function(*arguments, **named)
            except Exception as error:
                if not _is_loss(error):
                    raise
                lost = error
            _let_go(lost)
            if not _C.next_generation(_PATIENCE):
                raise lost
            _take_environment()
            _set_random_states(begin)

    return run


def _is_loss(error):
    """torch wraps what its backends raise in errors of its own."""
    return isinstance(error, (_C.PeerLost, _C.RendezvousError, dist.DistError)) or "PeerLost: " in str(error)


def _let_go(lost):
    """Lets go of the World, the model and the loader that the function had: the frames of the traceback still hold them."""
    error: BaseException | None = lost
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:
            warnings.warn(f"lockstep: leaving the process group of lost ranks: {error}", stacklevel=2)
    _worlds._launched.clear()
    gc.collect()


def _take_environment():
    """os.environ is a copy of the environment, which C++ has changed."""
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    lines = [os.fsdecode(line) for line in itertools.takewhile(bool, environ)]
    os.environ.update(line.split("=", 1) for line in lines if "=" in line)


# ---- Random generators: torch's, Python's and NumPy's


def _random_states(device):
    version, numbers, gauss = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": (version, torch.tensor(numbers), gauss)}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def _set_random_states(states):
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


# ---- State as tensors

_TENSOR = "lockstep.tensor"  # in place of a tensor: (_TENSOR, its name)
_STRUCTURE = "structure"
_DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
}  # fmt: skip


def _replaced(value, replace):
    """A copy of dicts, lists and tuples in which the parts for which replace() is not None are what it gives."""
    new = replace(value)
    if new is not None:
        return new
    if isinstance(value, dict):
        return {key: _replaced(each, replace) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, replace) for each in value)
    return value


def _split(value):
    """The tensors in dicts, lists and tuples, which are copied at the speed of memory; and all else as torch.save() writes it."""
    tensors = {}

    def take_out(part):
        if isinstance(part, torch.Tensor) and part.dtype in _DTYPES and part.layout == torch.strided:
            name = f"tensor.{len(tensors)}"
            tensors[name] = part.detach()
            return (_TENSOR, name)

    file = io.BytesIO()
    torch.save(_replaced(value, take_out), file)
    return {**tensors, _STRUCTURE: torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}


def _join(tensors):
    """Returns what _split() was given, with copies of the tensors. Runs no code that the bytes may hold: weights_only."""

    def put_back(part):
        if type(part) is tuple and len(part) == 2 and part[0] == _TENSOR:
            return tensors[part[1]].clone()

    return _replaced(torch.load(io.BytesIO(tensors[_STRUCTURE].numpy().tobytes()), weights_only=True), put_back)


def _require_readable(name, state):
    try:
        _join(_split(state))
    except Exception as error:
        _C.usage_error(
            f"the state of {name} can't be kept: {error}",
            likely="state_dict() has objects of a class of its own; torch.load(weights_only=True) reads numbers, texts, tensors, "
            "lists, tuples and dicts",
            next="give Recovery an object whose state_dict() is made of those",
        )


# ---- Inside


class Recovery:
    """Keeps the state of a training loop in memory that the launcher holds, and puts it back when ranks were lost.

    Make it after the model, the optimizer, the loader and the others, on every rank at the same time; then loop over epochs() and
    batches(). See help(lockstep.recovery).

    A step is over when batches() is asked for the next batch: what belongs to it, such as zero_grad() and a scheduler's step(), comes
    before. A batch without an optimizer.step(), whose gradients add up to the next ones, is kept together with those. Copies take
    at most 1 % of the time, so that small models are copied after each step; the steps since the last copy are repeated, and so
    is what follows the last step of an epoch.

    Kept: parameters, buffers, the optimizer's state and options; the random generators of torch, Python and NumPy; the place in the data;
    `others`. Not kept: variables of the program, a generator of your own, the residuals of a `hook`. Each rank has its own buffers,
    generators and others; one whose machine was lost gets those of another rank, and
    keeps its own generators.

    Args:
        model: a DistributedDataParallel of lockstep or of torch, which share no state with what is outside of the function.
        optimizer: the one that steps it.
        loader: lockstep.DataLoader, a torch DataLoader, or anything with an iterator. One with state_dict() goes on where it was, and
            so does a torch DataLoader with lockstep.Sampler; of another the batches of the epoch are read again and skipped.
        share_of_time: that copies may take; 1: a copy after each step.
        others: whatever has state_dict() and load_state_dict(), by a name of your own: schedulers, a GradScaler, metrics; or a
            dict of values, which is changed in place.

    Raises UsageError (a scheduler or GradScaler that is not among the others, a state that can't be kept, another number of ranks where the loader
    can't be divided anew), PeerLost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any] | None = None,
        *,
        share_of_time: float = 0.01,
        **others: Any,
    ) -> None:
        self._model, self._optimizer, self._loader, self._others = model, optimizer, loader, others
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._world = _worlds.world_of(getattr(model, "process_group", None), self._device)
        self._require_replicas()
        self._require_states()
        self.steps = 0  # that were made, also before a loss
        self.epoch = 0  # the one under way
        self._batch = 0  # of it
        self._resumed_at = (0, 0)  # batches and samples of it that were before batches() began
        self._stepped = self._begun = self._checked = self._scaled = False
        self._at_epoch = None  # random states when it began
        self._resumed = None  # what the next batches() goes on with
        optimizer.register_step_post_hook(self._note_step)
        self._kept = _C.loop_state_of(self._world, share_of_time)
        if self._kept is not None and self._kept.found is not None:
            self._restore(self._kept.found)

    # ---- The loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the training stands to count - 1."""
        while self.epoch < count:
            if self._resumed is None:
                self._at_epoch = _random_states(self._device)
            else:
                _set_random_states(self._at_epoch)
            yield self.epoch
            self.epoch += 1
            self._batch, self._resumed_at = 0, (0, 0)

    def batches(self) -> Iterator[Any]:
        """The loader's batches of this epoch, those that are left. Asking for the next one ends the step: it blocks, now and then,
        until all ranks have kept their state."""
        if self._loader is None:
            _C.usage_error("batches() without a loader", next="Recovery(model, optimizer, loader), or call step() after each step")
        self._begin()
        for batch in self._rest_of_epoch():
            self._stepped = False
            yield batch
            self.step()

    def step(self) -> None:
        """A step is over. batches() calls it; only a loop without a loader does so itself, and keeps its place among the others."""
        self._begin()
        self.steps += 1
        self._batch += 1
        if self._kept is not None and self._kept.is_due() and self._stepped:
            self._keep()
        self._stepped = False

    def _begin(self):
        if not self._begun and self._kept is not None:
            self._kept.taken(self.steps)
        self._begun = True

    def _note_step(self, _optimizer, _args, kwargs):
        self._stepped = True
        self._scaled = self._scaled or kwargs.get("grad_scaler") is not None  # as GradScaler calls lockstep's optimizers

    def _rest_of_epoch(self):
        resumed, self._resumed = self._resumed, None
        if isinstance(self._loader, DataLoader):
            self._loader.set_epoch(self.epoch)  # it keeps the place in an epoch that was loaded
        sampler = _sampler_of(self._loader)
        if resumed is not None and sampler is not None:
            sampler.set_epoch(sampler._epoch, self._resumed_at[1])
        iterator = iter(self._loader)
        if resumed is not None:
            if not _is_stateful(self._loader) and sampler is None:
                for _ in range(self._batch):
                    next(iterator, None)
            _set_random_states(resumed)
        yield from iterator
        if resumed is not None and sampler is not None:
            sampler._first = 0  # the next epoch is a whole one

    # ---- What is kept

    def _module(self):
        return self._model.module if isinstance(self._model, (DistributedDataParallel, nn.parallel.DistributedDataParallel)) else self._model

    def _keep(self):
        if not self._checked:
            self._require_all_kept()
        common = {}
        if self._kept.keeps_common:
            common = _split(
                {
                    "parameters": dict(self._module().named_parameters()),
                    "optimizer": self._optimizer.state_dict(),
                    "place": (self.steps, self.epoch, self._batch),
                }
            )
        own = {
            "buffers": dict(self._module().named_buffers()),
            "random": _random_states(self._device),
            "at_epoch": self._at_epoch,
            "others": {name: _state_of(other) for name, other in self._others.items()},
            "loader": self._loader.state_dict() if _is_stateful(self._loader) else None,
            "samples": self._samples_of_epoch(),
        }
        self._kept.keep(self.steps, common, _split(own))

    def _samples_of_epoch(self):
        """The samples that all ranks together have had, with lockstep.Sampler."""
        sampler = _sampler_of(self._loader)
        if sampler is None:
            return 0
        batches, samples = self._resumed_at
        return min(samples + (self._batch - batches) * self._loader.batch_size * self._world.size, sampler._size)

    def _restore(self, found):
        common, own = _join(found.common), _join(found.own)
        if found.ranks != self._world.size and not isinstance(self._loader, (DataLoader, type(None))) and not _sampler_of(self._loader):
            _C.usage_error(
                f"{found.ranks} ranks were training, now there are {self._world.size}, and this loader can't divide the rest of the epoch again",
                next="take lockstep.DataLoader, or torch's with sampler=lockstep.Sampler(dataset)",
            )
        copy = functools.partial(self._copy, common["parameters"], own["buffers"])
        self._model.write_parameters(copy) if isinstance(self._model, DistributedDataParallel) else copy()
        self._optimizer.load_state_dict(common["optimizer"])
        self._world.barrier()  # where ranks share the optimizer's state, it is what every rank has written
        self.steps, self.epoch, self._batch = common["place"]
        self._resumed_at = (self._batch, own["samples"])
        for name, other in self._others.items():
            if name not in own["others"]:
                _C.usage_error(f"no state of {name} was kept", next="give Recovery the same others each time")
            _load(other, own["others"][name])
        if own["loader"] is not None:
            self._loader.load_state_dict(own["loader"])
        self._at_epoch = own["at_epoch"]
        self._resumed = own["random"] if found.is_own_rank else _random_states(self._device)
        _set_random_states(self._resumed)

    @torch.no_grad()
    def _copy(self, parameters, buffers):
        for kept, now in ((parameters, self._module().named_parameters()), (buffers, self._module().named_buffers())):
            now = dict(now)
            if {name: value.shape for name, value in now.items()} != {name: value.shape for name, value in kept.items()}:
                _C.usage_error("the kept state is that of another model", next="make the same model each time that the function is called")
            for name, value in now.items():
                value.copy_(kept[name])

    # ---- What would go wrong without a word

    def _require_replicas(self):
        if self._world.size > 1 and self._module() is self._model:
            _C.usage_error(
                f"Recovery of a {type(self._model).__name__} on {self._world.size} ranks",
                likely="the module itself: its parameters would be those of the first rank",
                next="wrap it first: model = lockstep.DistributedDataParallel(model, optimizer)",
            )

    def _require_states(self):
        for name, other in self._others.items():
            if isinstance(other, dict) or _is_stateful(other):
                continue
            _C.usage_error(
                f"{name} is a {type(other).__name__}, which has no state_dict()",
                next="give a dict of values, which is changed in place, or an object with state_dict() and load_state_dict()",
            )

    def _require_all_kept(self):
        self._checked = True
        for name, other in self._others.items():
            _require_readable(name, _state_of(other))
        scheduled = getattr(self._optimizer.step, "_wrapped_by_lr_sched", False)
        for is_used, kind, name in (scheduled, LRScheduler, "scheduler"), (self._scaled, torch.amp.GradScaler, "scaler"):
            if is_used and not any(isinstance(other, kind) for other in self._others.values()):
                _C.usage_error(
                    f"the optimizer has a {kind.__name__} that Recovery was not given",
                    likely="after the loss of a rank it would start over",
                    next=f"Recovery(model, optimizer, loader, {name}={name})",
                )


def _is_stateful(value):
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state_of(other):
    return dict(other) if isinstance(other, dict) else other.state_dict()


def _load(other, state):
    if isinstance(other, dict):
        other.clear()
        other.update(state)
    else:
        other.load_state_dict(state)


def _sampler_of(loader):
    """The sampler of a torch DataLoader, where it is lockstep's."""
    found = getattr(loader, "sampler", None) if isinstance(loader, torch.utils.data.DataLoader) and not _is_stateful(loader) else None
    return found if isinstance(found, Sampler) and loader.batch_size is not None else None
