# SPDX-License-Identifier: Apache-2.0
"""Training with lockstep.DistributedDataParallel computes what one rank of plain torch does with the same global batches."""

import copy
import itertools
import tempfile
import unittest
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import lockstep
from ranks import RanksTestCase

LIKE_TORCH = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.99)},
    "RMSprop": {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01},
}
STEPS = 4


def make_model(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def global_batch(step, samples=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(samples, 4, generator=generator).to(dtype),
        torch.randn(samples, 2, generator=generator).to(dtype),
    )


def parts_of(batch, group, sizes=None):
    """This rank's part of the batch; sizes: of each rank's, even ones by default."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = sizes or [batch[0].size(0) // size] * size
    return [tensor.split(sizes)[rank] for tensor in batch]


def global_batches(steps=STEPS):
    return [global_batch(step) for step in range(steps)]


def parts_of_batches(group, steps=STEPS, sizes=None):
    return [parts_of(batch, group, sizes) for batch in global_batches(steps)]


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def expect_equal(actual, expected, tolerance=1e-11):
    """Parameters of two models, or lists of tensors."""
    if isinstance(actual, nn.Module):
        actual, expected = list(actual.parameters()), list(expected.parameters())
    torch.testing.assert_close(list(actual), list(expected), rtol=tolerance, atol=tolerance)


def expect_same_on_all_ranks(model, group):
    mine = torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    assert torch.equal(mine, first), "the parameters differ between ranks"


def expect_learning(losses, group):
    total = torch.stack(losses)
    dist.all_reduce(total, group=group)
    assert total[-1] < total[0], f"the loss is {total}"


def wrapped_module(net, group, optimizer=lockstep.SGD, **wrapping):
    made = optimizer(net.parameters(), lr=0.1)
    return net, made, lockstep.DistributedDataParallel(net, made, process_group=group, **wrapping)


def wrapped(group, **wrapping):
    return wrapped_module(make_model(), group, **wrapping)


def train(model, optimizer, batches):
    """The loop of every program: returns the model."""
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- What the ranks do


def two_lines(group, name, options, sizes=None, **wrapping):
    """sizes: of the ranks' batches; they count by samples then."""
    if sizes:
        wrapping["weights"] = "samples"
    alone = make_model()
    make = getattr(torch.optim, name, None) or getattr(lockstep, name)
    train(alone, make(alone.parameters(), **options), global_batches())
    net = make_model()
    optimizer = getattr(lockstep, name)(net.parameters(), **options)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, **wrapping)
    train(model, optimizer, parts_of_batches(group, sizes=sizes))
    assert model.samples_of_last_batch == (6 if sizes else dist.get_world_size(group))
    expect_equal(net, alone)
    expect_same_on_all_ranks(net, group)
    assert model.statistics["exchanges"] == STEPS


def every_optimizer(group):
    for name, options in {**LIKE_TORCH, "LAMB": {"lr": 0.01}, "LARS": {"lr": 0.1}}.items():
        two_lines(group, name, options)


def checkpoints_of_unlike_parameters(group):
    """RMSprop whose second group has no momentum; Adagrad before its first step."""

    def make(optim, name):
        net = make_model()
        first, *rest = net.parameters()
        options = {"lr": 0.01, "momentum": 0.9} if name == "RMSprop" else {"lr": 0.1}
        groups = [{"params": [first]}, {"params": rest, **({"momentum": 0} if name == "RMSprop" else {})}]
        return net, getattr(optim, name)(groups, **options)

    for name in ("RMSprop", "Adagrad"):
        for before, after in ((torch.optim, lockstep), (lockstep, torch.optim)):
            alone, optimizer = make(torch.optim, name)
            train(alone, optimizer, global_batches())
            net, optimizer = make(before, name)
            steps = 0 if name == "Adagrad" else 2
            train(net, optimizer, global_batches()[:steps])
            again, its_optimizer = make(after, name)
            again.load_state_dict(net.state_dict())
            its_optimizer.load_state_dict(optimizer.state_dict())
            train(again, its_optimizer, global_batches()[steps:])
            expect_equal(again, alone)


def uneven_and_empty_batches(group, **wrapping):
    for sizes in ([3, 1, 2], [4, 2, 0], [0, 1, 5]):
        two_lines(group, "AdamW", {"lr": 0.01}, sizes, **wrapping)


def layouts(group):
    for wrapping in ({"mean_in_grad": True}, {"share_parameters": False}, {"mean_in_grad": True, "static_graph": True}):
        two_lines(group, "SGD", LIKE_TORCH["SGD"], **wrapping)
    uneven_and_empty_batches(group, mean_in_grad=True)


def one_rank_like_torch(group):
    for name, options in LIKE_TORCH.items():
        nets = make_model(torch.float32), make_model(torch.float32)
        batches = [global_batch(step, dtype=torch.float32) for step in range(STEPS)]
        train(nets[0], getattr(torch.optim, name)(nets[0].parameters(), **options), batches)
        optimizer = getattr(lockstep, name)(nets[1].parameters(), **options)
        train(lockstep.DistributedDataParallel(nets[1], optimizer, process_group=group), optimizer, batches)
        expect_equal(nets[1], nets[0], 1e-6)


def the_same_gradient_bits(group):
    """On one rank nothing but the step is lockstep's: .grad has the bits of plain torch."""
    nets = make_model(torch.float32), make_model(torch.float32)
    optimizer = lockstep.SGD(nets[1].parameters(), lr=0.5)
    model = lockstep.DistributedDataParallel(nets[1], optimizer, process_group=group)
    batch = global_batch(0, dtype=torch.float32)
    loss_of(nets[0], batch).backward()
    loss_of(model, batch).backward()
    for mine, theirs in zip(nets[1].parameters(), nets[0].parameters()):
        assert torch.equal(mine.grad, theirs.grad)


def integer_steps_are_exact(group):
    """Small integers: sums are exact in any order, so all ranks together have the bits of one."""

    def trained(group):
        net = nn.Linear(3, 2, bias=False)
        nn.init.ones_(net.weight)
        optimizer = lockstep.SGD(net.parameters(), lr=0.5, momentum=0.5)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples") if group else net
        x = torch.arange(12.0).view(4, 3)
        for _ in range(3):
            mine = x if group is None else x.split([1, 1, 2])[dist.get_rank(group)]
            model(mine).sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.weight

    assert torch.equal(trained(group), trained(None))


def schedules_and_groups(group):
    def trained(module, group=None):
        net = make_model()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02, "weight_decay": 0.1}]
        optimizer = module.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=STEPS + 1)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group) if group else net
        for step in range(STEPS):
            batch = global_batch(step)
            loss_of(model, parts_of(batch, group) if group else batch).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return net

    expect_equal(trained(lockstep, group), trained(torch.optim))


def checkpoints(group, name):
    """Half of the steps with one, half with the other, in both directions; loaded before and after wrapping."""
    options = LIKE_TORCH[name]
    theirs, ours = getattr(torch.optim, name), getattr(lockstep, name)
    batches = global_batches()
    whole = make_model()
    train(whole, theirs(whole.parameters(), **options), batches)
    half = make_model()
    optimizer = theirs(half.parameters(), **options)
    train(half, optimizer, batches[: STEPS // 2])
    saved = copy.deepcopy((half.state_dict(), optimizer.state_dict()))
    for before in (True, False):
        net = make_model()
        optimizer = ours(net.parameters(), **options)
        if before:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
        if not before:
            model.load_state_dict({f"module.{key}": value for key, value in saved[0].items()})
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, [parts_of(batch, group) for batch in batches[STEPS // 2 :]])
        expect_equal(net, whole)
    # and back
    net = make_model()
    net.load_state_dict(half.state_dict())
    optimizer = ours(net.parameters(), **options)
    optimizer.load_state_dict(saved[1])
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    loss_of(model, parts_of(batches[-2], group)).backward()
    optimizer.step()
    again = make_model()
    again.load_state_dict({key.removeprefix("module."): value for key, value in model.state_dict().items()})
    plain = theirs(again.parameters(), **options)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(again, plain, batches[-1:])
    expect_equal(again, whole)


def accumulation(group):
    sizes = [[1, 3, 2], [2, 2, 2], [3, 0, 3]]
    for wrapping in ({}, {"mean_in_grad": True}):
        alone, net = make_model(), make_model()
        plain, optimizer = torch.optim.SGD(alone.parameters(), lr=0.1), lockstep.SGD(net.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples", **wrapping)
        for step in range(2):
            batches = [global_batch(10 * step + i) for i in range(3)]
            for batch in batches:
                loss_of(alone, batch).backward()
            for i, batch in enumerate(batches):
                part = parts_of(batch, group, sizes[i])
                if i < 2:
                    with model.no_sync():
                        loss_of(model, part).backward()
                else:
                    loss_of(model, part).backward()
            plain.step(), optimizer.step()
            plain.zero_grad(), optimizer.zero_grad()
        expect_equal(net, alone)


def joining(group):
    """Rank r has r + 1 batches: those of a step are the global batch of the ranks that have one. PyTorch's own join()
    is in test_step_weights.py."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    alone = make_model()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(size):
        batch = [tensor[2 * step :] for tensor in global_batch(step)]
        train(alone, plain, [batch])
    for make, zero_first in itertools.product((lockstep.AdamW, torch.optim.AdamW), (True, False)):
        net = make_model()
        optimizer = make(net.parameters(), lr=0.01)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
        with model.join(divide_by_initial_world_size=False):
            for step in range(rank + 1):
                if zero_first:
                    optimizer.zero_grad()
                loss_of(model, [t[2 * rank : 2 * rank + 2] for t in global_batch(step)]).backward()
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
        expect_equal(net, alone)


def skipping(group):
    """A rank without a batch takes part without forward and backward."""
    alone, net = make_model(), make_model()
    batches = [[tensor[:3] for tensor in global_batch(step)] for step in range(2)]
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches)
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    for batch in batches:
        if dist.get_rank(group) == 1:
            model.skip_batch()
        else:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expect_equal(net, alone)


def clipping(group):
    alone, net = make_model(), make_model()
    plain, optimizer = torch.optim.SGD(alone.parameters(), lr=0.1), lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples")
    for step in range(3):
        batch = global_batch(step)
        loss_of(alone, batch).backward()
        loss_of(model, parts_of(batch, group, [1, 5])).backward()
        if step < 2:  # the last one is not clipped
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            norm = optimizer.clip_grad_norm(0.05)
        plain.step(), optimizer.step()
        plain.zero_grad(), optimizer.zero_grad()
        torch.testing.assert_close(float(norm), expected.item())
    expect_equal(net, alone)


def clipping_the_mean(group):
    alone, net = make_model(), make_model()
    plain, optimizer = torch.optim.SGD(alone.parameters(), lr=0.1), lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, mean_in_grad=True)
    for step in range(2):
        loss_of(alone, global_batch(step)).backward()
        loss_of(model, parts_of(global_batch(step), group)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        plain.step(), optimizer.step()
        plain.zero_grad(), optimizer.zero_grad()
    expect_equal(net, alone)


def scaling(group):
    """In step 1 a gradient of rank 1 overflows: no rank steps, and all halve the scale."""
    alone, net = make_model(), make_model()
    plain, optimizer = torch.optim.SGD(alone.parameters(), lr=0.1), lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)
        for step in range(3):
            loss = loss_of(model, parts_of(global_batch(step), group))
            if step == 1 and dist.get_rank(group) == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 512, scaler.get_scale()
    train(alone, plain, [global_batch(0), global_batch(2)])
    expect_equal(net, alone)


def autocast(group):
    net = make_model(torch.float32)
    optimizer = lockstep.AdamW(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    losses = []
    for _ in range(20):
        batch = parts_of(global_batch(0, dtype=torch.float32), group)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch[0])
            assert output.dtype == torch.bfloat16
            loss = nn.functional.mse_loss(output.float(), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    expect_same_on_all_ranks(net, group)
    expect_learning(losses, group)


class Checkpointed(nn.Module):
    """twice: the checkpointed layers are used outside of the checkpoint, too."""

    def __init__(self, net, reentrant, twice=False):
        super().__init__()
        self.net, self.reentrant, self.twice = net, reentrant, twice

    def forward(self, x):
        hidden = checkpoint(self.net[:2], x.requires_grad_(), use_reentrant=self.reentrant)
        return self.net[2](hidden + self.net[:2](x) if self.twice else hidden)


def activation_checkpointing(group):
    batches = global_batches()
    alone = train(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.1), batches)
    for reentrant in (False, True):
        for wrapping in ({}, {"mean_in_grad": True}, {"mean_in_grad": True, "static_graph": True}):
            net = make_model()
            _, optimizer, model = wrapped_module(Checkpointed(net, reentrant), group, **wrapping)
            train(model, optimizer, parts_of_batches(group))
            assert model.statistics["exchanges"] == STEPS
            expect_equal(net, alone)


def synchronised_batch_norm(group):
    def with_norm():
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2)).double()

    def batch_of(step):
        generator = torch.Generator().manual_seed(step)
        return (
            torch.randn(6, 4, 2, generator=generator, dtype=torch.float64),
            torch.randn(6, 2, generator=generator, dtype=torch.float64),
        )

    def trained_alone(sizes, weights):
        """One forward of the global batch; the loss is the mean of its parts' losses, by these weights."""
        net = with_norm()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            x, y = batch_of(step)
            losses = [nn.functional.mse_loss(*part) for part in zip(net(x).split(sizes), y.split(sizes))]
            sum(weight * loss for weight, loss in zip(weights, losses) if weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net

    for sizes, weights, wrapping in (
        ([4, 2], [4 / 6, 2 / 6], {"weights": "samples"}),
        ([6, 0], [1, 0], {"weights": "samples"}),
        ([4, 2], [1 / 2, 1 / 2], {}),
        ([4, 2], [4 / 6, 2 / 6], {"weights": "samples", "mean_in_grad": True}),
    ):
        alone, net = trained_alone(sizes, weights), lockstep.SyncBatchNorm.convert_sync_batchnorm(with_norm(), group)
        assert isinstance(net[1], lockstep.SyncBatchNorm)
        optimizer = lockstep.SGD(net.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, **wrapping)
        train(model, optimizer, [parts_of(batch_of(step), group, sizes) for step in range(STEPS)])
        expect_equal(net, alone, 1e-9)
        expect_equal(net.buffers(), alone.buffers(), 1e-9)
    net.eval(), alone.eval()
    expect_equal([net(batch_of(9)[0])], [alone(batch_of(9)[0])], 1e-9)


def several_forwards_and_models(group):
    """A generator and a critic as in a GAN with gradient penalty: forwards that one backward() passes through add up, a
    forward without a backward() and torch.autograd.grad() count nothing."""

    def trained(batch_for, wrap):
        torch.manual_seed(3)
        generator, critic = nn.Linear(4, 4).double(), make_model()
        optimizers = [lockstep.SGD(generator.parameters(), lr=0.1), lockstep.SGD(critic.parameters(), lr=0.1)]
        models = [wrap(generator, optimizers[0]), wrap(critic, optimizers[1])]
        for step in range(STEPS):
            real, noise = batch_for(step), batch_for(step + 50)
            models[1](real)  # without a backward()
            fake = models[0](noise)
            mixed = (real + fake.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(models[1](mixed).sum(), mixed, create_graph=True)
            loss = models[1](fake.detach()).mean() - models[1](real).mean() + (slope.square().sum(1) - 1).square().mean()
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            (-models[1].module(fake).mean() if wrap is not alone_wrap else -critic(fake).mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
        return nn.ModuleList([generator, critic])

    def alone_wrap(model, optimizer):
        return model

    alone = trained(lambda step: global_batch(step)[0], alone_wrap)
    ranks = trained(
        lambda step: parts_of(global_batch(step), group, [1, 5])[0],
        lambda *it: lockstep.DistributedDataParallel(*it, process_group=group, weights="samples"),
    )
    expect_equal(ranks, alone)


def several_backwards(group):
    """Two backward() of one graph before a step add up."""
    alone, net = make_model(), make_model()
    plain, optimizer = torch.optim.SGD(alone.parameters(), lr=0.1), lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples")
    for step in range(2):
        for wrapped, batch in ((alone, global_batch(step)), (model, parts_of(global_batch(step), group, [2, 4]))):
            output = wrapped(batch[0])
            nn.functional.mse_loss(output, batch[1]).backward(retain_graph=True)
            output.abs().mean().backward()
        plain.step(), optimizer.step()
        plain.zero_grad(), optimizer.zero_grad()
    expect_equal(net, alone)


def hooks_of_parameters(group):
    """The program's own hooks are called, whether they came before the wrapping or after it, and batches of different
    sizes add up as without them, in tied weights too."""

    def trained(early, wrap, batches_of):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        net[2].weight = net[0].weight
        optimizer = lockstep.SGD(net.parameters(), lr=0.1)
        add_hooks = lambda: [parameter.register_hook(lambda gradient: 2 * gradient) for parameter in net.parameters()]
        if early:
            add_hooks()
        model = wrap(net, optimizer)
        if not early:
            add_hooks()
        for step in range(2):
            for batch in batches_of(step):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net

    alone = trained(True, lambda net, _: net, lambda step: [global_batch(step), global_batch(step + 9)])
    parts = lambda step: [parts_of(global_batch(step), group, [2, 4]), parts_of(global_batch(step + 9), group, [6, 0])]
    for early in (True, False):
        for wrapping in ({}, {"mean_in_grad": True}):
            wrap = lambda *it: lockstep.DistributedDataParallel(*it, process_group=group, weights="samples", **wrapping)
            expect_equal(trained(early, wrap, parts), alone)


def another_optimizer(group):
    """Of torch's: the mean is in .grad. The model may be given alone or with it."""
    for give in (False, True):
        alone, net = make_model(), make_model()
        plain, optimizer = torch.optim.RMSprop(alone.parameters()), torch.optim.RMSprop(net.parameters())
        arguments = (net, optimizer) if give else (net,)
        model = lockstep.DistributedDataParallel(*arguments, process_group=group, weights="samples")
        assert model.mean_in_grad
        for step in range(STEPS):
            loss_of(alone, global_batch(step)).backward()
            loss_of(model, parts_of(global_batch(step), group, [5, 1])).backward()
            expect_equal([p.grad for p in net.parameters()], [p.grad for p in alone.parameters()])
            plain.step(), optimizer.step()
            plain.zero_grad(), optimizer.zero_grad()
        expect_equal(net, alone)


def hooks(group):
    for hook, amount in (("fp16", 0), ("bf16", 0), ("powersgd", 2), ("topk", 0.5), ("2bit", 0.01)):
        net = make_model(torch.float32)
        optimizer = lockstep.SGD(net.parameters(), lr=0.05)
        model = lockstep.DistributedDataParallel(
            net, optimizer, process_group=group, hook=hook, hook_amount=amount
        )
        losses = []
        for _ in range(15):
            loss = loss_of(model, parts_of(global_batch(0, dtype=torch.float32), group))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        expect_same_on_all_ranks(net, group)
        expect_learning(losses, group)


def shapes_of_models(group):
    """Tied weights, frozen and unused parameters, dicts as output, names that need a tree."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double())
            self.blocks = nn.ModuleDict({"a": make_model(), "unused": make_model()})
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.table
            self.blocks["a"][0].bias.requires_grad_(False)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, *, x):
            self.count += 1
            return {"y": self.blocks["a"](x @ self.table.t()[:, :4]), "logits": [self.out(x)]}

    def loss(output, y):
        return nn.functional.mse_loss(output["y"], y) + output["logits"][0].square().mean()

    alone, net = Odd(), Odd()
    plain = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=0.01)
    optimizer = lockstep.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples")
    for step in range(STEPS):
        x, y = global_batch(step)
        loss(alone(x=x), y).backward()
        x, y = parts_of((x, y), group, [1, 5])
        loss(model(x=x), y).backward()
        plain.step(), optimizer.step()
        plain.zero_grad(), optimizer.zero_grad()
    expect_equal(net, alone)
    assert net.out.weight is net.table and int(net.count) == STEPS
    assert net.blocks["unused"][0].weight not in optimizer.state


def sparse_gradients(group):
    """Of an embedding, with zero_grad() of both kinds: an entry that is 0 stays, a mean is not added to the last one."""
    for kept, wrapping in itertools.product((False, True), ({}, {"mean_in_grad": True})):
        nets = [nn.Embedding.from_pretrained(torch.eye(6, 4).double(), freeze=False, sparse=True) for _ in range(2)]
        plain, optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1), lockstep.SGD(nets[1].parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(nets[1], optimizer, process_group=group, weights="samples", **wrapping)
        for step in range(STEPS):
            rows = torch.randint(6, (6,), generator=torch.Generator().manual_seed(step))
            nets[0](rows).square().sum(1).mean().backward()
            model(rows.split([4, 2])[dist.get_rank(group)]).square().sum(1).mean().backward()
            plain.step(), optimizer.step()
            plain.zero_grad(), optimizer.zero_grad(set_to_none=not kept)
        expect_equal(nets[1], nets[0])


def reached_twice(group):
    """A layer inside and outside of a checkpointed part: its gradient is ready twice in a backward()."""
    alone = Checkpointed(make_model(), True, twice=True)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), global_batches())
    for wrapping in ({}, {"mean_in_grad": True, "static_graph": True}):
        net, optimizer, model = wrapped_module(Checkpointed(make_model(), True, twice=True), group, **wrapping)
        train(model, optimizer, parts_of_batches(group))
        expect_equal(net, alone)


def closures_and_hooks(group):
    alone, net = make_model(), make_model()
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, parts_of(global_batch(0), group))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0 and calls == [1]
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [global_batch(0)])
    expect_equal(net, alone)
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(2))
    with torch.autograd.profiler.profile() as profile:
        optimizer.step(closure)
    handle.remove()
    assert calls == [1, 2, 1]
    expected = {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"}
    spans = {event.name for event in profile.function_events}
    assert expected <= spans, spans
    with tempfile.TemporaryDirectory() as folder:  # of an observer of all threads
        observer = torch.profiler.ExecutionTraceObserver().register_callback(f"{folder}/trace.json")
        observer.start()
        optimizer.step(closure)
        observer.unregister_callback()
        trace = Path(folder, "trace.json").read_text()
    assert all(span in trace for span in expected)


def half_precision(group):
    """16-bit parameters are updated through a float32 original, which a checkpoint keeps exactly."""

    def trained(optimizer, model, steps):
        for step in steps:
            batch = parts_of(global_batch(step, dtype=torch.float32), group)
            nn.functional.mse_loss(model(batch[0].bfloat16()).float(), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def make():
        net = make_model(torch.bfloat16)
        optimizer = lockstep.AdamW(net.parameters(), lr=0.001)
        return net, optimizer, lockstep.DistributedDataParallel(net, optimizer, process_group=group)

    whole, optimizer, model = make()
    trained(optimizer, model, range(STEPS // 2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained(optimizer, model, range(STEPS // 2, STEPS))
    again, optimizer, model = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    trained(optimizer, model, range(STEPS // 2, STEPS))
    expect_equal(again, whole, 0)


class TwoLines(RanksTestCase):
    def test_one_rank_computes_what_torch_does(self):
        self.on_ranks(1, one_rank_like_torch)
        self.on_ranks(1, the_same_gradient_bits)

    def test_two_and_three_ranks_compute_what_one_does(self):
        self.on_ranks(2, every_optimizer)
        self.on_ranks(3, every_optimizer)

    def test_steps_of_integers_have_the_bits_of_one_rank(self):
        self.on_ranks(3, integer_steps_are_exact)

    def test_uneven_and_empty_batches_are_exact(self):
        self.on_ranks(3, uneven_and_empty_batches)

    def test_every_layout_computes_the_same(self):
        self.on_ranks(3, layouts)

    def test_schedules_and_parameter_groups(self):
        self.on_ranks(2, schedules_and_groups)

    def test_checkpoints_have_the_state_of_each_parameter(self):
        self.on_ranks(1, checkpoints_of_unlike_parameters)

    def test_checkpoints_go_from_torch_to_lockstep_and_back(self):
        for name in LIKE_TORCH:
            self.on_ranks(2, checkpoints, name)

    def test_16_bit_parameters_resume_exactly(self):
        self.on_ranks(2, half_precision)

    def test_no_sync_accumulates_batches_of_different_sizes(self):
        self.on_ranks(3, accumulation)

    def test_ranks_with_fewer_batches_join(self):
        self.on_ranks(3, joining)

    def test_a_rank_without_a_batch_skips_it(self):
        self.on_ranks(2, skipping)

    def test_clip_grad_norm_clips_the_mean(self):
        self.on_ranks(2, clipping)

    def test_torchs_clip_grad_norm_works_where_grad_is_the_mean(self):
        self.on_ranks(2, clipping_the_mean)

    def test_grad_scaler_skips_a_step_on_all_ranks(self):
        self.on_ranks(2, scaling)

    def test_autocast(self):
        self.on_ranks(2, autocast)

    def test_activation_checkpointing(self):
        self.on_ranks(2, activation_checkpointing)
        self.on_ranks(2, reached_twice)

    def test_sparse_gradients(self):
        self.on_ranks(2, sparse_gradients)

    def test_synchronised_batch_norm_sees_the_global_batch(self):
        self.on_ranks(2, synchronised_batch_norm)

    def test_several_forwards_and_models(self):
        self.on_ranks(2, several_forwards_and_models)

    def test_several_backwards_add_up(self):
        self.on_ranks(2, several_backwards)

    def test_hooks_of_parameters_are_kept(self):
        self.on_ranks(2, hooks_of_parameters)

    def test_torchs_optimizers_find_the_mean_in_grad(self):
        self.on_ranks(2, another_optimizer)

    def test_lossy_hooks_keep_ranks_equal_and_learn(self):
        self.on_ranks(2, hooks)

    def test_tied_frozen_and_unused_parameters(self):
        self.on_ranks(2, shapes_of_models)

    def test_closures_and_step_hooks(self):
        self.on_ranks(2, closures_and_hooks)


if __name__ == "__main__":
    unittest.main()
