# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer over lockstep: Trainer(strategy=LockstepStrategy(), accelerator="cpu", devices=2)."""

from typing import Any

import torch

from lockstep import _C
from lockstep._frameworks import needed_by
from lockstep.batch_norm import SyncBatchNorm
from lockstep.ddp import DistributedDataParallel
from lockstep.optim import GradientNorm, _Optimizer

with needed_by(__name__, "lightning==2.6.*"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.layer_sync import LayerSync
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn

__all__ = ["LockstepStrategy"]


class LockstepStrategy(DDPStrategy):
    """Trains a LightningModule on several ranks, each a process that Lightning or a launcher has started.

    If configure_optimizers() returns one of lockstep's optimizers, the ranks of a machine share one copy of parameters
    and state, and step() reduces and updates in one pass; .grad is this rank's own gradient, and Trainer's
    gradient_clip_val clips the mean all the same. With an optimizer of torch .grad is the mean.

    What blocks and is sent in a step is what lockstep.DistributedDataParallel says; reduce(), all_gather(), broadcast()
    and barrier() are collectives of the process group "lockstep".

    Args:
        arguments: accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, timeout and
            start_method are those of Lightning's DDPStrategy; all others go to lockstep.DistributedDataParallel.

    Raises UsageError for manual optimization, before training, and for torch's communication hooks.
    """

    def __init__(self, **arguments: Any) -> None:
        for name in arguments:
            if name.startswith("ddp_comm_") or name == "model_averaging_period":
                _C.usage_error(
                    f"LockstepStrategy({name}=...)",
                    likely="an argument for torch's DistributedDataParallel",
                    next='LockstepStrategy(hook="bf16"), or another hook of lockstep.DistributedDataParallel',
                )
        super().__init__(process_group_backend="lockstep", **arguments)

    def setup(self, trainer: Trainer) -> None:
        """Wraps the module. Blocks until all ranks are here."""
        if trainer.state.fn == TrainerFn.FITTING and not self.lightning_module.automatic_optimization:
            _C.usage_error(
                f"manual optimization in {type(self.lightning_module).__name__}",
                here="LockstepStrategy",
                likely="automatic_optimization = False: backward() then runs inside of the wrapped forward",
                next="automatic_optimization = True, or a loop of your own with lockstep.DistributedDataParallel",
            )
        self._layer_sync = self._layer_sync and _SyncBatchNorm()
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Does nothing: setup_optimizers() follows, and wraps the module together with its optimizer."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers  # with automatic optimization Lightning allows one only
        ours = optimizer if isinstance(optimizer, _Optimizer) else None
        self.model = DistributedDataParallel(self.lightning_module, ours, **self._ddp_kwargs)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = _clipping("clip_grad_norm", plugin.clip_grad_by_norm)
        plugin.clip_grad_by_value = _clipping("clip_grad_value", plugin.clip_grad_by_value)

    def teardown(self) -> None:
        self.model = self.lightning_module
        super().teardown()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        kinds = (_LockstepOptimizer if isinstance(each, _Optimizer) else LightningOptimizer for each in optimizers)
        self._lightning_optimizers = [kind._to_lightning_optimizer(each, self) for kind, each in zip(kinds, optimizers)]


class _SyncBatchNorm(LayerSync):
    """For Trainer(sync_batchnorm=True): torch's takes no CPU tensors. The layers stay when training has ended."""

    def apply(self, model):
        return SyncBatchNorm.convert_sync_batchnorm(model)

    def revert(self, model):
        return model


class _LockstepOptimizer(LightningOptimizer):
    """Stands for one of lockstep's optimizers in what self.optimizers() of a module returns."""

    @property
    def state(self) -> Any:
        return self._optimizer.state

    def clip_grad_norm(self, max_norm: float) -> GradientNorm:
        return self._optimizer.clip_grad_norm(max_norm)

    def clip_grad_value(self, clip_value: float) -> None:
        self._optimizer.clip_grad_value(clip_value)


def _clipping(by_lockstep, by_torch):
    """Lets lockstep's optimizers clip in step(), where the mean is known; .grad holds this rank's share of it."""

    def clip(optimizer, limit):
        if isinstance(optimizer, _Optimizer):
            getattr(optimizer, by_lockstep)(limit)
        else:
            by_torch(optimizer, limit)

    return clip
