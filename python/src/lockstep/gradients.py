# SPDX-License-Identifier: Apache-2.0
"""The mean gradient between backward() and step(), for clipping and whatever else a program does with it.

Where the ranks of a machine share parameters, .grad is a rank's own gradient after backward(), and step() sums those of all
ranks. The functions here are torch's, and make .grad the mean first. All ranks call them alike. They block until all have,
and raise UsageError and MismatchError as DistributedDataParallel.mean_gradients() does. A model that has the mean in .grad
already, and one without a DistributedDataParallel, is left as it is.
"""

import functools
from collections.abc import Iterable

import torch

from lockstep.ddp import make_mean_of, note_clipping

__all__ = ["GradScaler", "clip_grad_norm_", "clip_grad_value_", "mean_grad"]

Tensors = torch.Tensor | Iterable[torch.Tensor]


def _made_mean(parameters):
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    make_mean_of(parameters)
    return parameters


def clip_grad_norm_(
    parameters: Tensors, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ of the mean over all ranks. Several calls may clip several parts of a model.

    optimizer.clip_grad_norm() clips inside step(), without another pass over the gradients."""
    parameters = _made_mean(parameters)
    note_clipping(parameters, functools.partial(clip_grad_norm_, parameters, max_norm, norm_type, error_if_nonfinite, foreach))
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """torch.nn.utils.clip_grad_value_ of the mean over all ranks."""
    parameters = _made_mean(parameters)
    note_clipping(parameters, functools.partial(clip_grad_value_, parameters, clip_value, foreach))
    torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach)


def mean_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """parameter.grad, once it is the mean over all ranks. None: no rank has a gradient."""
    _made_mean(parameter)
    return parameter.grad


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose unscale_() makes .grad the mean over all ranks first, so that it may be clipped by torch."""

    makes_mean = True

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self._enabled:
            _made_mean(parameter for group in optimizer.param_groups for parameter in group["params"])
        super().unscale_(optimizer)
