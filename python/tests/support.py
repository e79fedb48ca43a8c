# SPDX-License-Identifier: Apache-2.0
"""What several tests use: ranks as new processes, a small classification task, comparisons."""

import os
import subprocess
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset

import lockstep  # noqa: F401  registers the backend


def processes():
    """Makes processes by forking one that has imported torch, which takes 2 s, and used nothing of it. What they inherit in
    fresh interpreters (torch.multiprocessing.spawn, launchers) test_step_launchers.py shows."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.multiprocessing", "torch.utils.data", "lockstep"])
    return context


def _run_rank(rank, function, size, backend, store, failures, machines, environment, arguments):
    os.environ.clear()  # those of the process that was forked
    os.environ.update(environment)
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
    context = processes()
    failures = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_run_rank, args=(rank, function, size, backend, store, failures, machines, dict(os.environ), arguments))
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


def started(*command):
    """The program when it has ended; stdout has all that it said. It is no rank yet."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment)


def expect(actual, expected, tolerance=0):
    """Tensors, or lists of them."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def expect_error(kind, text, call):
    """Returns the error."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in: {error}"
        return error
    raise AssertionError(f"no error with {text!r}")


def expect_import_error(module, before, named):
    """After the line `before`, lockstep can be imported, and `module` is an error that names this and what to install."""
    code = (
        f"import sys\n{before}\nimport lockstep\n"
        f"try: import {module}\n"
        f"except ImportError as error: assert 'pip install' in str(error) and {named!r} in str(error), error\n"
        "else: raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def samples():
    """Of a classification task with 20 numbers and 5 classes."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(128, 20, generator=generator), torch.randint(5, (128,), generator=generator))


def layers(normalisation=nn.Identity):
    """A model for it."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), normalisation(64), nn.ReLU(), nn.Linear(64, 5))
