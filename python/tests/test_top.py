# SPDX-License-Identifier: Apache-2.0
"""`lockstep top` and `lockstep trace JOB` beside Python programs that have not been told of them."""

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import lockstep

PROGRAM = os.path.abspath(__file__)
COMMAND = shutil.which("lockstep")
LATE = 120  # seconds


def train():
    """Until it is ended."""
    torch.set_num_threads(1)
    net = nn.Linear(4, 2)
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer)
    while True:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_as_rank(rank, store):
    dist.init_process_group("lockstep", init_method=f"file://{store}", rank=rank, world_size=2)
    train()


def jobs():
    done = subprocess.run([COMMAND, "top", "--once", "--json"], capture_output=True, text=True, check=True, timeout=LATE)
    return json.loads(done.stdout)["jobs"]


def job_with(condition):
    """The first job of which the condition holds, once there is one."""
    deadline = time.monotonic() + LATE
    while time.monotonic() < deadline:
        for job in jobs():
            if condition(job):
                return job
    raise AssertionError(f"no such job: {jobs()}")


@contextlib.contextmanager
def launched():
    job = subprocess.Popen([COMMAND, "run", "--nproc-per-node", "2", "--", sys.executable, PROGRAM], stdout=subprocess.DEVNULL)
    try:
        yield job
    finally:
        job.terminate()
        job.wait(LATE)


class Top(unittest.TestCase):
    def test_shows_a_program_that_lockstep_run_has_started_and_traces_it(self):
        with launched() as process, tempfile.TemporaryDirectory() as folder:
            job = job_with(lambda job: job["job"] == process.pid and all(rank["steps_per_second"] > 0 for rank in job["ranks"]))
            self.assertEqual((job["name"], job["world_size"]), ("test_top.py", 2))
            for rank in job["ranks"]:  # 6 a step
                self.assertGreater(rank["samples_per_second"], 4 * rank["steps_per_second"])
            file = Path(folder, "running.json")
            subprocess.run([COMMAND, "trace", str(process.pid), "--output", file, "--seconds", "0.5"], check=True, timeout=LATE)
            trace = json.loads(file.read_text())
            self.assertTrue(trace["otherData"]["complete"])
            for rank in range(2):
                names = [event["name"] for event in trace["traceEvents"] if event["pid"] == rank and event["ph"] == "X"]
                self.assertGreater(names.count("optimizer step"), 1)
                self.assertGreater(names.count("backward"), 1)

    def test_takes_ranks_that_met_without_a_launcher_for_one_job(self):
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            ranks = [context.Process(target=train_as_rank, args=(rank, f"{folder}/store"), daemon=True) for rank in range(2)]
            for rank in ranks:
                rank.start()
            pids = [rank.pid for rank in ranks]
            try:
                job = job_with(lambda job: [rank["pid"] for rank in job["ranks"]] == pids and job["ranks"][1]["steps_per_second"] > 0)
                self.assertEqual((job["job"], job["world_size"]), (min(pids), 2))
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.join(LATE)


if __name__ == "__main__":
    if "LOCKSTEP_PAGE" in os.environ:
        train()
    else:
        unittest.main()
