# SPDX-License-Identifier: Apache-2.0
"""Programs of a training step that are wrong: each is an error on every rank, and nothing hangs."""

import gc
import os
import signal
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

import lockstep
from ranks import RanksTestCase
from support import expect_error, run_ranks
from test_step import (
    Checkpointed,
    expect_equal,
    global_batch,
    loss_of,
    make_model,
    parts_of,
    train,
    wrapped,
    wrapped_module,
)


# ---- What the ranks do


def other_parameters(group):
    other = make_model()
    for make in (lockstep.SGD, torch.optim.SGD):
        optimizer = make(other.parameters(), lr=0.1)
        call = lambda: lockstep.DistributedDataParallel(make_model(), optimizer, process_group=group)
        error = expect_error(lockstep.UsageError, "is not a parameter of the module", call)
        assert "make the optimizer from module.parameters()" in error.next and isinstance(error, lockstep.Error)


def different_models(group):
    net = nn.Linear(3 + dist.get_rank(group), 2)
    call = lambda: lockstep.DistributedDataParallel(net, process_group=group)
    error = expect_error(lockstep.MismatchError, "the models of rank 0 and rank 1 differ at tensor 0: weight", call)
    assert error.what and error.here.startswith("rank ") and error.likely and error.next


def moved_parameters(group, change, text):
    net, optimizer, model = wrapped(group)
    batch = parts_of(global_batch(0), group)
    change(net)
    dtype = net[0].weight.dtype

    def step():
        loss_of(model, [tensor.to(dtype) for tensor in batch]).backward()
        optimizer.step()

    expect_error(lockstep.Error, text, step)


def to_float(net):
    net.float()


def write_data(net):
    net[0].weight.data.zero_()


def load_into_the_module(net):
    net.load_state_dict(make_model().state_dict())


def renormalised_in_forward(group):
    net = nn.Embedding(20, 8, max_norm=0.5)
    model = lockstep.DistributedDataParallel(net, lockstep.SGD(net.parameters(), lr=0.1), process_group=group)
    loss = model(torch.arange(4) + dist.get_rank(group)).mean()
    error = expect_error(lockstep.UsageError, "was written between two steps", loss.backward)
    assert "max_norm" in error.likely and "write_parameters()" in error.next, str(error)


def clipped_by_hand(group):
    _, optimizer, model = wrapped(group)
    loss_of(model, parts_of(global_batch(0), group)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    error = expect_error(lockstep.UsageError, "was changed between backward() and step()", optimizer.step)
    assert "lockstep.clip_grad_norm_()" in error.next, error.next


def unscaled_by_hand(group):
    _, optimizer, model = wrapped(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, parts_of(global_batch(0), group))).backward()
    scaler.unscale_(optimizer)
    error = expect_error(lockstep.UsageError, "GradScaler.unscale_()", lambda: scaler.step(optimizer))
    assert "lockstep.GradScaler" in error.next, error.next


def a_step_before_the_exchange(group, wrapping):
    _, optimizer, model = wrapped(group, **wrapping)
    with model.no_sync():
        loss_of(model, parts_of(global_batch(0), group)).backward()
    expect_error(lockstep.UsageError, "no_sync()", optimizer.step)


def another_buffer(group):
    net = make_model()
    net.register_buffer("average", torch.zeros(1))
    model = lockstep.DistributedDataParallel(net, process_group=group)
    model(global_batch(0)[0])
    net.average = torch.ones(1)
    expect_error(lockstep.UsageError, "buffer average is another tensor", lambda: model(global_batch(0)[0]))


def one_rank_leaves_out_a_step(group):
    _, optimizer, model = wrapped(group)

    def train():
        for step in range(3):
            loss_of(model, parts_of(global_batch(step), group)).backward()
            if step != 1 or dist.get_rank(group) != 0:
                optimizer.step()
            optimizer.zero_grad()

    expect_error(lockstep.Error, "", train)


def a_layer_added_late(group):
    """With an optimizer of torch's, which takes the new parameters."""
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    net.append(nn.Linear(2, 2).double())
    optimizer.add_param_group({"params": net[-1].parameters()})
    call = lambda: train(model, optimizer, [parts_of(global_batch(0), group)])
    expect_error(lockstep.UsageError, "the module has other parameters", call)


def parameters_taken_out_of_a_group(group):
    net, optimizer, model = wrapped(group)
    optimizer.param_groups[0]["params"] = list(net.parameters())[1:]
    call = lambda: train(model, optimizer, [parts_of(global_batch(0), group)])
    expect_error(lockstep.UsageError, "param_groups[0]['params'] are other parameters", call)


def one_rank_loads_the_optimizer(group, before):
    """Before wrapping or after it: the others would count other steps of the state that all share."""
    net = make_model()
    optimizer = lockstep.Adam(net.parameters(), lr=0.1)
    loaded = torch.optim.Adam(net.parameters(), lr=0.1)
    loss_of(net, global_batch(0)).backward()
    loaded.step()
    loaded.zero_grad()
    load = lambda: dist.get_rank(group) == 0 and optimizer.load_state_dict(loaded.state_dict())
    if before:
        load()
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    dist.barrier(group)
    if not before:
        load()
    call = lambda: train(model, optimizer, [parts_of(global_batch(1), group)])
    expect_error(lockstep.MismatchError, "how often the optimizer's state was set", call)


def one_rank_changes_torchs_optimizer(group, change):
    """Each rank has its own parameters: they differ after the step, and the next backward() finds it."""
    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, process_group=group)
    batches = [parts_of(global_batch(i), group) for i in range(5)]
    train(model, optimizer, batches[:2])
    if dist.get_rank(group) == 1:
        change(optimizer)
    error = expect_error(lockstep.MismatchError, "the parameters of rank", lambda: train(model, optimizer, batches[2:4]))
    assert "LOCKSTEP_CHECK" in error.next, error.next


def other_rate(optimizer):
    optimizer.param_groups[0]["lr"] = 0.02


def other_state(optimizer):
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["exp_avg"] *= 3
    optimizer.load_state_dict(state)


def a_step_along_each_ranks_own_gradient(group):
    """As sharpness-aware minimisation does: parameters differ at the exchange, and not at the step."""
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, process_group=group)
    for i in range(3):
        batch = parts_of(global_batch(i), group)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with model.no_sync():
            loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter, old in zip(net.parameters(), before):
                parameter.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


def a_state_changed_in_place(group):
    net = make_model()
    optimizer = lockstep.Adam(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    train(model, optimizer, [parts_of(global_batch(0), group)])
    state = optimizer.state[net[0].weight]
    expect_error(lockstep.UsageError, "something was dropped", lambda: state.pop("exp_avg"))
    state["exp_avg"] = torch.ones_like(net[0].weight)  # by its name: on every rank
    train(model, optimizer, [parts_of(global_batch(1), group)])
    state = optimizer.state[net[0].weight]
    assert state["exp_avg"].min() > 0.5, state
    dist.barrier(group)  # the state is shared: all have looked
    state["exp_avg"].mul_(0.5)
    call = lambda: train(model, optimizer, [parts_of(global_batch(2), group)])
    expect_error(lockstep.UsageError, "the optimizer's state was written by hand", call)


def not_kept(group):
    net = make_model()
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    gc.collect()
    call = lambda: train(net, optimizer, [parts_of(global_batch(0), group)])
    expect_error(lockstep.UsageError, "whose DistributedDataParallel is gone", call)


def other_learning_rate(group):
    _, optimizer, model = wrapped(group)
    loss_of(model, parts_of(global_batch(0), group)).backward()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank(group))
    expect_error(lockstep.MismatchError, "lr of parameter group 0", optimizer.step)


def an_exception_in_backward(group):
    """The rank that it happened on raises it; the others learn of it at once."""
    net, optimizer, model = wrapped(group)

    def fail(gradient):
        raise ValueError("my own mistake")

    if dist.get_rank(group) == 0:
        net[0].bias.register_hook(fail)

    def step():
        loss_of(model, parts_of(global_batch(0), group)).backward()
        optimizer.step()

    if dist.get_rank(group) == 0:
        expect_error(ValueError, "my own mistake", step)
        expect_error(lockstep.UsageError, "after one that failed", step)
    else:
        expect_error(lockstep.PeerLost, "backward() failed", step)


def past_the_wrapper(group, wrapping):
    """The samples of a call that does not go through the DistributedDataParallel are not known."""
    _, _, model = wrapped(group, weights="samples", **wrapping)
    call = lambda: loss_of(model.module, parts_of(global_batch(0), group)).backward()
    expect_error(lockstep.UsageError, "the number of samples of a batch is not known", call)


def past_the_wrapper_where_ranks_count_alike(group):
    alone, (net, optimizer, model) = make_model(), wrapped(group)
    loss_of(model.module, parts_of(global_batch(0), group)).backward()
    optimizer.step()
    loss_of(alone, global_batch(0)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    expect_equal(net, alone)


def options_that_torch_has(group):
    net = make_model()
    optimizer = lockstep.AdamW([{"params": net.parameters(), "amsgrad": True}])
    error = expect_error(lockstep.UsageError, "AdamW with amsgrad=True", optimizer.step)
    assert "torch's optimizer" in error.next
    for name in ("lr", "weight_decay", "betas"):  # as in torch, no default comes in its place
        optimizer = lockstep.AdamW(net.parameters())
        train(net, optimizer, [global_batch(0)])
        del optimizer.param_groups[0][name]
        expect_error(KeyError, name, optimizer.step)
    part = DTensor.from_local(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Shard(0)], run_check=False)
    parts = lockstep.AdamW([nn.Parameter(part)])
    error = expect_error(lockstep.UsageError, "AdamW of parameters that are DTensors", parts.step)
    assert "torch.optim.AdamW" in error.next
    expect_error(ValueError, "Invalid learning rate", lambda: lockstep.SGD(net.parameters(), lr=-1))
    expect_error(TypeError, "dict is not an optimizer", lambda: lockstep.DistributedDataParallel(net, {}))
    expect_error(TypeError, "unexpected argument device=0", lambda: lockstep.DistributedDataParallel(net, device=0))
    expect_error(lockstep.UsageError, "device_ids=[0]", lambda: lockstep.DistributedDataParallel(net, [0]))
    expect_error(lockstep.UsageError, "dim=1", lambda: lockstep.DistributedDataParallel(net, dim=1))
    _, _, model = wrapped(group)
    expect_error(lockstep.UsageError, "hook zip", lambda: wrapped(group, hook="zip"))
    expect_error(lockstep.UsageError, "weights='equal'", lambda: wrapped(group, weights="equal"))


def groups_that_come_late(group):
    net, extra = make_model(), nn.Linear(2, 2)
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    call = lambda: optimizer.add_param_group({"params": list(extra.parameters())})
    expect_error(lockstep.UsageError, "that the module did not have", call)
    loss_of(model, parts_of(global_batch(0), group)).backward()
    optimizer.step()


def not_in_the_group(group):
    lone = dist.new_group([0])
    if dist.get_rank(group) == 0:
        net = make_model()
        model = lockstep.DistributedDataParallel(net, lockstep.SGD(net.parameters(), lr=0.1), process_group=lone)
        loss_of(model, global_batch(0)).backward()
    else:
        call = lambda: lockstep.DistributedDataParallel(make_model(), process_group=lone)
        expect_error(lockstep.UsageError, "a process group that this rank is not in", call)


def reached_twice_without_a_static_graph(group):
    """The error of a hook of autograd's is lockstep's own."""
    _, _, model = wrapped_module(Checkpointed(make_model(), True, twice=True), group, mean_in_grad=True)
    call = lambda: loss_of(model, parts_of(global_batch(0), group)).backward()
    error = expect_error(lockstep.UsageError, "became ready again after it was sent", call)
    assert "static_graph" in error.next


def killed_in_backward():
    """Through buckets, where hooks of autograd wait for the others."""
    _, _, model = wrapped(None, mean_in_grad=True)
    loss = loss_of(model, [tensor[:2] for tensor in global_batch(0)])
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error(lockstep.PeerLost, "rank 1", loss.backward)


def synchronised_layers(group):
    """What would make other ranks wait for this one's forward() is refused on every rank."""
    make = lambda: nn.Sequential(lockstep.SyncBatchNorm(4, process_group=group).double(), make_model())
    _, _, model = wrapped_module(make(), group)
    for name, call in (("skip_batch()", model.skip_batch), ("join()", model.join().__enter__)):
        error = expect_error(lockstep.UsageError, f"{name} of a model with SyncBatchNorm", call)
        assert "(0, ...)" in error.next
    x = global_batch(0)[0].requires_grad_()
    twice = lambda: torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    expect_error(lockstep.UsageError, "a second derivative of SyncBatchNorm", twice)
    model.module.eval()
    with model.join():
        pass


def moved_away(group, change):
    """Of those that the ranks share; the same is said in every layout."""
    net, optimizer, model = wrapped(group)
    train(model, optimizer, [parts_of(global_batch(0), group)])
    change(net)
    dtype = net[0].weight.dtype

    def step():
        train(model, optimizer, [[tensor.to(net[0].weight.device, dtype) for tensor in parts_of(global_batch(1), group)]])

    text = "parameter 0.weight is another one than when DistributedDataParallel was made: it was torch.float64 on cpu"
    error = expect_error(lockstep.UsageError, text, step)
    assert "change the model first" in error.next, error


def to_meta(net):
    net.to("meta")


def another_parameter(net):
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


def deleted_and_appended(net, _):
    del net[len(net) :]  # nothing, but makes a new dict of modules
    net.append(nn.Linear(2, 2).double())


def other_modules(group):
    """What is put into any of the modules is seen, also where nothing that was there has changed."""

    def error_of(change, text):
        net, optimizer, model = wrapped(group)
        train(model, optimizer, [parts_of(global_batch(0), group)])
        change(net, model)
        expect_error(lockstep.UsageError, text, lambda: model(global_batch(1)[0]))

    error_of(lambda net, _: net[0].add_module("more", nn.Linear(2, 2)), "the module has other parameters than")
    error_of(lambda net, _: net[0].register_parameter("more", nn.Parameter(torch.ones(2))), "the module has other parameters than")
    error_of(lambda net, _: delattr(net[0], "weight"), "parameter 0.weight is another one than")
    error_of(lambda net, _: net[0].register_buffer("more", torch.ones(2)), "buffer 0.more is another tensor")
    error_of(lambda _, model: setattr(model, "module", make_model()), "is another one than")
    error_of(lambda net, _: net[0].__init__(4, 8, dtype=torch.float64), "parameter 0.weight is another one than")
    error_of(lambda net, _: net[0].__setstate__(make_model()[0].__dict__), "parameter 0.weight is another one than")
    error_of(deleted_and_appended, "the module has other parameters than")
    net, optimizer, model = wrapped(group)
    for step in range(2):
        train(model, optimizer, [parts_of(global_batch(step), group)])
        net[0].add_module(f"without_parameters_{step}", nn.Identity())


def without_cuda(group):
    """Tensors that say they are on a GPU, as on a machine that has one."""
    with FakeTensorMode():
        net = nn.Linear(4, 2, device="cuda")
    call = lambda: lockstep.DistributedDataParallel(net, process_group=group)
    error = expect_error(lockstep.DeviceError, "built without CUDA", call)
    assert "cuda" in error.next
    over_lockstep = dist.new_group(backend="lockstep")
    expect_error(RuntimeError, "cuda", lambda: over_lockstep._get_backend(torch.device("cuda")))


def a_step_in_a_forked_child(group):
    """The child is not a rank: it says so, and the ranks go on."""
    net, optimizer, model = wrapped(group)
    train(model, optimizer, [parts_of(global_batch(0), group)])
    context = torch.multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child():
        try:
            train(model, optimizer, [parts_of(global_batch(1), group)])
            answers.put("no error")
        except lockstep.Error as error:
            answers.put(str(error))
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert "forked child" in answers.get()
    train(model, optimizer, [parts_of(global_batch(1), group)])


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((4,), i / 6, dtype=torch.float64), torch.full((2,), i * i / 36, dtype=torch.float64)


def workers_that_fork(group):
    """DataLoader's workers are forked after wrapping, and again in the second epoch."""
    _, optimizer, model = wrapped(group)
    for _ in range(2):
        for x, y in DataLoader(Squares(), batch_size=3, num_workers=2, multiprocessing_context="fork"):
            loss_of(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()


class Errors(RanksTestCase):
    def test_an_optimizer_of_other_parameters(self):
        self.on_ranks(2, other_parameters)

    def test_models_that_differ(self):
        self.on_ranks(2, different_models)

    def test_parameters_written_by_hand(self):
        self.on_ranks(2, moved_parameters, write_data, "was written between two steps")
        self.on_ranks(2, moved_parameters, load_into_the_module, "was written between two steps")

    def test_an_embedding_that_writes_its_weight_in_forward_is_refused_by_name(self):
        self.on_ranks(2, renormalised_in_forward)

    def test_torchs_clip_grad_norm_is_refused_by_name(self):
        self.on_ranks(2, clipped_by_hand)

    def test_unscaling_by_hand_is_refused(self):
        self.on_ranks(2, unscaled_by_hand)

    def test_a_step_before_the_exchange(self):
        self.on_ranks(2, a_step_before_the_exchange, {"mean_in_grad": True})

    def test_a_buffer_that_was_replaced(self):
        self.on_ranks(2, another_buffer)

    def test_a_step_left_out_by_one_rank(self):
        self.on_ranks(2, one_rank_leaves_out_a_step)

    def test_torchs_optimizer_changed_on_one_rank(self):
        for change in (other_rate, other_state):
            self.on_ranks(2, one_rank_changes_torchs_optimizer, change)

    def test_a_step_along_each_ranks_own_gradient_is_fine(self):
        self.on_ranks(2, a_step_along_each_ranks_own_gradient)

    def test_a_layer_that_is_added_late(self):
        self.on_ranks(2, a_layer_added_late)

    def test_parameters_taken_out_of_a_group(self):
        self.on_ranks(2, parameters_taken_out_of_a_group)

    def test_an_optimizer_that_one_rank_loads(self):
        for before in (True, False):
            self.on_ranks(2, one_rank_loads_the_optimizer, before)

    def test_a_state_that_is_changed_in_place(self):
        self.on_ranks(2, a_state_changed_in_place)

    def test_a_wrapper_that_is_not_kept(self):
        self.on_ranks(2, not_kept)

    def test_another_learning_rate_on_one_rank(self):
        self.on_ranks(2, other_learning_rate)

    def test_an_exception_in_backward_ends_the_others(self):
        self.on_ranks(2, an_exception_in_backward)

    def test_a_forward_past_the_wrapper(self):
        for wrapping in ({}, {"mean_in_grad": True}):
            self.on_ranks(2, past_the_wrapper, wrapping)
        self.on_ranks(2, past_the_wrapper_where_ranks_count_alike)

    def test_options_that_lockstep_does_not_have(self):
        self.on_ranks(1, options_that_torch_has)

    def test_a_group_added_after_wrapping(self):
        self.on_ranks(2, groups_that_come_late)

    def test_a_rank_outside_of_the_group(self):
        self.on_ranks(3, not_in_the_group)

    def test_data_loaders_fork_after_wrapping(self):
        self.on_ranks(2, workers_that_fork)

    def test_a_step_in_a_forked_child(self):
        self.on_ranks(2, a_step_in_a_forked_child)

    def test_modules_with_other_contents(self):
        self.on_ranks(2, other_modules)

    def test_parameters_that_moved_away(self):
        for change in (to_float, to_meta, another_parameter):
            with self.subTest(change=change.__name__):
                self.on_ranks(2, moved_away, change)

    def test_errors_in_hooks_of_autograd_are_locksteps(self):
        self.on_ranks(2, reached_twice_without_a_static_graph)
        with self.assertRaisesRegex(AssertionError, r"exit codes \[0, -9\], 0 ranks did not end"):
            run_ranks(2, killed_in_backward)

    def test_batches_left_out_with_synchronised_layers(self):
        self.on_ranks(2, synchronised_layers)

    def test_cuda_tensors_without_the_cuda_build(self):
        self.on_ranks(3, without_cuda)


if __name__ == "__main__":
    unittest.main()
