# SPDX-License-Identifier: Apache-2.0
"""Ranks that train alone, and average their parameters now and then: see the class."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep import _C
from lockstep.world import World

__all__ = ["Averaging"]


class Averaging:
    """Local SGD (Stich, ICLR 2019): every rank trains a model of its own, and all get the mean every few steps. With an outer
    optimizer it is DiLoCo (Douillard et al., 2023).

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        averaging = lockstep.Averaging(
            model, every=100, outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
        )
        for x, y in loader:
            loss_function(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()

    Every rank makes it at the same time, and makes as many steps. All begin with rank 0's parameters and buffers. Optimizers'
    state and buffers stay each rank's own. No bytes are sent between averages.

    Args:
        model: without a DistributedDataParallel.
        every: steps between two averages.
        outer: makes an optimizer of a list of parameters. Its gradient is how far the mean has moved since the last average.
            None: the mean is taken as it is.
        world: None: World.from_env().

    Raises UsageError (every < 1, parameters of 16 bits), PeerLost.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        world: World | None = None,
    ) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        if every < 1 or any(each.itemsize < 4 for each in self._parameters):
            _C.usage_error(
                f"Averaging(every={every}) of parameters of {sorted({str(each.dtype) for each in self._parameters})}",
                next="give every >= 1, and keep parameters in float32; torch.autocast computes in 16 bits",
            )
        self.every, self.steps = every, 0
        self._world = world or World.from_env(next(model.parameters()).device)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.copy_(self._world.broadcast(tensor.detach().clone()))
        self._last = [nn.Parameter(each.detach().clone()) for each in self._parameters] if outer else []  # averages
        self._outer = outer(self._last) if outer else None

    @torch.no_grad()
    def step(self) -> bool:
        """After the optimizer's step(). Returns whether it has averaged; then it blocks until every rank has."""
        self.steps += 1
        if self.steps % self.every:
            return False
        means = [self._world.all_reduce(each.detach().clone(), "mean") for each in self._parameters]
        if self._outer:
            for last, mean in zip(self._last, means):
                last.grad = last - mean
            self._outer.step()
            means = self._last
        for parameter, mean in zip(self._parameters, means):
            parameter.copy_(mean)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside each rank's model and optimizer."""
        return {"steps": self.steps, "last": [each.detach() for each in self._last], "outer": self._outer and self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On every rank, with what state_dict() has returned there."""
        self.steps = state["steps"]
        with torch.no_grad():
            for last, value in zip(self._last, state["last"], strict=True):
                last.copy_(value)
        if self._outer:
            self._outer.load_state_dict(state["outer"])
