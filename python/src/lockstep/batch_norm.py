# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the samples of all ranks, also for CPU tensors."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import _C
from lockstep._compiler import not_compiled
from lockstep._worlds import group_of, reference_to, world_of

__all__ = ["SyncBatchNorm"]

_copies: WeakKeyDictionary[_C.World, _C.World] = WeakKeyDictionary()  # of worlds, for batch normalisation


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm, on the CPU too: mean and variance are taken over the batches of all ranks.

    Each forward in training sends 2 C + 1 values for C channels and blocks until all ranks are there; each backward
    sends 2 C. In eval mode nothing is sent. Input: (B, C, ...). A rank's batch may be empty, but every rank calls forward
    and backward: skip_batch() and join() of DistributedDataParallel refuse a model with such layers.

    Gradients are those of the mean that DistributedDataParallel makes: of all ranks alike, or by samples. Where no
    lockstep.DistributedDataParallel's backward() is under way ranks count alike, as with torch's. Second derivatives are
    a UsageError.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def __getstate__(self):
        return {**self.__dict__, "process_group": reference_to(self.process_group)}

    def __setstate__(self, state):
        super().__setstate__({**state, "process_group": group_of(state["process_group"])})

    def _check_input_dim(self, input):
        if input.dim() < 2 or input.size(1) != self.num_features:
            _C.usage_error(
                f"SyncBatchNorm of {self.num_features} channels, given a tensor of shape {list(input.shape)}",
                next="give (batch, channels, ...)",
            )

    @not_compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        output, mean, variance = _C.normalise_over_ranks(_world_for(self.process_group, input.device), input, self.eps)
        if self.track_running_stats:
            self._follow(mean, variance)
        if not self.affine:
            return output
        shape = (1, -1) + (1,) * (input.dim() - 2)
        return (output * self.weight.view(shape) + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean, variance):
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """The module with every BatchNorm layer replaced by a SyncBatchNorm of the same parameters and buffers."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._converted(module, process_group)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    @classmethod
    def _converted(cls, layer, process_group):
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_group)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
            setattr(made, name, getattr(layer, name))
        return made


def _world_for(process_group, device):
    """A world of its own: its collectives keep their order while gradients are exchanged during backward()."""
    world = world_of(process_group, device)
    if world not in _copies:
        _copies[world] = world.copy()
    return _copies[world]
