# SPDX-License-Identifier: Apache-2.0
"""Communication hooks of PyTorch's kind: hook(state, bucket) -> torch.futures.Future of the mean."""

from collections.abc import Callable
from typing import Any

import torch


class GradBucket:
    """torch.distributed.GradBucket: this rank's gradients of some parameters, one after another in a buffer."""

    def __init__(self, index: int, buffer: torch.Tensor, parameters: list[torch.Tensor], is_last: bool) -> None:
        self._index, self._buffer, self._parameters, self._is_last = index, buffer, parameters, is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = self._buffer[: sum(sizes)].split(sizes)
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters)]

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._is_last


def starter(ranks: int, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future]) -> Callable[..., Callable[[], None]]:
    """What lockstep's C++ calls in backward(): starts the hook, and returns what waits for its result."""

    def start(index, values, parameters, is_last):
        # `values` are the gradients' shares of the mean. A hook takes whole gradients, and gives their mean.
        future = hook(state, GradBucket(index, values.mul_(ranks), parameters, is_last))

        def finish():
            mean = future.wait()
            mean = mean[0] if isinstance(mean, (list, tuple)) else mean
            if mean.data_ptr() != values.data_ptr():
                values.copy_(mean)

        return finish

    return start
