# SPDX-License-Identifier: Apache-2.0
"""lockstep.World: collectives, messages and sub-worlds, by itself and beside a process group."""

import os
import shutil
import sys
import tempfile
import threading
import time
import unittest

import torch
import torch.distributed as dist

import lockstep
from support import expect, expect_error, run_ranks, started

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
PROGRAM = os.path.abspath(__file__)
SIZES = (1, 2, 3, 4, 7)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def data_of(rank, dtype=torch.float32):
    """Small integers, so that sums are exact in any order."""
    return ((torch.arange(21) + rank) % 3 + 1).to(dtype).view(7, 3)


# ---- What the ranks do


def reductions(world):
    rank, size = world.rank, world.size
    for dtype in DTYPES:
        everybody = torch.stack([data_of(other, dtype) for other in range(size)])
        total = everybody.sum(0, dtype=dtype)
        expect(world.all_reduce(data_of(rank, dtype)), total)
        expect(world.all_reduce(data_of(rank, dtype).t()), total.t())
        expect(world.all_reduce(data_of(rank, dtype), "max"), everybody.amax(0))
        expect(world.reduce(data_of(rank, dtype), root=size - 1), total if rank == size - 1 else data_of(rank, dtype))
        parts = data_of(rank, dtype).repeat(size, 1)
        expect(world.reduce_scatter(parts), total)
    expect(world.all_reduce(torch.full((3,), float(rank)), "mean"), torch.full((3,), (size - 1) / 2))
    expect(world.all_reduce(torch.tensor([1 << rank]), "bit_or"), torch.tensor([(1 << size) - 1]))


def movements(world):
    rank, size = world.rank, world.size
    for dtype in DTYPES:
        everybody = torch.stack([data_of(other, dtype) for other in range(size)])
        expect(world.broadcast(data_of(rank, dtype), root=size - 1), everybody[-1])
        expect(world.all_gather(data_of(rank, dtype)), everybody)
        gathered = world.gather(data_of(rank, dtype), root=size - 1)
        assert gathered is None if rank < size - 1 else torch.equal(gathered, everybody), gathered
        expect(world.scatter(everybody if rank == 0 else None, torch.empty(7, 3, dtype=dtype)), everybody[rank])
    expect(world.all_to_all(torch.full((size,), rank)), torch.arange(size))
    sent = torch.cat([torch.full((to + 1,), 10 * rank + to) for to in range(size)])
    received = torch.cat([torch.full((rank + 1,), 10 * other + rank) for other in range(size)])
    expect(world.all_to_all(sent, send_rows=range(1, size + 1)), received)
    world.barrier()


def messages(world):
    rank, size = world.rank, world.size
    if rank == 0:
        senders = []
        for _ in range(size - 1):
            tensor = torch.zeros(7, 3)
            senders.append(world.receive(tensor))
            expect(tensor, data_of(senders[-1]))
        assert sorted(senders) == list(range(1, size)), senders
        for other in range(1, size):
            world.send(data_of(other), other, tag=5)
        return
    world.send(data_of(rank), 0)
    tensor = torch.zeros(7, 3)
    assert world.receive(tensor, source=0, tag=5) == 0
    expect(tensor, data_of(rank))


def sub_worlds(world):
    rank, size = world.rank, world.size
    half = world.split(rank % 2, key=-rank)
    members = list(range(rank % 2, size, 2))[::-1]
    assert (half.rank, half.size) == (members.index(rank), len(members)), half
    expect(half.all_gather(torch.tensor(rank)), torch.tensor(members))
    last = world.group([size - 1])
    assert (last is None) == (rank < size - 1), last
    assert world.split(-1) is None
    reductions(half)


def everything():
    world = lockstep.World.from_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node_rank) == (rank, size, rank, size, 0)
    assert f"rank {rank} of {size} on " in repr(world), world
    reductions(world)
    movements(world)
    messages(world)
    sub_worlds(world)


def on_two_machines():
    world = lockstep.World.from_env()
    assert (world.local_rank, world.local_size, world.node_rank) == ((0, 1, 1) if world.rank == 2 else (world.rank, 2, 0)), world
    reductions(world)
    movements(world)


def beside_a_process_group():
    """Neither disturbs the other, also where their calls take turns or run at the same time."""
    one, other = lockstep.World.from_env(), lockstep.World.from_env()
    rank, size = one.rank, one.size
    for _ in range(3):
        tensor = data_of(rank)
        work = dist.all_reduce(tensor, async_op=True)
        expect(other.all_reduce(data_of(rank)), one.all_reduce(data_of(rank)))
        work.wait()
        expect(tensor, one.all_reduce(data_of(rank)))
    thread = threading.Thread(target=lambda: [other.all_reduce(torch.ones(3)) for _ in range(50)])
    thread.start()
    for _ in range(50):
        expect(one.all_reduce(torch.ones(3)), torch.full((3,), float(size)))
    thread.join()


def errors():
    world = lockstep.World.from_env()
    expect_error(lockstep.UsageError, "avg: there is no such value", lambda: world.all_reduce(torch.ones(3), "avg"))
    expect_error(lockstep.UsageError, "", lambda: world.broadcast(torch.ones(3), root=2))
    expect_error(lockstep.UsageError, "", lambda: world.send(torch.ones(3), world.rank))
    expect_error(lockstep.UsageError, "", lambda: world.group([0, 0]))
    error = expect_error(lockstep.MismatchError, "rank 0", lambda: world.all_reduce(torch.ones(world.rank + 1)))
    assert "rank 1" in str(error), error
    expect(world.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
    if world.rank == 1:
        return
    expect_error(lockstep.PeerLost, "rank 1", world.barrier)


def waits_while_a_thread_goes_on(folder):
    """Rank 1 comes when a thread of rank 0, which waits for it, has written a file."""
    world = lockstep.World.from_env()
    calls = (world.barrier, lambda: world.all_reduce(torch.ones(3)), lambda: world.split(0), lambda: pass_on(world))
    for number, call in enumerate(calls):
        file = os.path.join(folder, str(number))
        if world.rank == 0:
            waits = threading.Event()
            thread = threading.Thread(target=lambda: (waits.wait(), time.sleep(0.1), open(file, "w").close()))
            thread.start()
            waits.set()
        else:
            until = time.monotonic() + 60
            while not os.path.exists(file):
                assert time.monotonic() < until, f"rank 0 does not run its thread in call {number}"
                time.sleep(0.01)
        call()


def pass_on(world):
    world.send(torch.ones(1), 0) if world.rank == 1 else world.receive(torch.ones(1), 1)


def launched():
    """Before and after init_process_group()."""
    torch.set_num_threads(1)
    before = lockstep.World.from_env()
    dist.init_process_group(sys.argv[1])
    after = lockstep.World.from_env()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert [before.all_reduce(torch.ones(3))[0], after.all_reduce(torch.ones(3))[0], tensor[0]] == [3, 3, 3]
    dist.destroy_process_group()
    assert before.all_gather(torch.tensor(before.rank)).tolist() == [0, 1, 2]
    assert lockstep.World.from_env().all_gather(torch.tensor(before.rank)).tolist() == [0, 1, 2]
    print(f"rank {before.rank} is done", flush=True)


# ---- Tests


class Worlds(unittest.TestCase):
    def test_every_call_is_exact_on_every_world_size(self):
        for size in SIZES:
            with self.subTest(size=size):
                run_ranks(size, everything, backend="gloo")

    def test_between_machines(self):
        run_ranks(3, on_two_machines, backend="gloo", machines=[0, 0, 1])

    def test_beside_a_process_group(self):
        run_ranks(3, beside_a_process_group)

    def test_errors_are_locksteps(self):
        run_ranks(2, errors, backend="gloo")

    def test_other_threads_go_on_while_a_call_waits(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, waits_while_a_thread_goes_on, folder, backend="gloo")

    def test_a_single_rank(self):
        world = lockstep.World.single()
        self.assertEqual((world.rank, world.size, world.all_reduce(torch.ones(2)).tolist()), (0, 1, [1, 1]))

    def test_under_a_launcher_before_and_after_a_process_group(self):
        for backend in ("gloo", "lockstep"):
            ended = started(shutil.which("lockstep"), "run", "--nproc-per-node", "3", "--", sys.executable, PROGRAM, backend)
            self.assertEqual(ended.returncode, 0, ended.stdout)
            self.assertEqual(ended.stdout.count("is done"), 3, ended.stdout)

    def test_the_example(self):
        example = os.path.join(ROOT, "examples/process_groups.py")
        ended = started(shutil.which("lockstep"), "run", "--nproc-per-node", "4", "--", sys.executable, example)
        self.assertEqual(ended.returncode, 0, ended.stdout)
        self.assertRegex(ended.stdout, r"4 processes: loss 0\.8\d+ -> 0\.1\d+")


if __name__ == "__main__":
    if "LOCKSTEP_PAGE" in os.environ:
        launched()
    else:
        unittest.main()
