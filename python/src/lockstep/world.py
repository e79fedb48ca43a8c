# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job, and how they exchange tensors."""

from collections.abc import Sequence

import torch

from lockstep import _C
from lockstep._worlds import world_of

__all__ = ["World"]


class World:
    """The ranks of a job: who they are, and how they exchange tensors.

        world = lockstep.World.from_env()
        world.all_reduce(tensor)                # in place
        everybody = world.all_gather(tensor)    # of shape (ranks, ...)

    rank, of size ranks; local_rank, of the local_size ranks of this machine, which is number node_rank.

    Every rank makes each call, in the same order, from one thread at a time. Calls block; other Python threads go on. Tensors
    have any shape, with or without gaps, and on all ranks the same dtype. Sums are taken in the order of the ranks: all get the
    same bits in every run. `op`: "sum", "mean", "product", "min", "max", "bit_and", "bit_or", "bit_xor".

    Raises UsageError (wrong arguments), MismatchError (ranks that make other calls or give other shapes: nothing was
    sent), PeerLost (a rank has ended, or is silent for longer than the timeout), DeviceError.
    """

    def __init__(self, native: _C.World) -> None:
        """from_env() and single() make one."""
        self._native = native

    @staticmethod
    def from_env(device: torch.device | str = "cpu") -> "World":
        """The ranks of torch.distributed where init_process_group() was called, with its timeout; else those that the launcher
        (lockstep run, torchrun, srun, mpirun) has started; without one, one rank. Each World has connections of its own. Every
        rank calls, and blocks until all are connected. Raises EnvironmentError, RendezvousError."""
        return World(world_of(None, torch.device(device)).copy())

    @staticmethod
    def single() -> "World":
        """One rank."""
        return World(_C.World.single())

    def __repr__(self) -> str:
        return f"<lockstep.World: {self._native.describe()}>"

    rank = property(lambda self: self._native.rank)
    size = property(lambda self: self._native.size)
    local_rank = property(lambda self: self._native.local_rank)
    local_size = property(lambda self: self._native.local_size)
    node_rank = property(lambda self: self._native.node_rank)

    def group(self, ranks: Sequence[int]) -> "World | None":
        """The world of these ranks, in this order; None for a rank that is not in its own list. Lists of two ranks are equal or
        have no rank in common: one call can make several worlds. Blocks until they are connected."""
        return _world(self._native.group(ranks))

    def split(self, color: int, key: int = 0) -> "World | None":
        """A world for each color, its ranks in the order of `key`, then of their rank here; None for a color below 0."""
        return _world(self._native.split(color, key))

    def barrier(self) -> None:
        """Blocks until every rank has called it."""
        self._native.barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces in place, on every rank, and returns the tensor."""
        self._native.all_reduce(tensor, op)
        return tensor

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor:
        """The same, but only root's tensor changes."""
        self._native.reduce(tensor, root, op)
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copies root's tensor into every rank's, and returns it."""
        self._native.broadcast(tensor, root)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks in their order, of shape (ranks, ...)."""
        return self._native.all_gather(tensor)

    def gather(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor | None:
        """The same at root; None elsewhere."""
        return self._native.gather(tensor, root)

    def scatter(self, parts: torch.Tensor | None, output: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copies entry r of root's parts, of shape (ranks, ...), into rank r's output, and returns that. None elsewhere."""
        self._native.scatter(parts, output, root)
        return output

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces tensors of shape (ranks * rows, ...), and gives each rank its rows."""
        return self._native.reduce_scatter(tensor, op)

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int] = ()) -> torch.Tensor:
        """Sends send_rows[r] rows to rank r, else an equal part, and returns the rows from all ranks in their order."""
        return self._native.all_to_all(tensor, send_rows)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """A message to one rank. May block until it is received. Messages with one tag arrive in the order of sending."""
        self._native.send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receives a message into the tensor, from any rank if none is named. Returns the rank that sent it."""
        return self._native.receive(tensor, source, tag)


def _world(native):
    return native and World(native)
