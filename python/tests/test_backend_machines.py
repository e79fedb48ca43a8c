# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over lockstep on several machines. Here a machine is what a launcher numbers as one (GROUP_RANK): ranks
with the same number share memory, all others reach each other over Gloo."""

import os
import signal
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from support import expect, run_ranks
from test_backend import everything, small_model, train


def late_for_the_barrier():
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=60))
    try:
        if dist.get_rank() == 0:
            group.monitored_barrier(timedelta(milliseconds=50), wait_all_ranks=True)
        else:
            dist.barrier()
    except lockstep.PeerLost as error:
        assert "Rank 1 failed to pass monitoredBarrier" in str(error) or dist.get_rank() == 1, error
        return
    raise AssertionError("no error")


def train_embedding(group):
    """Rows are drawn anew in each step, so ranks send different numbers of them."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Embedding(50, 4, sparse=True), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        rows = torch.randint(50, (3 + step + dist.get_rank(),), generator=generator)
        optimizer.zero_grad()
        model(rows).pow(2).sum().backward()
        optimizer.step()
    return model.state_dict()


def train_dense(group):
    model = DistributedDataParallel(small_model(), process_group=group, gradient_as_bucket_view=True)
    train(model)
    return model.state_dict()


def two_machines():
    gloo = dist.new_group(backend="gloo")
    for training in (train_dense, train_embedding):
        expect(training(dist.group.WORLD), training(gloo))
    late_for_the_barrier()


def two_machines_of_two():
    everything()
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


class Machines(unittest.TestCase):
    def test_ddp_trains_dense_and_sparse_parameters_as_over_gloo_and_a_late_rank_is_named(self):
        run_ranks(2, two_machines, machines=(0, 1))

    def test_every_collective_is_exact_and_a_killed_rank_raises_on_the_survivors_of_all_machines(self):
        with self.assertRaisesRegex(AssertionError, r"exit codes \[0, 0, 0, -9\], 0 ranks did not end"):
            run_ranks(4, two_machines_of_two, machines=(0, 0, 1, 1))


if __name__ == "__main__":
    unittest.main()
