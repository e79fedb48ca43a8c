# SPDX-License-Identifier: Apache-2.0
"""Runs a function once per rank, each rank a process with a process group of its own."""

import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep  # noqa: F401  registers the backend


def _run_rank(rank, function, size, backend, store, failures, machines, arguments):
    torch.set_num_threads(1)
    if machines is not None:
        os.environ["GROUP_RANK"] = str(machines[rank])
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        function(*arguments)
        dist.destroy_process_group()
    except BaseException:
        failures.put(f"rank {rank} of {size}:\n{traceback.format_exc()}")
        os._exit(1)  # as a crash: nothing of this rank is tidied up


def run_ranks(size, function, *arguments, backend="lockstep", machines=None):
    """Raises AssertionError with the output of every rank that failed. machines: the machine that each rank counts as."""
    context = mp.get_context("spawn")
    failures = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_run_rank, args=(rank, function, size, backend, store, failures, machines, arguments))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
        late = [rank for rank in ranks if rank.is_alive()]
        for rank in late:
            rank.kill()
    texts = [failures.get() for _ in range(size) if not failures.empty()]
    if late or texts or any(rank.exitcode for rank in ranks):
        codes = [rank.exitcode for rank in ranks]
        raise AssertionError(f"exit codes {codes}, {len(late)} ranks did not end\n" + "\n".join(texts))
