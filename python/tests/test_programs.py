# SPDX-License-Identifier: Apache-2.0
"""Programs as people write them around PyTorch's DistributedDataParallel, where lockstep's needs a word: each computes what one
rank of torch does with the same global batches."""

import unittest
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import lockstep
from ranks import RanksTestCase
from support import expect_error
from test_step import expect_equal, expect_learning, expect_same_on_all_ranks, global_batch, loss_of, make_model, parts_of, train

STEPS = 4


def compare(group, program, prepare=lambda net: None, **wrapping):
    """program(net, its wrapper or itself, where optimizers are, where clipping is, batches) on these ranks, and on one."""
    alone, net = make_model(), make_model()
    prepare(alone), prepare(net)
    expected = program(alone, alone, torch.optim, nn.utils, [global_batch(step) for step in range(STEPS)])
    model = lockstep.DistributedDataParallel(net, process_group=group, **wrapping)
    parts = [parts_of(global_batch(step), group) for step in range(STEPS)]
    actual = program(net, model, lockstep, lockstep, parts)
    expect_equal(net, alone)
    expect_same_on_all_ranks(net, group)
    if expected is not None:
        torch.testing.assert_close(actual, expected)
    return model


def plain(net, model, optim, utils, batches):
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapper_first(group):
    assert not compare(group, plain).mean_in_grad
    with lockstep.DistributedDataParallel(make_model(), process_group=group).no_sync():
        pass


def accumulated(net, model, optim, utils, batches):
    """The first forward is in no_sync()."""
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for first, second in (batches[:2], batches[2:]):
        if net is model:
            loss_of(model, first).backward()
        else:
            with model.no_sync():
                loss_of(model, first).backward()
        loss_of(model, second).backward()
        utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def clipped(max_norm, norm_type):
    def program(net, model, optim, utils, batches):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        norms = []
        for batch in batches:
            loss_of(model, batch).backward()
            norms.append(utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))
            assert norms[-1].dim() == 0
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return program


def clipped_in_parts(net, model, optim, utils, batches):
    """Two parts by norm, one parameter by value; and one step without."""
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, batch).backward()
        if step != 2:
            norms.append(utils.clip_grad_norm_(net[0].parameters(), 0.02))
            norms.append(utils.clip_grad_norm_(net[2].parameters(), 0.01))
            utils.clip_grad_value_(net[0].bias, 0.001)
        optimizer.step()
    return norms


def clipping(group):
    compare(group, accumulated)
    for max_norm, norm_type in ((0.05, 2.0), (0.01, float("inf")), (1.0, 1.0), (1e6, 2.0)):
        compare(group, clipped(max_norm, norm_type))
    compare(group, clipped_in_parts)
    compare(group, clipped_in_parts, mean_in_grad=True)


def not_finite(group):
    net = make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    loss = loss_of(model, parts_of(global_batch(0), group))
    (loss * float("nan") if dist.get_rank(group) == 1 else loss).backward()
    expect_error(RuntimeError, "non-finite", lambda: lockstep.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True))
    optimizer.zero_grad()
    loss_of(model, parts_of(global_batch(0), group)).backward()
    optimizer.step()


def by_hand(net, model, optim, utils, batches):
    """Something of one's own with .grad: noise, and a penalty that replaces it."""
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step, batch in enumerate(batches):
        loss_of(model, batch).backward()
        generator = torch.Generator().manual_seed(step)
        if net is not model:
            norms.append(lockstep.mean_grad(net[2].weight).norm())
            with model.mean_gradients():
                pass
        else:
            norms.append(net[2].weight.grad.norm())
        net[0].weight.grad.add_(torch.randn(8, 4, generator=generator).double(), alpha=0.01)
        net[2].weight.grad = net[2].weight.grad + 0.1 * net[2].weight.detach()
        optimizer.step()
        optimizer.zero_grad()
    return norms


def mean_by_hand(group):
    compare(group, by_hand)
    compare(group, by_hand, mean_in_grad=True)


def scaled(group):
    """As torch's page on mixed precision has it, with clipping; in step 1 a gradient of rank 1 overflows."""
    alone, net = make_model(), make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    for module, wrapped, optim, utils, kind in (
        (alone, alone, torch.optim, nn.utils, torch.amp.GradScaler),
        (net, model, lockstep, lockstep, lockstep.GradScaler),
    ):
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=1024.0)
        for step in range(3):
            batch = global_batch(step)
            loss = loss_of(wrapped, batch if module is alone else parts_of(batch, group))
            if step == 1 and (module is alone or dist.get_rank(group) == 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            utils.clip_grad_norm_(module.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 512, scaler.get_scale()
    expect_equal(net, alone)


def unfrozen(net, model, optim, utils, batches):
    """The head first, then all: a layer that was frozen when the model was wrapped."""
    optimizer = optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.01)
    for step, batch in enumerate(batches):
        if step == 2:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.002})
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def unfrozen_in_a_group(net, model, optim, utils, batches):
    """It was in the optimizer from the beginning."""
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches):
        net[0].requires_grad_(step >= 2)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def several_optimizers(net, model, optim, utils, batches):
    optimizers = [optim.AdamW(net[0].parameters(), lr=0.01), optim.SGD(net[2].parameters(), lr=0.1)]
    for batch in batches:
        loss_of(model, batch).backward()
        utils.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def options_of_torchs(group):
    """amsgrad, maximize and centered: torch's optimizer, and a warning that says so."""
    options_of = {"AdamW": {"amsgrad": True}, "Adam": {"maximize": True}, "SGD": {"momentum": 0.9, "dampening": 0.5}, "RMSprop": {"centered": True}}
    for name, options in options_of.items():

        def program(net, model, optim, utils, batches):
            optimizer = getattr(optim, name)(model.parameters(), lr=0.01, **options)
            for batch in batches:
                loss_of(model, batch).backward()
                utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert compare(group, program).mean_in_grad
        assert sum(f"{name} with " in str(each.message) for each in caught) == 1, caught


def groups_and_freezing(group):
    def freeze(net):
        net[0].requires_grad_(False)

    compare(group, unfrozen, freeze)
    compare(group, unfrozen_in_a_group, freeze)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(group, several_optimizers)
    assert any("several optimizers for one model" in str(each.message) for each in caught), caught


def hooks(group):
    """torch's own, and one of one's own that sums nothing."""
    torch_hooks = default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook
    for hook, tolerance in zip(torch_hooks, (1e-11, 1e-3, 1e-2)):
        for late in (False, True):  # an optimizer that is given, or found
            alone, net = make_model(), make_model()
            optimizer = lockstep.SGD(net.parameters(), lr=0.1)
            model = lockstep.DistributedDataParallel(net, None if late else optimizer, process_group=group)
            model.register_comm_hook(group, hook)
            train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [global_batch(step) for step in range(STEPS)])
            train(model, optimizer, [parts_of(global_batch(step), group) for step in range(STEPS)])
            expect_equal(net, alone, tolerance)
            expect_same_on_all_ranks(net, group)
            assert model.mean_in_grad
    seen = []

    def twice(state, bucket):
        seen.append((state, bucket.index(), bucket.is_last(), [each.shape for each in bucket.gradients()], len(bucket.parameters())))
        bucket.set_buffer(bucket.buffer() * 2)
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda done: done.value()[0])

    net = make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    model.register_comm_hook("mine", twice)
    expect_error(lockstep.UsageError, "a second communication hook", lambda: model.register_comm_hook(None, twice))
    (net(torch.zeros(1, 4).double()).sum() * 0 + sum(each.sum() for each in net.parameters())).backward()
    assert seen == [] or len(seen) == 1
    loss = model(torch.zeros(1, 4).double()).sum() * 0 + sum(each.sum() for each in net.parameters())
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(each.grad, torch.full_like(each, 2.0 * dist.get_world_size(group))) for each in net.parameters())
    assert seen[-1][:3] == ("mine", 0, True) and len(seen[-1][3]) == seen[-1][4] == 4, seen


def power_sgd(group):
    """torch's, which keeps an error: it learns, and ranks stay alike."""
    net = make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    state = powerSGD_hook.PowerSGDState(process_group=group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = parts_of(global_batch(0), group)
    losses = [loss_of(model, batch).detach()]
    for _ in range(20):
        train(model, optimizer, [batch])
    losses.append(loss_of(model, batch).detach())
    expect_learning(losses, group)
    expect_same_on_all_ranks(net, group)
    assert state.iter > 10, state.iter


def a_hook_that_fails(group):
    net = make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)

    def fail(state, bucket):
        raise ValueError("mine") if dist.get_rank(group) == 0 else lockstep.UsageError("mine")

    model.register_comm_hook(None, fail)
    loss = loss_of(model, parts_of(global_batch(0), group))
    expect_error((ValueError, lockstep.Error), "mine", loss.backward)


def trained_twice(group):
    """One module, with lockstep's optimizer, with torch's, with lockstep's."""
    net, alone = make_model(), make_model()
    for step, optim in enumerate((lockstep.SGD, torch.optim.SGD, lockstep.SGD)):
        optimizer, expected = optim(net.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
        train(model, optimizer, [parts_of(global_batch(step), group)])
        train(alone, expected, [global_batch(step)])
    expect_equal(net, alone)
    expect_same_on_all_ranks(net, group)
    first = model
    model = lockstep.DistributedDataParallel(net, optim(net.parameters(), lr=0.1), process_group=group)
    expect_error(lockstep.UsageError, "parameter 0.weight", loss_of(first, parts_of(global_batch(0), group)).backward)


def one_optimizer_of_two_is_lockstep_s(group):
    net, alone = make_model(), make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    for made, trained, sgd in ((net, model, lockstep.SGD), (alone, alone, torch.optim.SGD)):
        optimizers = sgd(made[0].parameters(), lr=0.1), torch.optim.Adam(made[2].parameters(), lr=0.01)
        for step in range(STEPS):
            batch = global_batch(step)
            loss_of(trained, parts_of(batch, group) if made is net else batch).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    expect_equal(net, alone)
    expect_same_on_all_ranks(net, group)


def an_optimizer_on_one_rank(group):
    net = make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    optimizer = lockstep.SGD(net.parameters(), lr=0.1) if dist.get_rank(group) == 0 else None  # noqa: F841
    expect_error(lockstep.MismatchError, "optimizers of lockstep's", lambda: model(global_batch(0)[0]))


def clipping_on_one_rank(group):
    net = make_model()
    model = lockstep.DistributedDataParallel(net, process_group=group)
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)

    def step():
        loss_of(model, parts_of(global_batch(0), group)).backward()
        if dist.get_rank(group) == 0:
            lockstep.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    expect_error(lockstep.MismatchError, "the mean of the gradients", step)


def arguments_of_pytorch(group):
    model = lockstep.DistributedDataParallel(
        make_model(), None, process_group=group, device_ids=None, output_device=None, dim=0, init_sync=True, find_unused_parameters=False
    )
    loss_of(model, parts_of(global_batch(0), group)).backward()


class Programs(RanksTestCase):
    def test_the_wrapper_comes_first(self):
        self.on_ranks(1, wrapper_first)
        self.on_ranks(3, wrapper_first)
        self.on_ranks(2, arguments_of_pytorch)

    def test_clipping_as_torch_does_it(self):
        self.on_ranks(1, clipping)
        self.on_ranks(3, clipping)
        self.on_ranks(2, not_finite)

    def test_clipping_between_machines(self):
        self.on_ranks(3, clipping, machines=[0, 0, 1])

    def test_options_that_only_torch_has(self):
        self.on_ranks(2, options_of_torchs)

    def test_optimizers_of_torchs(self):
        self.on_ranks(2, one_optimizer_of_two_is_lockstep_s)

    def test_the_mean_by_hand(self):
        self.on_ranks(2, mean_by_hand)

    def test_a_scaled_loss_that_is_unscaled_and_clipped(self):
        self.on_ranks(2, scaled)

    def test_groups_and_freezing_in_mid_training(self):
        self.on_ranks(2, groups_and_freezing)
        self.on_ranks(3, groups_and_freezing, machines=[0, 0, 1])

    def test_communication_hooks_of_torchs_kind(self):
        self.on_ranks(2, hooks)
        self.on_ranks(3, hooks)
        self.on_ranks(2, power_sgd)
        self.on_ranks(2, a_hook_that_fails)

    def test_a_module_that_is_trained_in_another_way_afterwards(self):
        self.on_ranks(1, trained_twice)
        self.on_ranks(2, trained_twice)

    def test_what_ranks_do_differently_is_an_error_on_all(self):
        self.on_ranks(2, an_optimizer_on_one_rank)
        self.on_ranks(2, clipping_on_one_rank)


if __name__ == "__main__":
    unittest.main()
