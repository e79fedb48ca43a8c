# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer over lockstep: lockstep.transformers.Trainer in place of transformers.Trainer."""

import functools
from typing import Any

import torch

from lockstep._frameworks import needed_by
from lockstep.accelerate import Accelerator, wraps_models, write_parameters
from lockstep.optim import SGD, Adagrad, AdamW, RMSprop

with needed_by(__name__, "transformers==5.24.*"):
    import transformers
    from accelerate.state import AcceleratorState

    _needed = ("create_accelerator_and_postprocess", "_prepare_for_training", "_load_from_checkpoint", "_load_best_model")
    if _missing := [name for name in _needed if not hasattr(transformers.Trainer, name)]:
        raise ImportError(f"transformers {transformers.__version__} has no Trainer.{', '.join(_missing)}")

__all__ = ["Trainer"]

_OURS = {getattr(torch.optim, each.__name__): each for each in (AdamW, SGD, RMSprop, Adagrad)}


class Trainer(transformers.Trainer):
    """transformers.Trainer over lockstep. AdamW (the default), SGD, RMSprop and Adagrad of TrainingArguments(optim=...) are
    lockstep's, too; another optim, and an optimizer that it is given, stay as they are."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # adds methods only

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        if kind not in _OURS or is_sharded or not wraps_models(AcceleratorState()):
            return kind, options
        return _OURS[kind], {name: value for name, value in options.items() if name != "fused"}

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        if self.accelerator.unwrap_model(self.model_wrapped) is self.model_wrapped:
            self.model_wrapped = self.model  # evaluate() has compiled it, and left it as if it were wrapped
        return super()._prepare_for_training(*arguments, **named)

    def _load_from_checkpoint(self, *arguments: Any, **named: Any) -> None:
        write_parameters([self.model], functools.partial(super()._load_from_checkpoint, *arguments, **named))

    def _load_best_model(self) -> None:
        write_parameters([self.model], super()._load_best_model)
