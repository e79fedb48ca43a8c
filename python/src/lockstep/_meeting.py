# SPDX-License-Identifier: Apache-2.0
"""The meeting of the ranks of init_process_group(): docs/security.md."""

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypedDict
from urllib.parse import urlparse

import torch.distributed as dist

from lockstep import _C

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
Met = Iterator[tuple[dist.Store, int, int]]
_by_tcp: dict[str, Callable[..., Met]] = {scheme: rendezvous._rendezvous_handlers[scheme] for scheme in ("env", "tcp")}


class Meeting(TypedDict):
    """The arguments of init_process_group() that say who meets where."""

    store: dist.Store
    rank: int
    world_size: int


def meet(timeout: timedelta = rendezvous.default_pg_timeout) -> Meeting:
    """The place where the ranks of a launcher meet: init_process_group(backend, **lockstep.meet()), under lockstep run, srun, mpirun, or
    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand.

    On one machine a Unix socket that only this user can reach; between machines with the job's secret (docs/security.md). Under
    torchrun its own store, which admits anyone. All ranks call it, once for each process group. Blocks until rank 0 answers, and
    rank 0 until all have come; then nobody else is admitted.

    Raises RendezvousError: not all came before the timeout, or another secret; EnvironmentError: half a set of a
    launcher's variables; with none, this is rank 0 of 1."""
    store, rank, size = _C.meet_launched_ranks(timeout)
    return {"store": store, "rank": rank, "world_size": size}


def _told(url, name):
    """A program may number ranks in its own way: torch puts that into the URL."""
    given = dict(part.split("=", 1) for part in urlparse(url).query.split("&") if "=" in part)
    return given.get(name.lower(), os.environ.get(name))


def _are_launched(url):
    """By lockstep run, whose ranks have LOCKSTEP_JOB."""
    mine = os.environ.get
    same = all(_told(url, name) == mine(name) for name in ("RANK", "WORLD_SIZE"))
    return "LOCKSTEP_JOB" in os.environ and mine("TORCHELASTIC_USE_AGENT_STORE") != "True" and same


def _warn_of_strangers(url, host):
    if host in ("", "localhost", "::1") or host.startswith("127.") or os.environ.get("LOCKSTEP_INSECURE_NETWORK") == "1":
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or _told(url, "RANK") != "0" or _told(url, "WORLD_SIZE") == "1":
        return
    warnings.warn(
        f"lockstep: these ranks meet at PyTorch's TCPStore on {host}, which admits whoever connects. To use the job's secret start "
        "them with lockstep run, or init_process_group(…, **lockstep.meet())",
        stacklevel=2,
    )


def _meet_env(url, timeout=rendezvous.default_pg_timeout, **others):
    """Called by torch for env://."""
    if not _are_launched(url):
        _warn_of_strangers(url, os.environ.get("MASTER_ADDR", ""))
        yield from _by_tcp["env"](url, timeout, **others)
        return
    yield _C.meet_launched_ranks(timeout)
    raise RuntimeError("the ranks of lockstep run meet once for each process group")


def _meet_tcp(url, timeout=rendezvous.default_pg_timeout, **others):
    """Called by torch for tcp://."""
    _warn_of_strangers(url, urlparse(url).hostname or "")
    yield from _by_tcp["tcp"](url, timeout, **others)


def keep_strangers_out() -> None:
    """From now on, in this process."""
    rendezvous._rendezvous_handlers.update(env=_meet_env, tcp=_meet_tcp)
