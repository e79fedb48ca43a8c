#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rank of two is killed while LeNet trains: seconds until the job has finished its next step, steps that are
repeated, and goodput, with lockstep, torchrun (from a checkpoint of every 50 steps) and torchft, in turn. Where python3 has
the package lockstep (a wheel in a virtual environment), a loop of one's own in Python too, with a spare process and without.

    bench/recovery.py [ROUNDS]
"""
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import LOCKSTEP, ROOT, descendants, machine, median, python_with, require_peers, rounds, save, spread, take_turns

EVERY = 50  # steps from one of torchrun's checkpoints to the next
SECONDS = 8  # of training before the kill, and after the job has gone on
ENOUGH = 10_000_000  # steps: the job is ended by hand
PATIENCE = 120  # seconds: a job that has not gone on by then has failed


def environment(pid):
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    except OSError:
        return {}


class Job:
    """A training job that is being measured. `lines` is what it writes after each step."""

    def __init__(self, folder):
        self.folder, self.processes = Path(folder), []
        self.lines = self.folder / "progress"

    def start(self, *command, **options):
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, start_new_session=True,
                                   stderr=open(self.folder / "errors", "a"), **options)
        self.processes.append(process)
        return process

    def steps(self):
        """The steps that are finished so far, in order, as they were finished."""
        return [int(line) for line in self.lines.read_text().split("\n")[:-1]] if self.lines.exists() else []

    def look_after(self):
        pass

    def end(self):
        for process in self.processes:  # their workers may have sessions of their own
            for pid in [process.pid, *descendants(process.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()


class Lockstep(Job):
    def __init__(self, folder):
        super().__init__(folder)
        self.lines = self.folder / "metrics.jsonl"
        self.job = self.start(LOCKSTEP, "train", "--model", "lenet", "--data", "fashion-mnist", "--ranks", 2,
                              "--threads", 1, "--batch-size", 256, "--lr", 0.1, "--momentum", 0.9, "--nesterov", "--epochs", 10000,
                              "--max-restarts", 1000, "--metrics", self.lines, "--quiet")

    def steps(self):
        text = self.lines.read_text() if self.lines.exists() else ""
        return [int(found) for found in re.findall(r'"event":"step".*?"step":(\d+)', text)]

    def victim(self, rank=1):
        for pid in descendants(self.job.pid):
            if f"[rank {rank} of" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid


class LockstepPython(Job):
    def __init__(self, folder, before=()):
        super().__init__(folder)
        self.job = self.start(LOCKSTEP, "run", "--nproc-per-node", 2, "--max-restarts", 1000, "--", *before,
                              sys.executable, ROOT / "bench/surviving_training.py", ENOUGH, self.lines,
                              env=python_with("pytorch", OMP_NUM_THREADS="1"))

    def victim(self):
        return next(pid for pid in descendants(self.job.pid) if environment(pid).get("RANK") == "1")


class Torchrun(Job):
    def __init__(self, folder):
        super().__init__(folder)
        self.job = self.start(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2,
                              "--max-restarts", 1000, ROOT / "bench/peers/elastic_training.py", ENOUGH, self.lines,
                              self.folder / "checkpoint", EVERY,
                              env=python_with("pytorch", OMP_NUM_THREADS="1"))

    def victim(self):
        return next(pid for pid in descendants(self.job.pid) if environment(pid).get("RANK") == "1")


class Torchft(Job):
    def __init__(self, folder):
        super().__init__(folder)
        self.environment = python_with("pytorch", OMP_NUM_THREADS="1")
        self.environment["PYTHONPATH"] += f":{ROOT / '.deps/torchft'}"
        self.port = random.randrange(20000, 30000)
        self.environment["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{self.port}"
        self.start(ROOT / ".deps/torchft/bin/torchft_lighthouse", "--min_replicas", 1, "--join_timeout_ms", 1000,
                   "--bind", f"[::]:{self.port}", env=self.environment)
        self.groups = [self.group(0), self.group(1)]

    def group(self, number):
        return self.start(sys.executable, ROOT / "bench/peers/torchft_training.py", ENOUGH, self.lines, number,
                          env=self.environment)

    def victim(self):
        return self.groups[1].pid

    def look_after(self):
        for number, group in enumerate(self.groups):
            if group.poll() is not None:
                self.groups[number] = self.group(number)


def wait_for_steps(job, count, limit=240):
    end = time.perf_counter() + limit
    while len(job.steps()) < count:
        job.look_after()
        if time.perf_counter() > end:
            raise RuntimeError(f"{type(job).__name__} does not train: {(job.folder / 'errors').read_text()[-3000:]}")
        time.sleep(0.005)
    return time.perf_counter()


def train_for(job, seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        job.look_after()
        time.sleep(0.01)


def next_step_after(job, killed):
    """When the job went on: the end of the longest pause between the kill and the next four steps. The step under way may
    still be finished without the lost rank, so the first line after the kill need not be the answer. None: it did not."""
    seen, times = len(job.steps()), []
    while len(times) < 4:
        now = time.perf_counter()
        count = len(job.steps())
        times += [now] * (count - seen - len(times))
        job.look_after()
        if now - killed > PATIENCE:
            return None
        time.sleep(0.002)
    moments = [killed] + times
    pauses = [after - before for before, after in zip(moments, moments[1:])]
    return moments[pauses.index(max(pauses)) + 1]


def measure(kind):
    with tempfile.TemporaryDirectory() as folder:
        job = kind(folder)
        try:
            wait_for_steps(job, 20)
            began, first = time.perf_counter(), len(job.steps())
            train_for(job, SECONDS)
            rate = (len(job.steps()) - first) / (time.perf_counter() - began)
            before = job.steps()
            os.kill(job.victim(), signal.SIGKILL)
            killed = time.perf_counter()
            recovered = next_step_after(job, killed)
            if recovered is None:
                return {"failed": (job.folder / "errors").read_text()[-3000:], "rate": rate}
            train_for(job, max(0, killed + 20 - time.perf_counter()))
            after, now = job.steps()[len(before):], time.perf_counter()
            repeated = len(before) + len(after) - len(set(before + after))
            return {"seconds": recovered - killed, "repeated": repeated, "rate": rate,
                    "goodput": (len(set(after) - set(before))) / ((now - killed) * rate)}
        finally:
            job.end()


def compare():
    count = rounds(5)
    require_peers("recovery", "pytorch", "torchft")
    print(f"a rank of 2 is killed; LeNet, batches of 256; {count} rounds in turn\n{machine()}\n")
    kinds = {"lockstep": Lockstep, "torchrun": Torchrun, "torchft": Torchft}
    if importlib.util.find_spec("lockstep"):
        kinds |= {"lockstep, Python": LockstepPython,
                  "lockstep, Python, no spare": lambda folder: LockstepPython(folder, before=("env",))}
    found = take_turns(count, {name: lambda kind=kind: measure(kind) for name, kind in kinds.items()})
    base = median([one["seconds"] for one in found["lockstep"]])
    for name, runs in found.items():
        well = [one for one in runs if "failed" not in one]
        seconds = [one["seconds"] for one in well]
        if well:
            print(f"{name:26} {median(seconds):7.2f} s ({spread(seconds)}) {median(seconds) / base:6.1f} x   "
                  f"{median([one['repeated'] for one in well]):4.0f} steps repeated   goodput of the 20 s after it "
                  f"{100 * median([one['goodput'] for one in well]):5.1f} %   "
                  f"{median([one['rate'] for one in well]):6.1f} steps/s")
        if len(well) < len(runs):
            print(f"{name:26} did not go on within {PATIENCE} s in {len(runs) - len(well)} of {len(runs)} rounds")
    save("recovery", {"rounds": count, "runs": found})


if __name__ == "__main__":
    compare()
