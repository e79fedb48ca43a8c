# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own with lockstep.Recovery under lockstep run --max-restarts, whose ranks are killed: they end with the bits of a
loop that nobody disturbed, and no sample is lost or seen twice."""

import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from support import expect_error

PROGRAM = os.path.abspath(__file__)
SAMPLES = 203
LATE = 240  # seconds


# ---- The program


def die_at(place, step):
    """Where KILL says so: GENERATION:RANK:STEP:PLACE, several with commas."""
    here = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}:{os.environ['RANK']}:{step}:{place}"
    if here in os.environ.get("KILL", "").split(","):
        if "SPARE" in os.environ:
            wait_for_spare()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_spare():
    while not [each for each in processes_named("lockstep-spare") if parent_of(each) == os.getppid()]:
        time.sleep(0.2)


def processes_named(name):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as comm:
                if comm.read().strip() == name:
                    yield int(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[1])


class Numbers(torch.utils.data.Dataset):
    """Sample i has target i, and noise of Python's and torch's generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return torch.sin(i * torch.arange(1.0, 9.0)) + 0.1 * torch.rand(8) + 0.1 * random.random(), torch.tensor(i)


def loader_of(kind, rank, size):
    if kind == "lockstep":
        ids = torch.arange(SAMPLES)
        data = torch.sin(ids.unsqueeze(1) * torch.arange(1.0, 9.0))
        return lockstep.DataLoader(lockstep.data.TensorDataset(data, ids), global_batch_size=16, shuffle=True, seed=3)
    if kind == "sampler":
        return torch.utils.data.DataLoader(Numbers(), batch_size=16 // size, sampler=lockstep.Sampler(Numbers(), drop_last=True))
    sampler = torch.utils.data.DistributedSampler(Numbers(), size, rank)
    return torch.utils.data.DataLoader(Numbers(), batch_size=8, sampler=sampler, num_workers=2 if kind == "workers" else 0)


def optimizer_of(kind, parameters):
    kinds = {"sgd": (lockstep.SGD, {"momentum": 0.9}), "scaled": (lockstep.SGD, {"momentum": 0.9}), "adamw": (lockstep.AdamW, {}), "torch": (torch.optim.AdamW, {})}
    make, options = kinds[kind]
    return make(parameters, lr=0.01, **options)


@lockstep.recover
def train(optimizer_kind, loader_kind, group):
    die_at("begin", 0)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1 + rank)
    random.seed(rank)
    if group == "group":
        dist.init_process_group("lockstep")
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    loader = loader_of(loader_kind, rank, size)
    optimizer = optimizer_of(optimizer_kind, net.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 12, 18], gamma=0.5)
    if group == "torch":
        dist.init_process_group("lockstep")
        model = nn.parallel.DistributedDataParallel(net)
    else:
        model = lockstep.DistributedDataParallel(net, optimizer if optimizer_kind != "torch" else None)
    counted = {"losses": 0.0, "drawn": []}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3, enabled=optimizer_kind == "scaled")
    others = {"scheduler": scheduler, "counted": counted} | ({} if "FORGETS_SCALER" in os.environ else {"scaler": scaler})
    recovery = lockstep.Recovery(model, optimizer, loader, **others, share_of_time=1)
    for epoch in recovery.epochs(2):
        if hasattr(loader, "sampler"):
            loader.sampler.set_epoch(epoch)
        for inputs, ids in recovery.batches():
            die_at("forward", recovery.steps)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            scaler.scale(loss).backward()
            die_at("update", recovery.steps)
            scaler.step(optimizer)
            scaler.update()
            die_at("after", recovery.steps)
            optimizer.zero_grad()
            scheduler.step()
            counted["losses"] += loss.item()
            counted["drawn"].append(random.random())
            note_ids(epoch, recovery.steps, ids)
        die_at("epoch", recovery.steps)
    if rank == 0:
        total = sum(float(tensor.double().abs().sum()) for tensor in net.state_dict().values())
        print(f"trained {recovery.steps} steps, {total.hex()}, {counted['losses'].hex()}, {sum(counted['drawn']).hex()}, {scaler.get_scale()}", flush=True)


def note_ids(epoch, step, ids):
    if "IDS" in os.environ:
        with open(os.path.join(os.environ["IDS"], str(os.getpid())), "a") as file:
            print(os.environ["TORCHELASTIC_RESTART_COUNT"], epoch, step, *ids.tolist(), file=file)


# ---- The tests


def run(optimizer="sgd", loader="lockstep", group="none", ranks=2, restarts=3, spare=False, options=(), **variables):
    """What the program prints, without what the launcher says."""
    lockstep_run = [shutil.which("lockstep"), "run", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    python = [sys.executable] if spare else ["env", sys.executable]
    command = [*lockstep_run, *options, "--", *python, PROGRAM, optimizer, loader, group]
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LATE)
    return ended


def result_of(ended):
    lines = [line.split("] ", 1)[-1] for line in ended.stdout.splitlines() if "trained" in line]
    assert ended.returncode == 0 and len(lines) == 1, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return lines[0]


class Recovers(unittest.TestCase):
    undisturbed: dict[tuple, str] = {}

    def expect_same(self, kill, optimizer="sgd", loader="lockstep", group="none", **others):
        key = (optimizer, loader, group)
        if key not in self.undisturbed:
            self.undisturbed[key] = result_of(run(*key, **others))
        self.assertEqual(result_of(run(*key, KILL=kill, **others)), self.undisturbed[key])

    def test_kills_in_every_phase_with_lockstep_s_loader(self):
        for kill in ("0:1:5:forward", "0:0:7:update,1:1:7:after", "0:0:13:epoch,1:1:20:forward,2:0:0:begin"):
            with self.subTest(kill):
                self.expect_same(kill)

    def test_a_process_group_and_lockstep_s_sampler(self):
        self.expect_same("0:0:7:update,1:1:15:after", "adamw", "sampler", "group")

    def test_torch_s_optimizer_ddp_and_loader_whose_batches_are_skipped(self):
        self.expect_same("0:1:8:update,1:0:20:after", "torch", "torch", "torch")

    def test_torch_s_loader_with_workers(self):
        self.expect_same("0:1:8:forward", loader="workers")

    def test_a_gradient_scaler(self):
        self.expect_same("0:1:8:update,1:0:17:after", "scaled")
        self.assertTrue(self.undisturbed["scaled", "lockstep", "none"].endswith(", 1024.0"))  # 4, doubled 8 times in 26 steps

    def test_a_spare_takes_the_place(self):
        self.expect_same("0:1:5:forward,1:0:9:forward", spare=True, SPARE="1")

    def expect_every_sample_once(self, **how):
        with tempfile.TemporaryDirectory() as folder:
            ended = run(ranks=3, IDS=folder, **how)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            made = collections.defaultdict(lambda: collections.defaultdict(list))  # (epoch, step) -> generation -> samples
            for name in os.listdir(folder):
                with open(os.path.join(folder, name)) as file:
                    for generation, epoch, step, *ids in (map(int, line.split()) for line in file):
                        made[epoch, step][generation] += ids
        for epoch in (0, 1):
            last = [generations[max(generations)] for (of, _), generations in made.items() if of == epoch]
            self.assertEqual(sorted(sum(last, [])), list(range(SAMPLES)))

    def test_sees_every_sample_once_in_each_epoch(self):
        self.expect_every_sample_once(KILL="0:1:4:forward,1:0:12:update,2:2:20:after")

    def test_with_fewer_ranks_the_rest_of_the_epoch_is_divided_again(self):
        self.expect_every_sample_once(restarts=0, options=("--min-ranks", "1"), KILL="0:1:4:forward,1:1:17:update")


class Refuses(unittest.TestCase):
    def test_a_gradient_scaler_that_would_be_lost(self):
        ended = run("scaled", restarts=1, FORGETS_SCALER="1")
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("GradScaler that Recovery was not given", ended.stderr)

    def test_an_object_without_state_dict(self):
        net = nn.Linear(2, 2)
        optimizer = lockstep.SGD(net.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(net, optimizer)
        expect_error(lockstep.UsageError, "has no state_dict()", lambda: lockstep.Recovery(model, optimizer, thing=object()))

    def test_no_tensor_for_its_dtype(self):
        state = [torch.ones(2, dtype=each) for each in (torch.float32, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu)]
        tensors = lockstep.recovery._split(state)
        self.assertEqual([each.dtype for each in tensors.values()], [torch.float32, torch.uint8])  # the others' bytes
        self.assertTrue(all(map(torch.equal, state, lockstep.recovery._join(tensors))))

    def test_nothing_under_another_launcher(self):
        net = nn.Linear(2, 2)
        optimizer = lockstep.SGD(net.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(net, optimizer)
        recovery = lockstep.Recovery(model, optimizer, [torch.ones(4, 2)] * 3)
        for _ in recovery.epochs(2):
            for batch in recovery.batches():
                model(batch).sum().backward()
                optimizer.step()
        self.assertEqual(recovery.steps, 6)


if __name__ == "__main__":
    if len(sys.argv) == 4 and "LOCKSTEP_KEEPER" in os.environ:
        train(*sys.argv[1:])
    else:
        unittest.main()
