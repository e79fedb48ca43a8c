# SPDX-License-Identifier: Apache-2.0
"""lockstep.KVStore: local kinds in this process, dist_ kinds among ranks of which the first is the server."""

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
LOCAL = ("local", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device")
STEPS, BATCH, INPUTS, RATE = 30, 12, 5, 0.1


def gradient_of(weights, first=0, end=BATCH):
    """Of the mean loss of some samples of a batch, for a linear model with two weights."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, INPUTS, dtype=torch.float64, generator=generator)[first:end]
    matrix, bias = (weight.detach().clone().requires_grad_() for weight in weights)
    targets = inputs @ torch.arange(1.0, INPUTS + 1, dtype=torch.float64) - 2
    ((inputs @ matrix.flatten() + bias - targets) ** 2).mean().backward()
    return [matrix.grad, bias.grad]


def first_weights():
    return [torch.zeros(1, INPUTS, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]


def on_one_device(optimizer, **options):
    weights = [weight.requires_grad_() for weight in first_weights()]
    made = optimizer(weights, **options)
    for _ in range(STEPS):
        for weight, gradient in zip(weights, gradient_of(weights)):
            weight.grad = gradient
        made.step()
    return [weight.detach() for weight in weights]


def loss_of(weights):
    return sum(gradient.abs().sum().item() for gradient in gradient_of(weights))


# ---- What the ranks do


def trains_as_one_device(optimizer, options):
    """Workers with different numbers of samples; some calls take all keys, others one."""
    store = lockstep.KVStore.create("dist_sync")
    if store is None:
        return
    with store:
        workers, rank = store.num_workers, store.rank
        assert (workers, rank) == (dist.get_world_size() - 1, dist.get_rank() - 1), (workers, rank)
        store.init(["matrix", 1], first_weights())
        store.set_optimizer(getattr(lockstep, optimizer), **options)
        first, end = (BATCH * each**2 // workers**2 for each in (rank, rank + 1))
        weights = store.pull(["matrix", 1], out=first_weights())
        for step in range(STEPS):
            gradients = gradient_of(weights, first, end)
            if step % 2:
                for key, gradient in zip(("matrix", 1), gradients):
                    store.push(key, gradient, samples=end - first)
                store.pull(["matrix", 1], out=weights)
            else:
                store.pushpull(["matrix", 1], gradients, out=weights, samples=end - first)
        expect(weights, on_one_device(getattr(torch.optim, optimizer), **options), 1e-9)
        assert store.delays() == (0, 0), store.delays()


def replaces_and_pulls(servers):
    """Without an optimizer the mean of what workers push replaces the value; a buffer's always."""
    store = lockstep.KVStore.create("dist_sync", servers=servers)
    if store is None:
        assert dist.get_rank() < servers
        return
    rank, workers = store.rank, store.num_workers
    table = torch.arange(12.0).view(4, 3).t()  # not contiguous
    store.init("table", table + rank)
    store.init([3, "counter"], [torch.zeros(2), torch.zeros(1)], buffer=True)
    store.barrier()
    expect(store.pull("table", out=torch.ones(3, 4)), table)
    expect(store.row_sparse_pull("table", row_ids=[2, 0, 2]), table[[2, 0, 2]])
    store.push("table", [table * rank, table.contiguous()])
    out = torch.zeros(4, 3).t()
    assert store.pull("table", out=out) is out
    expect(out, table * ((workers - 1) / 2 + 1))
    store.set_optimizer(lockstep.SGD, lr=1.0)
    store.push(3, torch.full((2,), 4.0))
    outs = [torch.zeros(2), torch.zeros(2)]
    store.pull([3, "counter"], out=[outs, [torch.zeros(1), torch.zeros(1)]])
    expect(outs, [torch.full((2,), 4.0)] * 2)
    store.push("table", torch.ones(3, 4), lr=0.5)
    expect(store.pull("table", out=torch.ones(3, 4)), table * ((workers - 1) / 2 + 1) - 0.5)
    store.close()
    expect_error(lockstep.UsageError, "closed", lambda: store.pull("table", out=table))


def learns_asynchronously(kind, most):
    store = lockstep.KVStore.create(kind, staleness=1)
    if store is None:
        return
    with store:
        rank = store.rank
        store.init([0, 1], first_weights())
        store.set_optimizer(lockstep.SGD, lr=0.02, momentum=0.9)
        weights = store.pull([0, 1], out=first_weights())
        if most is None:  # worker 0 reads, the others update, then its gradient is applied
            store.barrier()
            for _ in range(0 if rank == 0 else 3):
                store.push([0, 1], gradient_of(weights))
            store.barrier()
            store.push([0, 1], gradient_of(weights)) if rank == 0 else None
            store.barrier()
            assert store.delays() == (1.5, 3), store.delays()  # 0, 1, 2 and 3
            store.barrier()
        for _ in range(100):
            store.pull([0, 1], out=weights)
            store.push([0, 1], gradient_of(weights))
        store.barrier()
        store.pull([0, 1], out=weights)
        assert loss_of(weights) < loss_of(first_weights()) / 20, loss_of(weights)
        assert most is None or store.delays()[1] <= most, store.delays()


def updates_by_rule(adapt_to_delay, expected):
    """Worker 0 pushes twice, then worker 1 once; all gradients are 1."""
    store = lockstep.KVStore.create("dist_async", adapt_to_delay=adapt_to_delay)
    if store is None:
        return
    with store:
        store.init("a", torch.zeros(2))
        store.set_optimizer(lockstep.SGD, lr=1.0, momentum=0.5)
        store.pull("a", out=torch.zeros(2))
        for step, worker in enumerate((0, 0, 1)):
            if store.rank == worker:
                store.push("a", torch.ones(2))
            store.barrier()
            expect(store.pull("a", out=torch.zeros(2)), torch.full((2,), float(expected[step])))
            store.barrier()


def wrong_calls():
    expect_error(lockstep.UsageError, "dist_fast: there is no such value", lambda: lockstep.KVStore.create("dist_fast"))
    expect_error(lockstep.UsageError, "rank 0 has to be a server", lambda: lockstep.KVStore.create("dist_sync", servers=0))
    store = lockstep.KVStore.create("dist_sync")
    if store is None:
        return
    store.init("a", torch.zeros(2, 3))
    refused(store)
    expect_error(lockstep.UsageError, "a second KVStore of these ranks", lambda: lockstep.KVStore.create("dist_sync"))
    store.push("a", torch.full((2, 3), float(store.rank)))  # nothing of all that was sent
    expect(store.pull("a", out=torch.ones(2, 3)), torch.full((2, 3), 0.5))


def refused(store):
    for text, call in (
        ("the store has no key b", lambda: store.push("b", torch.zeros(2, 3))),
        ("the store has no key b", lambda: store.pull("b", out=torch.zeros(2, 3))),
        ("the store has no key 7", lambda: store.row_sparse_pull(7, row_ids=[0])),
        ("a tensor of shape [3, 2] Float for the key a, whose value has shape [2, 3]", lambda: store.push("a", torch.zeros(3, 2))),
        ("[2, 3] Double for the key a", lambda: store.pushpull("a", torch.zeros(2, 3, dtype=torch.float64))),
        ("a tensor of shape [] Float", lambda: store.pull("a", out=torch.zeros(()))),
        ("rows of a that it does not have", lambda: store.row_sparse_pull("a", row_ids=[2])),
        ("1 keys, and [1, 1] tensors", lambda: store.push(["a"], [torch.zeros(2, 3)] * 2)),
        ("1 keys, and [0] tensors", lambda: store.push("a", [])),
        ("init() of the key a, again or after", lambda: store.init("a", torch.zeros(2, 3))),
        ("init() of the key c, again or after", lambda: store.init("c", torch.zeros(2, 3))),
        ("set_optimizer(SGD)", lambda: store.set_optimizer(torch.optim.SGD, lr=0.1)),
    ):
        error = expect_error(lockstep.UsageError, text, call)
        assert error.next, error


def other_keys():
    expect_error(lockstep.Error, "other keys than the workers before it", uses_other_keys)


def uses_other_keys():
    store = lockstep.KVStore.create("dist_sync")
    store.init("a", torch.zeros(2 + store.rank))
    store.pull("a", out=torch.zeros(2 + store.rank))


def raises_in_a_block():
    """Worker 1 fails: the server and worker 0 hear of it at once, not after the timeout."""
    began = time.monotonic()
    if dist.get_rank() == 2:
        try:
            with lockstep.KVStore.create("dist_sync") as store:
                store.init("a", torch.zeros(3))
                store.pushpull("a", torch.ones(3))
                raise KeyError
        except KeyError:
            return
    error = expect_error(lockstep.PeerLost, "worker 1 (rank 2) is lost", survives)
    assert time.monotonic() - began < 60, error


def survives():
    with lockstep.KVStore.create("dist_sync") as store:
        store.init("a", torch.zeros(3))
        for _ in range(2):
            store.pushpull("a", torch.ones(3))


def thread_goes_on(folder):
    """On the server while it serves, and on worker 0 while its pull waits for worker 1, which comes when both have written a file."""
    rank, waits = dist.get_rank(), threading.Event()
    files = [os.path.join(folder, str(each)) for each in range(2)]
    if rank < 2:
        threading.Thread(target=lambda: (waits.wait(), time.sleep(0.1), open(files[rank], "w").close())).start()
    if rank == 0:
        waits.set()
    store = lockstep.KVStore.create("dist_sync")
    if store is None:
        return
    with store:
        store.init("a", torch.zeros(3))
        until = time.monotonic() + 60
        while rank == 2 and not all(os.path.exists(file) for file in files):
            assert time.monotonic() < until, "a thread does not run"
            time.sleep(0.01)
        waits.set()
        store.pushpull("a", torch.ones(3))


def launched():
    """Two servers of `lockstep run`: nothing here says so."""
    torch.set_num_threads(1)
    store = lockstep.KVStore.create("dist_sync")
    rank = int(os.environ["RANK"])
    assert (store is None) == (rank < 2), rank
    if store is not None:
        store.init(["a", "b"], [torch.zeros(3), torch.zeros(3)])
        expect(store.pushpull(["a", "b"], [torch.full((3,), 1.0 + store.rank)] * 2), [torch.full((3,), 1.5)] * 2)
    print(f"rank {rank} is done", flush=True)


# ---- Tests


class LocalStore(unittest.TestCase):
    def test_kinds_that_update_train_as_one_device_does(self):
        for kind in LOCAL:
            for devices in (0, 2):
                with self.subTest(kind=kind, devices=devices):
                    store = lockstep.KVStore.create(kind, devices=devices)
                    self.assertEqual((store.type, store.rank, store.num_workers), (kind, 0, 1))
                    store.set_optimizer(lockstep.AdamW, lr=RATE, betas=(0.8, 0.99))
                    store.init([0, 1], first_weights())
                    weights = [[weight, weight.clone()] for weight in first_weights()]  # for each key, of two devices
                    for _ in range(STEPS):
                        halves = [gradient_of([key[i] for key in weights], 6 * i, 6 * i + 6) for i in range(2)]
                        store.push([0, 1], [[halves[0][key] / 2, halves[1][key] / 2] for key in range(2)])
                        store.pull([0, 1], out=weights)
                    expected = on_one_device(torch.optim.AdamW, lr=RATE, betas=(0.8, 0.99))
                    expect(weights, [[value, value] for value in expected], 1e-9)

    def test_without_an_optimizer_the_sum_over_devices_replaces(self):
        store = lockstep.KVStore.create()
        store.init(3, torch.zeros(2))
        parameter = torch.nn.Parameter(torch.zeros(2))
        store.push(3, [torch.ones(2), torch.ones(2)], priority=-3)
        self.assertIs(store.pull(3, out=parameter), parameter)
        expect(parameter.detach(), torch.full((2,), 2.0))
        expect(store.pushpull("3", torch.full((2,), 5.0)), torch.full((2,), 5.0))
        self.assertEqual(store.delays(), (0, 0))
        store.barrier()

    def test_wrong_calls_are_errors_that_say_so(self):
        for kind in LOCAL:
            store = lockstep.KVStore.create(kind)
            store.init("a", torch.zeros(2, 3))
            store.pull("a", out=torch.zeros(2, 3))
            refused(store)
        expect_error(lockstep.UsageError, "lokal: there is no such value", lambda: lockstep.KVStore.create("lokal"))
        expect_error(lockstep.UsageError, "--nproc-per-node 3", lambda: lockstep.KVStore.create("dist_sync"))
        with self.assertWarnsRegex(UserWarning, "amsgrad"):
            expect_error(lockstep.UsageError, "set_optimizer(AdamW)", lambda: store.set_optimizer(lockstep.AdamW, amsgrad=True))
        store.set_optimizer(lockstep.AdamW)
        expect_error(lockstep.UsageError, "set_optimizer(SGD) again", lambda: store.set_optimizer(lockstep.SGD, lr=1))


class DistStore(unittest.TestCase):
    def test_dist_sync_trains_as_one_device_does(self):
        for workers in (1, 2, 3):
            for optimizer, options in (("SGD", {"lr": RATE, "momentum": 0.9}), ("AdamW", {"lr": RATE})):
                with self.subTest(workers=workers, optimizer=optimizer):
                    run_ranks(1 + workers, trains_as_one_device, optimizer, options, backend="gloo")

    def test_replaces_and_pulls_over_one_and_two_servers(self):
        for servers in (1, 2):
            with self.subTest(servers=servers):
                run_ranks(servers + 2, replaces_and_pulls, servers)

    def test_asynchronous_kinds_learn_and_report_delays(self):
        run_ranks(3, learns_asynchronously, "dist_async", None, backend="gloo")
        run_ranks(3, learns_asynchronously, "dist_bounded", 1, backend="gloo")

    def test_the_plain_rule_and_that_for_delays(self):
        run_ranks(3, updates_by_rule, False, (-1, -2.5, -4.25), backend="gloo")  # one momentum: 1, 1.5, 1.75
        run_ranks(3, updates_by_rule, True, (-0.75, -1.625, -2.375), backend="gloo")  # half the rate; Nesterov, one per worker

    def test_wrong_calls_are_errors_and_send_nothing(self):
        run_ranks(3, wrong_calls, backend="gloo")

    def test_workers_with_other_keys_are_refused(self):
        run_ranks(3, other_keys, backend="gloo")

    def test_a_worker_that_raises_is_lost_at_once(self):
        run_ranks(3, raises_in_a_block, backend="gloo")

    def test_other_threads_go_on(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(3, thread_goes_on, folder, backend="gloo")

    def test_has_the_servers_of_lockstep_run(self):
        command = [shutil.which("lockstep"), "run", "--servers", "2", "--nproc-per-node", "4", "--", sys.executable, PROGRAM]
        ended = started(*command)
        self.assertEqual(ended.returncode, 0, ended.stdout)
        self.assertEqual(ended.stdout.count("is done"), 4, ended.stdout)

    def test_the_example(self):
        example = os.path.join(ROOT, "examples/parameter_server.py")
        ended = started(shutil.which("lockstep"), "run", "--servers", "1", "--nproc-per-node", "3", "--", sys.executable, example)
        self.assertEqual(ended.returncode, 0, ended.stdout)
        self.assertEqual(ended.stdout.count("differs from one device by"), 2 + 2 + 3, ended.stdout)


if __name__ == "__main__":
    if "LOCKSTEP_PAGE" in os.environ:
        launched()
    else:
        unittest.main()
