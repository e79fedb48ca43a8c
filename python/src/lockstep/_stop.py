# SPDX-License-Identifier: Apache-2.0
"""A job that is asked to stop by a signal finishes its step, saves, and leaves its loop (docs/clusters.md)."""

from collections.abc import Sequence

from lockstep import _C


def catch_stop_signals(signals: Sequence[int] = ()) -> None:
    """From now on these signals (without any: SIGTERM and SIGUSR1) only set a flag for stop_requested().

    A signal that the program handles itself stays as it is; so does Python's own SIGINT. Does not block, sends nothing.
    Raises UsageError for a signal that can't be caught.
    """
    _C.catch_stop_signals(list(signals))


def stop_requested() -> bool:
    """Whether a rank of this job was asked to stop before its part of the last exchange of gradients.

    That of a lockstep.DistributedDataParallel: the answer is the same on all ranks after the same step. Where there is one
    rank: whether it was asked. The first call catches the signals, as catch_stop_signals() does. Does not block, sends nothing.
    """
    return _C.stop_requested()


def stop_signal() -> int:
    """The first such signal that this process itself received; 0: none."""
    return _C.stop_signal()
