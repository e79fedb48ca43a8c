# SPDX-License-Identifier: Apache-2.0
"""The same program started by lockstep run, torchrun and torch.multiprocessing.spawn, with and without a process group."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep
from test_step import expect_equal, global_batch, loss_of, make_model, train_alone

PROGRAM = os.path.abspath(__file__)


def train(backend, fails):
    """The program: two lines, no matter who has started it. Prints what shows that it is right."""
    torch.set_num_threads(1)
    if backend != "none":
        dist.init_process_group(backend)
    net, alone = make_model(), make_model()
    optimizer = lockstep.AdamW(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer)
    rank, size = model.rank, model.size
    for step in range(3):
        if fails and step == 1 and rank == 1:
            raise ValueError("rank 1 has had enough")
        part = [tensor[rank * 3 : rank * 3 + 3] for tensor in global_batch(step)]
        loss_of(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    train_alone(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), [global_batch(step) for step in range(3)])
    expect_equal(net, alone)
    print(f"rank {rank} of {size} has trained", flush=True)
    if backend != "none":
        dist.destroy_process_group()


def spawned(rank, store, backend):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    train("none", fails=False)
    dist.destroy_process_group()


def started(*command):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment)


def lockstep_run(*arguments):
    program = shutil.which("lockstep") or os.environ.get("LOCKSTEP_COMMAND")
    if program is None:
        raise AssertionError("no command lockstep on PATH; LOCKSTEP_COMMAND may say where it is")
    return started(program, "run", "--nproc-per-node", "2", "--", sys.executable, PROGRAM, *arguments)


class Launchers(unittest.TestCase):
    def expect_trained(self, result):
        self.assertEqual(result.returncode, 0, result.stdout)
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2 has trained", result.stdout)

    def test_lockstep_run(self):
        for backend in ("none", "gloo"):
            self.expect_trained(lockstep_run("train", backend))

    def test_torchrun(self):
        for backend in ("none", "gloo"):
            self.expect_trained(
                started(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM, "train", backend)
            )

    def test_spawn(self):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(spawned, (os.path.join(folder, "store"), "gloo"), nprocs=2)

    def test_a_rank_that_raises_ends_the_job_and_is_named(self):
        result = lockstep_run("fail", "none")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("rank 1 has had enough", result.stdout)
        self.assertRegex(result.stdout, r"rank 1 .*exit")

    def test_alone_in_a_spawned_process_is_said(self):
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=alone, args=(queue,))
        process.start()
        process.join(60)
        self.assertIn("this process trains alone", queue.get())


def alone(queue):
    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lockstep.DistributedDataParallel(make_model())
    queue.put("\n".join(str(each.message) for each in said))


if __name__ == "__main__":
    if sys.argv[1:2] in (["train"], ["fail"]):
        train(sys.argv[2], fails=sys.argv[1] == "fail")
    else:
        unittest.main()
