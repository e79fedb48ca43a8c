# SPDX-License-Identifier: Apache-2.0
"""Accelerate over lockstep: lockstep.accelerate.Accelerator in place of accelerate.Accelerator."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep import _C
from lockstep._frameworks import needed_by
from lockstep.ddp import DistributedDataParallel, _connected
from lockstep.gradients import _made_mean

with needed_by(__name__, "accelerate==1.15.*"):
    import accelerate
    from accelerate.utils import DistributedType

    _names = accelerate.Accelerator.prepare_model.__code__.co_names
    if _missing := {"_models", "_is_accelerate_prepared"} - set(_names):
        raise ImportError(f"accelerate {accelerate.__version__} has no {', '.join(sorted(_missing))}")

__all__ = ["Accelerator"]

# Holds, weakly, for each model the last wrapper that prepare() has made.
_wrappers = weakref.WeakKeyDictionary()


def wraps_models(state: Any) -> bool:
    """Whether lockstep wraps models in this state."""
    return state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU) and not state.parallelism_config


def write_parameters(models: Iterable[nn.Module], write: Callable[[], Any]) -> Any:
    """Calls write(), in which every rank writes the same values into these models, wrapped or not."""
    for model in models:
        if model in _wrappers and (wrapper := _wrappers[model]()):
            write = functools.partial(wrapper.write_parameters, write)
    return write()


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator whose prepare() makes a lockstep.DistributedDataParallel.

    clip_grad_norm_() and clip_grad_value_() clip the mean gradient. A process group that it makes for CPUs has lockstep's
    backend. FSDP, DeepSpeed, tensor parallelism and devices other than CPUs and CUDA are Accelerate's, unchanged.

    ddp_arguments: for lockstep.DistributedDataParallel, such as {"hook": "bf16"}. Set them before prepare().
    """

    ddp_arguments: dict[str, Any] = {}

    def __init__(self, *arguments: Any, **named: Any) -> None:
        init = dist.init_process_group
        ours = {"gloo": "lockstep"}  # Accelerate takes gloo for CPUs, whatever it is told
        dist.init_process_group = lambda backend, **options: init(ours.get(backend, backend), **options)
        try:
            super().__init__(*arguments, **named)
        finally:
            dist.init_process_group = init

    @property
    def device(self) -> torch.device:
        device = super().device
        # Accelerate's cpu:0 is the cpu, but to("cpu:0") copies, out of the memory that ranks share.
        return torch.device("cpu") if device.type == "cpu" else device

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Blocks until all ranks are here. Raises UsageError for float16."""
        if evaluation_mode or not wraps_models(self.state):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self.scaler is not None:
            _C.usage_error(f"mixed_precision={self.mixed_precision!r}", here="Accelerator", next="mixed_precision='bf16'")
        # This places, casts and compiles the model, and does not wrap it.
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        is_wrapped = isinstance(getattr(prepared, "_orig_mod", prepared), DistributedDataParallel)
        if is_wrapped or not any(each.requires_grad for each in prepared.parameters()):
            return prepared
        _leave_wrapper(model)
        arguments = self.ddp_handler.to_kwargs() if self.ddp_handler else {}
        wrapper = DistributedDataParallel(prepared, **{**arguments, **self.ddp_arguments})
        if self.ddp_handler:
            self.ddp_handler.register_comm_hook(wrapper)
        # Another Accelerator may prepare the model again, with another precision.
        prepared._is_accelerate_prepared, wrapper._is_accelerate_prepared = False, True
        _wrappers[model] = weakref.ref(wrapper)
        return wrapper

    def unwrap_model(self, model: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
        while isinstance(wrapper := getattr(model, "_orig_mod", model), DistributedDataParallel):
            model = wrapper.module
        return super().unwrap_model(model, *arguments, **named)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        return super().clip_grad_norm_(_made_mean(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        super().clip_grad_value_(_made_mean(parameters), clip_value)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> Any:
        if isinstance(model, DistributedDataParallel) and model.mean_in_grad:
            _C.usage_error("trigger_sync_in_backward()", next="leave no_sync() before the last forward of a step")
        return accelerate.Accelerator.trigger_sync_in_backward(model)

    def load_state(self, *arguments: Any, **named: Any) -> None:
        write_parameters(self._models, functools.partial(super().load_state, *arguments, **named))


def _leave_wrapper(model):
    """Takes the model out of an earlier wrapper."""
    if model in _wrappers and (wrapper := _wrappers[model]()):
        _connected.discard(wrapper)
        wrapper._replica = None
        next = "use the one that the last prepare() returned"
        wrapper.forward = lambda *_, **__: _C.usage_error("a wrapper whose model was prepared again", next=next)
