# SPDX-License-Identifier: Apache-2.0
"""Data parallel training on the devices of one process, in steps that a program calls one by one.

    devices = lockstep.Devices(2)
    nets = towers.get_params(devices, model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for batch in loader:
        shards = towers.split_and_load(devices, batch)
        losses = towers.losses(devices, loss_of, nets, shards)     # loss_of(net, shard) -> mean loss
        towers.backward(devices, losses, shards)
        towers.all_reduce_gradients(devices, nets)
        towers.update(devices, optimizers)                         # train_batch() is all five

The gradient is the mean over the samples of the batch, however they are divided. Each call blocks until all devices are done,
and raises what a device's function raised first; these Devices can't be used after that. Call them from one thread.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lockstep import _C

__all__ = [
    "Devices", "all_reduce", "all_reduce_gradients", "average", "backward", "combine_gradients", "flat_blocks", "get_params", "losses",
    "share_variables", "split_and_load", "train_batch", "update",
]  # fmt: skip

Tower = nn.Module | Sequence[torch.Tensor]


class Devices:
    """Devices of this process, each with a thread of its own: sets of cores, which share those of the process, or GPUs.

    Args:
        count: of sets of cores.
        places: in its place, "cpu:0-3,cpu:4-7" or "cuda:0,cuda:1".
        timeout: for one call, after which a device that is not done is named.

    Raises UsageError, DeviceError, PeerLost.
    """

    def __init__(self, count: int = 1, places: str = "", timeout: timedelta = timedelta(minutes=10)) -> None:
        self._native, self._runs = _C.Devices(count, places, timeout), False

    def __len__(self) -> int:
        return self._native.size

    def where(self, index: int) -> torch.device:
        return self._native.where(index)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls function(i) for every device i at the same time, each on its thread, under the caller's no_grad()
        and autocast(), and returns what they return. Torch's operators let other threads go on; other Python code takes turns."""
        if self._runs:
            _C.usage_error("Devices.run() inside run(), or in two threads", next="return from the first, then call the next")
        self._runs, results = True, [None] * len(self)

        def keep(index):
            results[index] = function(index)

        try:
            self._native.run(keep)
        finally:
            self._runs = False
        return results


def get_params(devices: Devices, model: Tower) -> list[Any]:
    """A copy of a module on every device, or of a list of tensors, marked for gradients."""
    if isinstance(model, nn.Module):
        return [copy.deepcopy(model).to(devices.where(index)) for index in range(len(devices))]
    return [[each.detach().to(devices.where(index), copy=True).requires_grad_() for each in model] for index in range(len(devices))]


def split_and_load(devices: Devices, batch: Any, *, even: bool = False) -> list[Any]:
    """A part of the batch for every device, in order, and on it. batch: a tensor of shape (samples, ...), or a tuple, list or
    dict of such. Sizes differ by at most one; a part may be empty. even: raises UsageError where they differ."""
    if isinstance(batch, torch.Tensor):
        if even and len(batch) % len(devices):
            _C.usage_error(f"a batch of {len(batch)} samples does not divide evenly over {len(devices)} devices", next="leave out even=True")
        return [part.to(devices.where(index)) for index, part in enumerate(batch.tensor_split(len(devices)))]
    values = list(batch.values() if isinstance(batch, Mapping) else batch)
    if not all(isinstance(each, torch.Tensor) for each in values):
        _C.usage_error(f"a batch of {sorted({type(each).__name__ for each in values})}", next="give a tensor, or a tuple, list or dict of tensors")
    if len({len(each) for each in values}) != 1:
        _C.usage_error(f"a batch of tensors with {[len(each) for each in values]} samples", next="give each the same dimension 0")
    parts = zip(*(split_and_load(devices, each, even=even) for each in values))
    if isinstance(batch, Mapping):
        return [dict(zip(batch, part)) for part in parts]
    return [type(batch)(*part) if hasattr(batch, "_fields") else type(batch)(part) for part in parts]


def losses(devices: Devices, loss: Callable[[Any, Any], torch.Tensor], towers: Sequence[Tower], shards: Sequence[Any]) -> list[Any]:
    """loss(tower, shard), a mean, on each device; None where the shard is empty. Clears the gradients of the last step."""

    def one(index):
        for parameter in _trained(towers[index]):
            parameter.grad = None
        return loss(towers[index], shards[index]) if _samples(shards[index]) else None

    return devices.run(one)


def backward(devices: Devices, losses: Sequence[torch.Tensor | None], shards: Sequence[Any]) -> None:
    """On each device, its loss weighted by its share of the samples."""
    samples = [_samples(shard) for shard in shards]
    devices.run(lambda index: losses[index] is not None and (losses[index] * (samples[index] / sum(samples))).backward())


def all_reduce_gradients(devices: Devices, towers: Sequence[Tower], algorithm: str = "direct") -> None:
    """Sums each gradient over the devices, on all of them. One that is missing counts as zero; what has none anywhere keeps
    none. algorithm: "direct", "central" (on device 0, then copied to all), "ring", "tree"."""
    lists = [[] for _ in towers]
    for parameters in zip(*map(_trained, towers), strict=True):
        if any(each.grad is not None for each in parameters):
            for found, each in zip(lists, parameters):
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                found.append(each.grad)
    _all_reduce(devices, lists, algorithm)


def all_reduce(devices: Devices, tensors: Sequence[torch.Tensor], algorithm: str = "direct") -> None:
    """tensors[i] is on device i; afterwards each is the sum of all."""
    _all_reduce(devices, [[each] for each in tensors], algorithm)


def update(devices: Devices, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """step() of each device's optimizer."""
    devices.run(lambda index: optimizers[index].step())


def train_batch(
    devices: Devices,
    loss: Callable[[Any, Any], torch.Tensor],
    towers: Sequence[Tower],
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: str = "direct",
) -> torch.Tensor:
    """One step of training. Returns the mean loss of the batch; the towers' .grad are its gradients."""
    shards = split_and_load(devices, batch)
    found = losses(devices, loss, towers, shards)
    backward(devices, found, shards)
    all_reduce_gradients(devices, towers, algorithm)
    update(devices, optimizers)
    samples = [_samples(shard) for shard in shards]
    return sum(each.detach().to(devices.where(0)) * (count / sum(samples)) for each, count in zip(found, samples) if count)


# ---- Towers with shared variables, as in TensorFlow's multi-tower example


def share_variables(devices: Devices, model: nn.Module) -> list[nn.Module]:
    """The model, and for each other device one with the same parameters in memory, but gradients and buffers of its own. An
    optimizer of the model updates all. Raises UsageError: a device is a GPU."""
    if any(devices.where(index).type != "cpu" for index in range(len(devices))):
        _C.usage_error("share_variables() on GPUs", next="take lockstep.KVStore, kind local_update_cpu, or get_params()")
    towers = [model, *(copy.deepcopy(model) for _ in range(len(devices) - 1))]
    for tower in towers[1:]:
        for own, shared in zip(tower.parameters(), model.parameters()):
            own.data = shared.data
    return towers


def combine_gradients(towers: Sequence[Tower]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """After backward(): the sum of the towers' gradients becomes .grad of the first one's parameters, and the others
    have none. Returns (gradient, parameter) of each that has one."""
    combined = []
    for parameters in zip(*map(_trained, towers), strict=True):
        gradients = [each.grad for each in parameters if each.grad is not None]
        if gradients:
            parameters[0].grad = torch.stack([each.to(parameters[0].device) for each in gradients]).sum(0)
            combined.append((parameters[0].grad, parameters[0]))
        for each in parameters[1:]:
            each.grad = None
    return combined


# ---- Nets that devices train by themselves


def flat_blocks(nets: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Moves the trained parameters of each net into one block of shape (values), and returns the blocks. Names, shapes, strides and
    values stay. Raises UsageError: parameters of several dtypes, of 16 bits, or with gaps in memory; nets of different layouts."""
    return _C.flat_blocks([[_C.NamedTensor(*each) for each in net.named_parameters()] for net in nets])


def average(devices: Devices, blocks: Sequence[torch.Tensor], samples: Sequence[int] = ()) -> None:
    """Each block becomes the mean of all, weighted by `samples` where they are given. Returns when every net has its copy."""
    devices._native.average(list(blocks), list(samples))


def _all_reduce(devices, lists, algorithm):
    if devices._runs:
        _C.usage_error("all_reduce() inside Devices.run()", next="return from run(), then call it once for all devices")
    devices._native.all_reduce(lists, algorithm)


def _trained(tower):
    parameters = tower.parameters() if isinstance(tower, nn.Module) else tower
    return [each for each in parameters if each.requires_grad]


def _samples(shard):
    return len(shard if isinstance(shard, torch.Tensor) else next(iter(shard.values() if isinstance(shard, Mapping) else shard)))
