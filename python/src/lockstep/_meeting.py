# SPDX-License-Identifier: Apache-2.0
"""init_process_group() of ranks that `lockstep run` has started on one machine: they meet at a Unix socket that only their
user can reach. torch's own TCPStore would listen at every interface and let in whoever connects."""

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from lockstep import _C

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
_by_tcp = rendezvous._rendezvous_handlers["env"]


def _are_launched_here(url: str) -> bool:
    """The launcher sets LOCKSTEP_JOB where all its ranks are on its machine. A program may still number ranks in its own way."""
    told = dict(part.split("=", 1) for part in urlparse(url).query.split("&") if "=" in part)
    mine = os.environ.get
    same = all(told.get(name.lower(), mine(name)) == mine(name) for name in ("RANK", "WORLD_SIZE"))
    return bool(mine("LOCKSTEP_JOB")) and same and mine("LOCAL_WORLD_SIZE") == mine("WORLD_SIZE")


def _meet(url: str, timeout: timedelta = rendezvous.default_pg_timeout, **others) -> Iterator[tuple[dist.Store, int, int]]:
    """What torch calls for env://."""
    if not _are_launched_here(url):
        yield from _by_tcp(url, timeout, **others)
        return
    yield _C.meet_launched_ranks(timeout), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("the ranks of lockstep run meet once for each process group")


def meet_without_tcp() -> None:
    """From now on, in this process."""
    rendezvous._rendezvous_handlers.update(env=_meet)
