# SPDX-License-Identifier: Apache-2.0
"""The compiled part of the package, for type checkers and for the documentation."""

from datetime import timedelta

from torch.distributed import Backend, Store

class Error(RuntimeError):
    """The base of everything lockstep throws on purpose. The text says what happened, where, the likely cause, and what to do next."""

class PeerLost(Error):
    """Another rank died, stopped or failed. It is named; the process group can't be used after that."""

class MismatchError(Error):
    """Ranks that should agree (on a call, a shape, a dtype) do not. Nothing has been sent."""

class RendezvousError(Error):
    """The ranks did not find each other before the deadline."""

def create_backend(store: Store, rank: int, size: int, timeout: timedelta) -> Backend: ...
