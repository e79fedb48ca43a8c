# SPDX-License-Identifier: Apache-2.0
"""One file with what every rank did when, for ui.perfetto.dev (docs/watching.md)."""

import os
import sys

import torch
import torch.distributed as dist

from lockstep import _C
from lockstep._worlds import world_of


class Timeline:
    """Records what the ranks do within its `with` block; at the end rank 0 writes the file.

        with lockstep.Timeline("steps.json"):
            train()

    All ranks of the process group enter and leave it together, and block until rank 0 has compared their clocks, and has their
    records. Make it before DistributedDataParallel is used, not necessarily before it is made. When the block is left by an
    exception nothing is sent: what each rank has recorded stays beside the file, and `lockstep trace FILE` puts it together.

    file: .json, on rank 0's machine; the others write FILE.rank1 and so on beside it until the end.
    steps: only these steps are recorded; then call begin_step() before each.
    process_group: the default one, else the ranks that the launcher has started.

    Raises UsageError: another file name; a second one at a time, that of LOCKSTEP_TRACE included. SystemError: no room.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        steps: range | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._file = os.fspath(file)
        self._first, self._end = (steps.start, steps.stop) if steps is not None else (0, sys.maxsize)
        self._group = process_group
        self._open = None

    def __enter__(self) -> "Timeline":
        world = world_of(self._group, torch.device("cpu"))
        self._open = _C.Timeline(world, self._file, self._first, self._end)
        return self

    def begin_step(self, step: int) -> None:
        """Records from here on, if the step is one of `steps`. Does not block."""
        if self._open is not None:
            self._open.begin_step(step)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        timeline, self._open = self._open, None
        if timeline is not None and error is None:
            timeline.finish()
