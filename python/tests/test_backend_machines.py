# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over lockstep on several machines. Here a machine is what a launcher numbers as one (GROUP_RANK): ranks
with the same number share memory, all others reach each other over Gloo."""

import os
import signal
import tempfile
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from support import run_ranks
from test_backend import everything, expect, train_with_ddp

MACHINES = ((0,), (0, 1), (0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0, 2, 2, 0))


def sparse_sums():
    rank, size = dist.get_rank(), dist.get_world_size()
    indices = torch.tensor([[rank, 0, rank], [0, 1, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (size, 2))
    dist.all_reduce(tensor)
    expected = torch.zeros(size, 2)
    expected[:, 0] = 4
    expected[0, 1] = 2 * size
    assert tensor.is_sparse and tensor.is_coalesced()
    expect(tensor.to_dense(), expected)


def train_embedding(path):
    """Rows are drawn anew in each step, so ranks send different numbers of them."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Embedding(50, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        rows = torch.randint(50, (3 + step + dist.get_rank(),), generator=generator)
        optimizer.zero_grad()
        model(rows).pow(2).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{path}.{dist.get_rank()}")


def killed_on_another_machine():
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            dist.all_reduce(torch.ones(100_000))
    except lockstep.PeerLost as error:
        assert ("rank 3" if dist.get_rank() == 2 else "machine 1 (ranks 2, 3)") in str(error), error
        assert time.monotonic() - start < 60, "too late: the group's timeout is half an hour"
        return


def late_for_the_barrier():
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=60))
    if dist.get_rank() > 0:
        try:
            dist.barrier()
        except lockstep.PeerLost as error:
            assert "failed to pass monitoredBarrier" in str(error), error
        return
    try:
        group.monitored_barrier(timedelta(milliseconds=50), wait_all_ranks=True)
    except lockstep.PeerLost as error:
        assert "Ranks 1, 2 failed to pass monitoredBarrier" in str(error), error
        return
    raise AssertionError("no error")


class Machines(unittest.TestCase):
    def test_every_collective_is_exact_on_every_layout(self):
        for machines in MACHINES:
            with self.subTest(machines=machines):
                run_ranks(len(machines), everything, machines=machines)

    def test_ddp_trains_to_the_same_parameters_as_over_gloo(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, train_with_ddp, os.path.join(folder, "lockstep"), machines=(0, 1))
            run_ranks(2, train_with_ddp, os.path.join(folder, "gloo"), backend="gloo")
            for rank in range(2):
                over_gloo = torch.load(os.path.join(folder, f"gloo.{rank}"))
                expect(torch.load(os.path.join(folder, f"lockstep.{rank}")), over_gloo)

    def test_a_killed_rank_raises_on_the_survivors_of_all_machines(self):
        with self.assertRaisesRegex(AssertionError, r"exit codes \[0, 0, 0, -9\], 0 ranks did not end"):
            run_ranks(4, killed_on_another_machine, machines=(0, 0, 1, 1))

    def test_a_monitored_barrier_names_the_ranks_that_did_not_come(self):
        for machines in ((0, 0, 0), (0, 1, 1)):
            with self.subTest(machines=machines):
                run_ranks(3, late_for_the_barrier, machines=machines)


class Sparse(unittest.TestCase):
    def test_sums_are_exact_on_one_machine_and_on_several(self):
        for machines in ((0,), (0, 0), (0, 0, 1), (0, 1, 2)):
            with self.subTest(machines=machines):
                run_ranks(len(machines), sparse_sums, machines=machines)

    def test_ddp_trains_an_embedding_with_sparse_gradients_as_over_gloo(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, train_embedding, os.path.join(folder, "lockstep"))
            run_ranks(2, train_embedding, os.path.join(folder, "gloo"), backend="gloo")
            for rank in range(2):
                over_gloo = torch.load(os.path.join(folder, f"gloo.{rank}"))
                expect(torch.load(os.path.join(folder, f"lockstep.{rank}")), over_gloo)


if __name__ == "__main__":
    unittest.main()
