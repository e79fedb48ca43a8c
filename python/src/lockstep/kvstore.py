# SPDX-License-Identifier: Apache-2.0
"""A store of weights: devices push gradients to it and pull weights from it (docs/strategies/kvstore.md)."""

import math
import multiprocessing.util
import sys
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from lockstep import _C
from lockstep._worlds import world_of
from lockstep.optim import _Optimizer
from lockstep.world import World

Key = str | int
Keys = Key | Sequence[Key]
Value = torch.Tensor | Sequence[torch.Tensor]  # one, or one for each device
Values = Value | Sequence[Value]  # for each key

_open = weakref.WeakSet()


class KVStore:
    """A store of weights by key, with MXNet's calls.

        store = lockstep.KVStore.create("dist_sync")
        store.init("weight", weight)
        store.set_optimizer(lockstep.SGD, lr=0.1)
        for x, y in loader:
            store.push("weight", gradient_of(weight, x, y), samples=len(x))
            store.pull("weight", out=weight)

    A key is a str or an int; 3 and "3" are the same. A value is a tensor, or a list with one for each device. Lists of keys go
    with lists of values. `priority` is MXNet's, and changes nothing.

    Every call blocks until all servers have answered; other Python threads go on, and wait for each other in calls of one store. Raises UsageError (an unknown key,
    another shape or dtype than in init(): nothing was sent), PeerLost (a server, or with dist_sync a worker).

    A worker says goodbye to the servers when its store is closed: by close(), at the end of its `with` block or of the program.
    If an exception ends the block or the program, they notice at once that this worker is lost.
    """

    def __init__(self, native: _C.KVStore, kind: str, world: _C.World) -> None:
        """create() makes one."""
        self._native, self.type, self._world = native, kind, world
        self._names = set()
        self._values = {False: [], True: []}  # until the store has them; True: of buffers
        self._optimizer = None  # name, options
        self._begun = False
        _open.add(self)
        # Also at the end of a process of multiprocessing, which begins by forgetting what its parent has registered.
        multiprocessing.util.Finalize(None, _leave, exitpriority=1)

    @staticmethod
    def create(
        kind: str = "local",
        *,
        world: World | None = None,
        servers: int = 1,
        staleness: int = 4,
        adapt_to_delay: bool = True,
        devices: int = 0,
        split_above: int = 1_000_000,
    ) -> "KVStore | None":
        """A store of this kind: local, local_update_cpu, local_allreduce_cpu, local_allreduce_device; dist_sync, dist_async,
        dist_bounded. On a server it blocks until every worker has closed its store, then returns None.

        Args:
            world: whose ranks are servers and workers, with a dist_ kind; all of them call. None: those of World.from_env().
            servers: the first ranks of the world, unless `lockstep run --servers` has said which.
            staleness: with dist_bounded, the largest delay of a gradient.
            adapt_to_delay: with dist_async and dist_bounded, the learning rate is multiplied by a gradient's share of the samples, and
                each worker has a momentum of its own. False: MXNet's plain rule, one optimizer for all gradients. On all ranks.
            split_above: elements from which a value is split over the servers.
            devices: threads that add up and copy, each with its share of the cores. 0: the calling thread.

        Raises UsageError (no such kind, no server, no worker), PeerLost.
        """
        ranks = _C.World.single()
        if kind.startswith("dist"):
            ranks = world._native if world else world_of(None, torch.device("cpu"))
        if any(store._world is ranks for store in _open):
            _C.usage_error("a second KVStore of these ranks while the first is open", next="close() the first one")
        native = _C.KVStore.create(kind, ranks, servers, staleness, adapt_to_delay, split_above, devices)
        return native and KVStore(native, kind, ranks)

    def init(self, key: Keys, value: Values, *, buffer: bool = False) -> None:
        """The first value of each key, once, which is copied. dist_*: every worker gives the same keys in the same order, and
        the first worker's values count. A push replaces a buffer even where there is an optimizer."""
        names, devices = _by_device(key, value)
        for name, tensor in zip(names, devices[0]):
            if self._begun or name in self._names:
                _C.usage_error(f"init() of the key {name}, again or after a push or pull", next="give all keys first, each once")
            self._names.add(name)
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._values[buffer].append(_C.NamedTensor(name, copied))

    def set_optimizer(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        """From now on pushed values are gradients, with which the store updates: set_optimizer(lockstep.SGD, lr=0.1). Once.
        optimizer: one of lockstep's. options: its own. dist_*: all workers give the same."""
        made = optimizer([torch.zeros(1)], **options)
        if self._optimizer or not isinstance(made, _Optimizer):
            _C.usage_error(
                f"set_optimizer({optimizer.__name__})" + (" again" if self._optimizer else ""),
                likely="" if self._optimizer else "an optimizer of torch's, which servers don't have",
                next="set_optimizer(lockstep.SGD, lr=0.1), once; push(..., lr=0.01) changes the rate",
            )
        self._optimizer = made._name, made._values(made.param_groups[0])
        if self._begun:
            self._native.set_optimizer(*self._optimizer)

    def push(self, key: Keys, value: Values, priority: int = 0, *, samples: int = 1, lr: float = math.nan) -> None:
        """Adds up the devices' values. Without an optimizer the sum replaces the value; with one it is a gradient.

        dist_sync: the mean over all workers counts, weighted by `samples`; MXNet adds up. dist_async, dist_bounded: each push
        updates by itself. lr: the learning rate from this update on; NaN: as before."""
        names, values = _by_device(key, value)
        self._begin().push(names, self._pushed(values), _C.PushOptions(samples, 0, lr))

    def pull(self, key: Keys, out: Values, priority: int = 0) -> Values:
        """Copies the values into `out`, for each device, and returns it."""
        names, into = _by_device(key, out)
        _fill(into, lambda found: self._begin().pull(names, found))
        return out

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0, *, samples: int = 1, lr: float = math.nan
    ) -> Values:
        """push(), then pull() into `out`, or else `value`. With dist_sync some parts come back while others are pushed."""
        out = value if out is None else out
        (names, values), (_, into) = _by_device(key, value), _by_device(key, out)
        _fill(into, lambda found: self._begin().push_pull(names, self._pushed(values), found, _C.PushOptions(samples, 0, lr)))
        return out

    def row_sparse_pull(self, key: Key, row_ids: Any) -> torch.Tensor:
        """These rows of a value, a new tensor of shape (rows, ...). Only they are sent. row_ids: whole numbers, in any order."""
        return self._begin().row_sparse_pull(str(key), torch.as_tensor(row_ids, dtype=torch.int64))

    @property
    def rank(self) -> int:
        """This worker's number, from 0; servers do not count."""
        return self._native.rank

    @property
    def num_workers(self) -> int:
        """How many there are; servers do not count."""
        return self._native.workers

    def barrier(self) -> None:
        """Blocks until every worker has called it."""
        self._begin().barrier()

    def delays(self) -> tuple[float, int]:
        """The mean and the largest delay of all workers' gradients until now: the updates made with other gradients since their
        worker read the weights. Asks the servers. Local kinds: 0."""
        return self._begin().delays()

    def close(self, failed: bool = False) -> None:
        """Leaves the servers, which end when every worker has left. failed: as a worker that is lost."""
        _open.discard(self)
        self._native.close(failed)

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close(_is_failure(error))

    def _pushed(self, values):
        if self.type == "local_allreduce_device":  # adds up in the first device's tensors
            return [[tensor.clone(memory_format=torch.contiguous_format) for tensor in device] for device in values]
        return _contiguous(values)

    def _begin(self):
        """The C++ store, once it has what init() and set_optimizer() were given."""
        if not self._begun and self._names:
            self._native.init(self._values[False], self._values[True])
            self._begun, self._values = True, {}
            if self._optimizer:
                self._native.set_optimizer(*self._optimizer)
        return self._native


def _by_device(key, value):
    """The names of the keys, and for each device a list of its tensors."""
    keys, values = ([key], [value]) if isinstance(key, Key) else (key, value)
    lists = [[each] if isinstance(each, torch.Tensor) else each for each in values]
    if len(keys) != len(lists) or len({len(each) for each in lists}) != 1 or not lists[0]:
        _C.usage_error(
            f"{len(keys)} keys, and {[len(each) for each in lists]} tensors",
            next="give each key one, or a list with one for each device",
        )
    return [str(each) for each in keys], [[tensor.detach() for tensor in device] for device in zip(*lists)]


def _contiguous(devices):
    """As the store has its values; the same tensors, where they are."""
    return [[tensor.contiguous() for tensor in device] for device in devices]


def _fill(into, pull):
    found = _contiguous(into)
    pull(found)
    for tensor, value in zip(chain(*into), chain(*found)):
        if tensor is not value:
            tensor.copy_(value)


def _leave():
    """At the end of the program, while Python still knows whether an exception has ended it."""
    failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1") or _is_failure(sys.exc_info()[1])
    for store in list(_open):
        store.close(failed)


def _is_failure(error):
    return error is not None and not (isinstance(error, SystemExit) and not error.code)
