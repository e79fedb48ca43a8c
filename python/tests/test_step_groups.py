# SPDX-License-Identifier: Apache-2.0
"""Which ranks train together: several machines, sub-groups, their timeouts and their end, several models, copies."""

import copy
import gc
import pickle
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep import _worlds
from ranks import RanksTestCase
from support import expect_error
from test_step import (
    LIKE_TORCH,
    accumulation,
    clipping,
    expect_equal,
    expect_same_on_all_ranks,
    global_batch,
    joining,
    layouts,
    loss_of,
    make_model,
    parts_of,
    scaling,
    skipping,
    synchronised_batch_norm,
    train,
    two_lines,
    uneven_and_empty_batches,
    wrapped,
)

SHORT = timedelta(seconds=15)  # of what has to end there; ranks connect in it, too


def on_several_machines(group):
    """Everything that goes another way there."""
    for name in ("SGD", "AdamW", "LAMB"):
        two_lines(group, name, LIKE_TORCH.get(name, {"lr": 0.01}))
    uneven_and_empty_batches(group)
    joining(group)


def on_two_machines(group):
    assert wrapped(group)[2].mean_in_grad
    for each in (accumulation, layouts):
        each(group)


def on_machines_of_one_rank(group):
    for each in (clipping, scaling, skipping, synchronised_batch_norm):
        each(group)


def a_model_left_out(group, wrapping):
    """Of two models of one architecture rank 1 leaves the first out: its gradients of the second are not taken for it. In
    shared memory each waits for the other, until the process group's timeout."""
    group = dist.new_group(timeout=SHORT)
    first, second = wrapped(group, **wrapping), wrapped(group, **wrapping)
    before = [parameter.detach().clone() for parameter in (*first[0].parameters(), *second[0].parameters())]

    def step():
        for _, optimizer, model in (first, second) if dist.get_rank(group) != 1 else (second,):
            loss_of(model, parts_of(global_batch(0), group)).backward()
            optimizer.step()

    kind, text = (lockstep.MismatchError, "number of the DistributedDataParallel") if wrapping else (lockstep.PeerLost, "rank")
    begin = time.monotonic()
    error = expect_error(kind, text, step)
    assert error.here and error.next and time.monotonic() - begin < 120, "another timeout"
    expect_equal([*first[0].parameters(), *second[0].parameters()], before, 0)


def groups_that_end(group):
    """Their worlds end with them, whether a model still exists or not; the next group of the same ranks is a new one."""
    for keep in (False, True):
        other = dist.new_group()
        net, optimizer, model = wrapped(other)
        train(model, optimizer, [parts_of(global_batch(0), group)])
        known = len(_worlds._of_groups)
        dist.destroy_process_group(other)
        call = lambda: lockstep.DistributedDataParallel(make_model(), process_group=other)
        expect_error(lockstep.UsageError, "was destroyed", call)
        model.process_group = None
        if not keep:
            del model
        del other, call
        gc.collect()
        assert len(_worlds._of_groups) < known, "the world of a destroyed group is kept"
    train(model, optimizer, [parts_of(global_batch(1), group)])  # with the connections of the group that has ended
    expect_same_on_all_ranks(net, group)


def copies(group):
    """A deep copy, and one through pickle, are models of their own, for the process group of the original."""
    net = nn.Sequential(make_model(), lockstep.SyncBatchNorm(2, process_group=group).double())
    optimizer = lockstep.Adam(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    train(model, optimizer, [parts_of(global_batch(0), group)])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        expect_equal(other, model, 0)
        assert other.size == 2 and other.module[1].process_group is group
        loss_of(other, parts_of(global_batch(1), group)).backward()
        assert other.mean_in_grad and other.module[0][0].weight.grad is not None
        assert other.module[0][0].weight.data_ptr() != net[0][0].weight.data_ptr()
    plain = make_model()
    optimizers = lockstep.Adam(plain.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(plain, optimizers, process_group=group)
    train(model, optimizers, [parts_of(global_batch(0), group)])
    both = copy.deepcopy((plain, optimizers))
    train(both[0], both[1], [global_batch(1)])
    train(model, optimizers, [parts_of(global_batch(1), group)])
    expect_equal(plain, both[0])


def a_copy_without_its_group(group):
    other = dist.new_group()
    text = pickle.dumps(lockstep.DistributedDataParallel(make_model(), process_group=other))
    dist.destroy_process_group(other)
    error = expect_error(lockstep.UsageError, "which is not there", lambda: pickle.loads(text))
    assert "model.module" in error.next


class Groups(RanksTestCase):
    def test_several_machines_compute_what_one_rank_does(self):
        self.on_ranks(3, on_several_machines, machines=(0, 0, 1))
        self.on_ranks(3, on_two_machines, machines=(0, 1, 1))
        self.on_ranks(2, on_machines_of_one_rank, machines=(0, 1))

    def test_a_model_that_one_rank_leaves_out_is_not_mixed_up_with_the_next_one_and_the_groups_timeout_counts(self):
        for wrapping in ({}, {"mean_in_grad": True}):
            self.on_ranks(3, a_model_left_out, wrapping)

    def test_worlds_end_with_their_process_groups(self):
        self.on_ranks(3, groups_that_end)

    def test_copies_train_on_their_own_in_the_group_of_the_original(self):
        self.on_ranks(2, copies)
        self.on_ranks(3, a_copy_without_its_group)


if __name__ == "__main__":
    unittest.main()
