# SPDX-License-Identifier: Apache-2.0
"""The newest checkpoints of your own loop, written in the background."""

import os
from datetime import timedelta
from pathlib import Path

import torch

from lockstep import _C


class Checkpoints:
    """Keeps the two newest checkpoints of a loop in a folder; a thread writes them while the loop goes on.

    folder: made if it is missing. Its file .lock keeps a second writer out. One rank of a job has one, usually rank 0.
    after: goes back to the checkpoint of this step on purpose: later ones are renamed to NAME.after-STEP.

    Raises CheckpointError: the folder can't be written; another process writes there, and which; there is no whole checkpoint of the
    step `after`.
    """

    def __init__(self, folder: str | os.PathLike[str], after: int | None = None) -> None:
        self._native = _C.Checkpoints(folder, after)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, a file of safetensors; None if there is none. Reads it for its checksum. Newer
        ones that are damaged are renamed to NAME.damaged, with a warning. Raises CheckpointError: there are some, and all are damaged."""
        return self._native.newest()

    def save(self, step: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
        """Blocks for a copy of the tensors (CPU or GPU, any layout) in memory; if the last save is still being written, first for
        that, at most ten seconds. A disk that is full or does not answer is a warning, and the next save tries again. Raises
        UsageError: a dtype that the format does not know, or a name that it has for itself. Raises CheckpointError: the folder has a
        checkpoint above `step` that this object has neither written nor read in newest(). One that it has is renamed to
        NAME.after-STEP."""
        self._native.save(step, tensors, metadata or {})

    def finish(self, step: int, timeout: timedelta = timedelta(minutes=5)) -> None:
        """Blocks until nothing is being written any more. Raises CheckpointError: the newest on the disk is not that of `step`, and
        why; or the timeout."""
        self._native.finish(step, timeout)
