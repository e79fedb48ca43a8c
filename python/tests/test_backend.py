# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over lockstep:  python3 -m unittest discover -s python/tests"""

import os
import signal
import subprocess
import sys
import time
import unittest

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep
from support import expect, expect_error, run_ranks

SIZES = (1, 2, 3, 4, 7)


def data_of(rank, elements=1001, dtype=torch.float32):
    """Small integers, so that sums are exact in any order."""
    return (torch.arange(elements) % 5 + rank + 1).to(dtype)


def sum_of_all(elements=1001):
    return sum(data_of(rank, elements) for rank in range(dist.get_world_size()))


# ---- What the ranks do. Functions of this module, so that spawned processes find them.


def reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    stacked = torch.stack([data_of(other) for other in range(size)])
    for op, expected in (
        (dist.ReduceOp.SUM, stacked.sum(0)),
        (dist.ReduceOp.AVG, stacked.sum(0) / size),
        (dist.ReduceOp.PRODUCT, stacked.prod(0)),
        (dist.ReduceOp.MIN, stacked.amin(0)),
        (dist.ReduceOp.MAX, stacked.amax(0)),
    ):
        tensor = data_of(rank)
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)
    works = [(tensor, dist.all_reduce(tensor, async_op=True)) for tensor in [data_of(rank) for _ in range(5)]]
    for tensor, work in works:
        work.wait()
        expect(tensor, sum_of_all())
    tensor = data_of(rank)
    dist.reduce(tensor, size - 1)
    expect(tensor, sum_of_all() if rank == size - 1 else data_of(rank))
    output = torch.zeros(1001)
    dist.reduce_scatter(output, [data_of(rank) * (i + 1) for i in range(size)])
    expect(output, sum_of_all() * (rank + 1))
    dist.reduce_scatter_tensor(output, torch.cat([data_of(rank) * (i + 1) for i in range(size)]))
    expect(output, sum_of_all() * (rank + 1))


def movements():
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = [data_of(other) for other in range(size)]
    tensor = data_of(rank)
    dist.broadcast(tensor, size - 1)
    expect(tensor, everybody[-1])
    outputs = [torch.zeros(1001) for _ in range(size)]
    dist.all_gather(outputs, data_of(rank))
    expect(outputs, everybody)
    flat = torch.zeros(1001 * size)
    dist.all_gather_into_tensor(flat, data_of(rank))
    expect(flat, torch.cat(everybody))
    outputs = [torch.zeros(1001) for _ in range(size)] if rank == 0 else None
    dist.gather(data_of(rank), outputs, dst=0)
    if rank == 0:
        expect(outputs, everybody)
    output = torch.zeros(1001)
    dist.scatter(output, everybody if rank == 0 else None, src=0)
    expect(output, data_of(rank))
    sent = [torch.full((rank + other + 1,), 10 * rank + other) for other in range(size)]
    received = [torch.zeros(rank + other + 1, dtype=torch.int64) for other in range(size)]
    dist.all_to_all(received, sent)
    expect(received, [torch.full((rank + other + 1,), 10 * other + rank) for other in range(size)])
    flat = torch.zeros(size, dtype=torch.int64)
    dist.all_to_all_single(flat, torch.full((size,), rank))
    expect(flat, torch.arange(size))
    dist.barrier()


def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": other, "text": "x" * other} for other in range(size)]
    texts = ["hello", 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(texts, src=0)
    assert texts == ["hello", 3]


def objects_of_one_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, gathered, 0)
    assert rank > 0 or gathered == [{"rank": other} for other in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [("for", other) for other in range(size)] if rank == 0 else None, 0)
    assert mine == [("for", rank)]


def odd_shapes():
    """Nothing, one number, and tensors with gaps or in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    none = torch.empty(0, 3)
    dist.all_reduce(none)
    dist.all_gather([torch.empty(0, 3) for _ in range(size)], none)
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    number = torch.tensor(float(rank + 1))
    dist.all_reduce(number)
    expect(number, torch.tensor(size * (size + 1) / 2))
    flat = torch.zeros(size)
    dist.all_gather_into_tensor(flat, torch.tensor(float(rank)))
    expect(flat, torch.arange(size).float())
    gaps = torch.zeros(10)
    gaps[::2] += rank + 1
    dist.all_reduce(gaps[::2])
    expect(gaps, torch.tensor([size * (size + 1) / 2, 0]).repeat(5))
    turned = [torch.zeros(6, 4).t() for _ in range(size)]
    dist.all_gather(turned, torch.full((4, 6), float(rank)))
    expect([each.contiguous() for each in turned], [torch.full((4, 6), float(other)) for other in range(size)])


def uneven_rows():
    """Rank r sends r + s rows to rank s."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [torch.full((rank + other, 3), 10.0 * rank + other) for other in range(size)]
    rows = [rank + other for other in range(size)]
    received = torch.zeros(sum(rows), 3)
    dist.all_to_all_single(received, torch.cat(sent), rows, rows)
    expect(received, torch.cat([torch.full((rank + other, 3), 10.0 * other + rank) for other in range(size)]))
    whole = [torch.zeros(other + 1, 2) for other in range(size)]
    dist.all_gather(whole, torch.full((rank + 1, 2), float(rank)))
    expect(whole, [torch.full((other + 1, 2), float(other)) for other in range(size)])


def outputs_in_inputs():
    """An output may lie in the input; outputs that lie in each other are refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    both = torch.arange(2.0 * size) + 100 * rank
    dist.all_to_all_single(both, both)
    expect(both, torch.cat([torch.arange(2.0) + 2 * rank + 100 * other for other in range(size)]))
    whole = torch.arange(4.0 * size) + rank
    expected = size * torch.arange(4.0 * size)[4 * rank : 4 * rank + 4] + sum(range(size))
    dist.reduce_scatter_tensor(whole[:4], whole)
    expect(whole[:4], expected)
    if size > 1:
        one, mine = torch.zeros(size + 2), torch.full((3,), float(rank))
        text = "output tensors that overlap"
        expect_error(lockstep.UsageError, text, lambda: dist.all_gather([one[:3]] * size, mine))
        expect_error(lockstep.UsageError, text, lambda: dist.all_gather([one[other : other + 3] for other in range(size)], mine))
        gaps = torch.zeros(3, 2)[:, 0]
        expect_error(lockstep.UsageError, text, lambda: dist.all_gather([gaps] * size, mine))
        expect_error(lockstep.UsageError, text, lambda: dist.all_to_all([one[:1]] * size, list(torch.ones(size).chunk(size))))
    dist.barrier()


def gradients_in_sub_groups():
    """torch.distributed.nn in a group without rank 1. (Its gather and scatter take a rank of the group for one of the job, over
    any backend.)"""
    members = [rank for rank in range(dist.get_world_size()) if rank != 1]
    group, rank, size = dist.new_group(members), dist.get_rank(), len(members)
    if rank == 1:
        return
    number, last = members.index(rank) + 1, members[-1]
    total, all_numbers = size * (size + 1) / 2, torch.arange(1.0, size + 1).repeat_interleave(2)

    def expect_gradient(function, expected, elements=2):
        x = torch.full((elements,), float(number), requires_grad=True)
        (function(x) * number).sum().backward()
        expect(x.grad, expected)

    functions = dist.nn.functional
    weighted = lambda parts: sum((i + 1) * part for i, part in enumerate(parts))
    expect_gradient(lambda x: functions.all_reduce(x, group=group), torch.full((2,), total))
    expect_gradient(lambda x: weighted(functions.all_gather(x, group=group)), torch.full((2,), number * total))
    expect_gradient(lambda x: functions.broadcast(x, last, group=group), torch.full((2,), total if rank == last else 0.0))
    expect_gradient(lambda x: functions.reduce(x, last, group=group), torch.full((2,), float(size)))
    scattered = lambda x: functions.reduce_scatter(torch.zeros(2), list(x.chunk(size)), group=group)
    expect_gradient(scattered, all_numbers, 2 * size)
    expect_gradient(lambda x: functions.all_to_all_single(torch.zeros(2 * size), x, group=group), all_numbers, 2 * size)


def messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(100_000)
    exchange = [
        dist.P2POp(dist.isend, data_of(rank, 100_000), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    expect(received, data_of((rank - 1) % size, 100_000))
    if rank > 0:
        dist.send(torch.full((3,), rank), 0)
        return
    tensor = torch.zeros(3, dtype=torch.int64)
    senders = []
    for _ in range(size - 1):
        senders.append(dist.recv(tensor))
        expect(tensor, torch.full((3,), senders[-1]))
    assert sorted(senders) == list(range(1, size))


def sub_groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(range(0, size, 2))
    odd = dist.new_group(range(1, size, 2)) if size > 1 else None
    mine = odd if rank % 2 else even
    members = list(range(rank % 2, size, 2))
    in_mine, in_all = torch.full((1000,), rank), torch.full((1000,), rank)
    works = [dist.all_reduce(in_all, async_op=True), dist.all_reduce(in_mine, group=mine, async_op=True)]
    for work in reversed(works):
        work.wait()
    expect(in_all, torch.full((1000,), sum(range(size))))
    expect(in_mine, torch.full((1000,), sum(members)))


def functional_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    expect(functional.all_reduce(data_of(rank), "sum", group) + 0, sum_of_all())
    gathered = functional.all_gather_tensor(data_of(rank), 0, group) + 0
    expect(gathered, torch.cat([data_of(other) for other in range(size)]))
    parts = torch.cat([data_of(rank) * (i + 1) for i in range(size)])
    expect(functional.reduce_scatter_tensor(parts, "sum", 0, group) + 0, sum_of_all() * (rank + 1))
    expect(functional.all_to_all_single(torch.full((size,), rank), None, None, group) + 0, torch.arange(size))
    both = functional.all_reduce_coalesced([data_of(rank), data_of(rank, 5)], "sum", group)
    expect([one + 0 for one in both], [sum_of_all(), sum_of_all(5)])
    expect(functional.broadcast(data_of(rank), 0, group) + 0, data_of(0))


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


def everything():
    reductions()
    sparse_sums()
    movements()
    objects()
    objects_of_one_rank()
    odd_shapes()
    uneven_rows()
    outputs_in_inputs()
    if dist.get_world_size() > 1:
        messages()
    sub_groups()
    gradients_in_sub_groups()
    functional_collectives()


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)


def train(model, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        data, target = batch_of(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()


def train_with_ddp():
    states = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(small_model(), process_group=group, gradient_as_bucket_view=True)
        train(model)
        states.append(model.state_dict())
    expect(*states)


def train_with_hook():
    """A communication hook in Python, whose future is completed by the backend's own thread."""

    def hook(state, bucket):
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])

    model = DistributedDataParallel(small_model())
    model.register_comm_hook(None, hook)
    train(model)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    reference = parameters.clone()
    dist.broadcast(reference, 0)
    expect(parameters, reference)


def mapping_of(address):
    """The name of what is mapped there, as /proc/self/maps has it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= address < end:
                return line
    return ""


def look_at_buckets():
    seen = []

    def hook(state, bucket):
        seen.append(mapping_of(bucket.buffer().data_ptr()))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model = DistributedDataParallel(small_model())
    model.register_comm_hook(None, hook)
    train(model, steps=3)
    assert seen and all("memfd:lockstep" in mapping for mapping in seen), seen


def reference_of_fsdp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def train_with_fsdp(kind):
    replica = DistributedDataParallel(reference_of_fsdp())
    train(replica)
    if kind == "fully_shard":
        model = reference_of_fsdp()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model)
        parameters = [parameter.full_tensor() for parameter in model.parameters()]
    else:
        model = FullyShardedDataParallel(reference_of_fsdp(), device_id=torch.device("cpu"))
        train(model)
        with FullyShardedDataParallel.summon_full_params(model):
            parameters = [parameter.detach().clone() for parameter in model.parameters()]
    expected = torch.cat([parameter.detach().flatten() for parameter in replica.parameters()])
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in parameters]), expected)


def mismatch():
    tensor = torch.ones(dist.get_rank() + 1)
    error = expect_error(lockstep.MismatchError, "rank 0", lambda: dist.all_reduce(tensor))
    assert "rank 1" in str(error), error


def sleeps(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "S"


def killed_peer():
    rank_0 = torch.tensor([os.getpid()])
    dist.broadcast(rank_0, 0)
    if dist.get_rank() == 1:
        while not sleeps(rank_0.item()):  # it waits in all_reduce
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    expect_error(lockstep.PeerLost, "rank 1", lambda: dist.all_reduce(torch.ones(10)))
    assert time.monotonic() - start < 60, "too late: the group's timeout is half an hour"


def call_after_shutdown():
    old = dist.group.WORLD._get_backend(torch.device("cpu"))
    old.shutdown()
    expect_error(lockstep.Error, "after its shutdown", lambda: old.allreduce([torch.ones(1)]).wait())


class Import(unittest.TestCase):
    def test_sets_a_variable_of_torch_unless_it_is_set(self):
        for told, expected in (({}, "0"), ({"DDP_DISABLE_COMM_MEM": "1"}, "1")):
            environment = {**{k: v for k, v in os.environ.items() if k != "DDP_DISABLE_COMM_MEM"}, **told}
            code = "import os, lockstep; print(os.environ['DDP_DISABLE_COMM_MEM'])"
            printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            self.assertEqual(printed.strip(), expected)


class Collectives(unittest.TestCase):
    def test_every_collective_is_exact_on_every_world_size(self):
        for size in SIZES:
            with self.subTest(size=size):
                run_ranks(size, everything)


def trainings_and_errors():
    train_with_ddp()
    train_with_hook()
    look_at_buckets()
    for kind in ("fully_shard", "FullyShardedDataParallel"):
        train_with_fsdp(kind)
    mismatch()
    call_after_shutdown()


class Training(unittest.TestCase):
    def test_ddp_and_fsdp_train_as_over_gloo_and_wrong_calls_raise(self):
        run_ranks(2, trainings_and_errors)

    def test_a_killed_rank_raises_on_the_survivor(self):
        with self.assertRaisesRegex(AssertionError, r"exit codes \[0, -9\], 0 ranks did not end"):
            run_ranks(2, killed_peer)


if __name__ == "__main__":
    unittest.main()
