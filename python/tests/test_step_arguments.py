# SPDX-License-Identifier: Apache-2.0
"""Each argument of DistributedDataParallel does what its documentation says."""

import unittest

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from ranks import RanksTestCase
from support import expect_error
from test_step import (
    LIKE_TORCH,
    expect_equal,
    expect_same_on_all_ranks,
    global_batch,
    loss_of,
    make_model,
    parts_of,
    two_lines,
    wrapped,
    wrapped_module,
)


def algorithms(group, names):
    for name in names:
        two_lines(group, "SGD", LIKE_TORCH["SGD"], algorithm=name)
        assert wrapped(group, algorithm=name)[2].mean_in_grad == (name != "direct")


def algorithms_of_one_machine(group, name):
    expect_error(lockstep.UsageError, "algorithm fast", lambda: wrapped(group, algorithm="fast"))
    _, _, model = wrapped(group, algorithm=name)
    step = lambda: loss_of(model, parts_of(global_batch(0), group)).backward()
    expect_error(lockstep.UsageError, "between machines", step)
    dist.barrier(group)  # no rank ends before the other has its error


def memories_of_gradients(group, megabytes):
    """How many buckets the gradients are views of."""
    net, _, model = wrapped(group, mean_in_grad=True, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
    for step in range(2):  # the second one fills buckets in the order of the first
        net.zero_grad()
        loss_of(model, parts_of(global_batch(step), group)).backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()})


def sizes_of_buckets(group):
    assert memories_of_gradients(group, 25) == 1
    assert memories_of_gradients(group, 0) == 4
    for megabytes in (0, 1e-4):
        two_lines(group, "AdamW", LIKE_TORCH["AdamW"], mean_in_grad=True, bucket_cap_mb=megabytes)


class Counting(nn.Module):
    """With a buffer that tells ranks apart."""

    def __init__(self, rank):
        super().__init__()
        self.net = make_model()
        self.register_buffer("seen", torch.full((1,), float(rank)))

    def forward(self, x):
        self.seen += len(x)
        return self.net(x)


def buffers(group):
    rank = dist.get_rank(group)
    for wrapping in ({}, {"mean_in_grad": True}):
        for broadcast in (True, False):
            net, optimizer, model = wrapped_module(Counting(rank), group, broadcast_buffers=broadcast, **wrapping)
            assert net.seen.item() == 0, "buffers are rank 0's at first"
            loss_of(model, parts_of(global_batch(0), group, [4, 2])).backward()
            optimizer.step()
            assert net.seen.item() == ([4, 4] if broadcast else [4, 2])[rank], net.seen


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.other = make_model(), nn.Linear(4, 2).double()

    def forward(self, x):
        return self.net(x)


def unused_parameters(group, wrapping):
    """A parameter without a gradient: an error that names it, or it stays as it is."""
    two_lines(group, "SGD", LIKE_TORCH["SGD"], find_unused_parameters=False, **wrapping)
    net, optimizer, model = wrapped_module(Branches(), group, **wrapping)
    loss_of(model, parts_of(global_batch(0), group)).backward()
    optimizer.step()
    assert net.other.weight.grad is None
    _, _, model = wrapped_module(Branches(), group, find_unused_parameters=False, **wrapping)
    step = lambda: loss_of(model, parts_of(global_batch(0), group)).backward()
    error = expect_error(lockstep.UsageError, "no gradient for other.weight, other.bias", step)
    assert "find_unused_parameters" in error.next


def writing(group):
    """Every rank writes the same values into shared parameters, or into its own."""
    for wrapping in ({}, {"mean_in_grad": True}, {"share_parameters": False}):
        alone, (net, optimizer, model) = make_model(), wrapped(group, **wrapping)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)

        for step in range(3):
            for each, batch in ((alone, global_batch(step)), (model, parts_of(global_batch(step), group))):
                loss_of(each, batch).backward()
            plain.step(), optimizer.step()
            plain.zero_grad(), optimizer.zero_grad()
            if step == 0:
                values = [parameter.detach() * 0.5 for parameter in alone.parameters()]
                write = lambda: [p.data.copy_(value) for p, value in zip(net.parameters(), values)] and "written"
                assert model.write_parameters(write) == "written"
                for parameter, value in zip(alone.parameters(), values):
                    parameter.data.copy_(value)
        expect_equal(net, alone)
        expect_same_on_all_ranks(net, group)


def ignored(group):
    """As PyTorch's: names that the module gives are left alone."""
    rank = dist.get_rank(group)
    net = Branches()
    net._ddp_params_and_buffers_to_ignore = ["other.weight", "other.bias"]
    with torch.no_grad():
        net.other.weight.fill_(rank)
    optimizer = lockstep.SGD(net.net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    loss_of(model, parts_of(global_batch(0), group)).backward()
    optimizer.step()
    assert net.other.weight.eq(rank).all()
    expect_same_on_all_ranks(net.net, group)


class Arguments(RanksTestCase):
    def test_algorithm(self):
        self.on_ranks(3, algorithms, ("direct", "ring", "central", "tree"))
        self.on_ranks(3, algorithms, ("ring",), machines=(0, 0, 1))
        for name in ("central", "tree"):
            self.on_ranks(2, algorithms_of_one_machine, name, machines=(0, 1))

    def test_bucket_cap_mb(self):
        self.on_ranks(2, sizes_of_buckets)

    def test_broadcast_buffers(self):
        self.on_ranks(2, buffers)

    def test_find_unused_parameters(self):
        for wrapping in ({}, {"mean_in_grad": True}):
            self.on_ranks(2, unused_parameters, wrapping)

    def test_write_parameters(self):
        self.on_ranks(2, writing)

    def test_ignored_parameters(self):
        self.on_ranks(2, ignored)


if __name__ == "__main__":
    unittest.main()
