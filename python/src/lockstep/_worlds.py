# SPDX-License-Identifier: Apache-2.0
"""Which ranks train together: of a process group, or those that a launcher has started."""

import multiprocessing
import warnings
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep import _C

_launched: dict[str, _C.World] = {}  # by type of device
_of_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, _C.World]] = WeakKeyDictionary()  # ends with the group


def world_of(process_group: dist.ProcessGroup | None, device: torch.device) -> _C.World:
    """The ranks of a process group: given, else the default one, else those that the launcher started.

    Blocks at first, at most for the group's timeout, which is that of every wait of these ranks."""
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    if process_group is None:
        worlds, make = _launched, lambda: _launched_world(device)
    elif process_group == dist.GroupMember.NON_GROUP_MEMBER:
        _C.usage_error("a process group that this rank is not in", next="make DistributedDataParallel on its ranks only")
    elif process_group not in distributed_c10d._world.pg_map:
        _C.usage_error("a process group that was destroyed", next="make DistributedDataParallel before that, or a new group")
    else:
        worlds, make = _of_groups.setdefault(process_group, {}), lambda: _world_of_group(process_group, device)
    if device.type not in worlds:
        worlds[device.type] = make()
    return worlds[device.type]


def warn_of_lone_process(size: int, does: str, next: str = "", stacklevel: int = 1) -> None:
    """A spawned process that has been told of no others: likely a mistake. does: "trains alone"."""
    if size == 1 and multiprocessing.parent_process() is not None:
        warnings.warn(
            f"lockstep: this process {does}: no launcher has started it, and torch.distributed is not initialised. "
            f"Call torch.distributed.init_process_group() in spawned processes{next}",
            stacklevel=stacklevel + 1,
        )


def _launched_world(device):
    world = _C.World.from_env(device)
    warn_of_lone_process(world.size, "trains alone", stacklevel=5)
    return world


def _world_of_group(group, device):
    store = dist.PrefixStore(f"lockstep/world/{device.type}", distributed_c10d._world.pg_map[group][1])
    timeout: timedelta = _C.timeout_of(group, device) or distributed_c10d.default_pg_timeout
    return _C.World.over_store(store, dist.get_rank(group), dist.get_world_size(group), device, timeout)


# ---- Copies: a process group cannot be pickled, its name and ranks can

Reference = tuple[str, list[int]]


def reference_to(group: dist.ProcessGroup | None) -> Reference | None:
    """For group_of(), on the same ranks."""
    return group and (group.group_name, dist.get_process_group_ranks(group))


def group_of(reference: Reference | None) -> dist.ProcessGroup | None:
    """Raises UsageError where there is no such group."""
    if reference is None:
        return None
    name, ranks = reference
    for group in distributed_c10d._world.pg_map:
        if group.group_name == name and dist.get_process_group_ranks(group) == ranks:
            return group
    _C.usage_error(
        f"a copy of a model that was made for process group {name} of ranks {ranks}, which is not there",
        likely="a pickle of another program, or a group that was destroyed",
        next="make the same groups first; or copy model.module and make DistributedDataParallel of it",
    )
