#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a step loses to `lockstep top`: steps of `lockstep train` while nobody looks, while `lockstep top --json` runs, and
while `lockstep top` does in a terminal, in turn within one job; both watchers are stopped (SIGSTOP) when it is not their
turn. And what publishing itself takes, which cannot be switched off.

    bench/watched.py [ROUNDS [SECONDS]]    of each turn; 4 jobs of 3 turns: 5 rounds of 4 s take about 5 minutes

A look once a second, a search for new jobs once in a turn (usually every 5 s): so turns of under 5 s show a little too much.
"""
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from common import BIN, LOCKSTEP, machine, median, rounds, save

JOBS = [("lenet", 1), ("lenet", 2), ("mlp", 1), ("mlp", 2)]
NOBODY = "nobody"
PATIENCE = 60  # seconds for the first step


def publishing(bytes_between, count):
    """Seconds of a step, the median of so many runs; so many bytes of other memory are used before each, as a step does."""
    steps = 2_000_000 if bytes_between == 0 else 3_000
    command = [BIN / "rank_probe", "publish", str(steps), str(bytes_between)]
    return median([float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout) * 1e-9 for _ in range(count)])


def core_seconds(pid):
    """Of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9 + sum(map(core_seconds, children))


class Watcher:
    """Processes that look at all jobs while they may run."""

    def __init__(self, *options, **streams):
        self.process = subprocess.Popen([LOCKSTEP, "top", *options], start_new_session=True, **streams)
        self.cores = []  # seconds of a core in each second

    def watch(self, seconds):
        before = core_seconds(self.process.pid)
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(seconds)
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.cores.append((core_seconds(self.process.pid) - before) / seconds)

    def end(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def in_json():
    watcher = Watcher("--json", stdout=subprocess.DEVNULL)
    try:
        yield watcher
    finally:
        watcher.end()


@contextlib.contextmanager
def in_terminal():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))

    def drain():
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
    threading.Thread(target=drain, daemon=True).start()
    watcher = Watcher(stdin=theirs, stdout=theirs)
    os.close(theirs)
    try:
        yield watcher
    finally:
        watcher.end()


@contextlib.contextmanager
def training(model, ranks, metrics):
    job = subprocess.Popen([LOCKSTEP, "train", "--model", model, "--data", "synthetic:51200x1x28x28", "--batch-size", str(16 * ranks),
                            "--ranks", str(ranks), "--threads", "1", "--epochs", "1000000", "--quiet", "--metrics", metrics])
    try:
        deadline = time.monotonic() + PATIENCE
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 100:
            if job.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"bench: {model} on {ranks} ranks does not train")
            time.sleep(0.1)
        yield job
    finally:
        job.terminate()
        job.wait()


def seconds_of_steps(metrics, begin, end):
    """Of those that are whole between these bytes of the file."""
    with open(metrics, "rb") as file:
        file.seek(begin)
        lines = file.read(end - begin).split(b"\n")[1:-1]
    return [event["seconds"] for event in map(json.loads, lines) if event["event"] == "step"]


def take_turns_at(model, ranks, count, seconds):
    with tempfile.TemporaryDirectory() as folder, in_json() as as_json, in_terminal() as as_view:
        metrics = Path(folder) / "metrics.jsonl"
        with training(model, ranks, metrics):
            watchers = {NOBODY: None, "--json": as_json, "terminal": as_view}
            time.sleep(2.5)  # both have found the job
            for watcher in (as_json, as_view):
                watcher.process.send_signal(signal.SIGSTOP)
            turns = {name: [] for name in watchers}
            for turn in range(count):
                names = list(watchers)[turn % 3:] + list(watchers)[:turn % 3]
                for name in names:
                    begin = metrics.stat().st_size
                    if watchers[name]:
                        watchers[name].watch(seconds)
                    else:
                        time.sleep(seconds)
                    turns[name].append((begin, metrics.stat().st_size))
        times = {name: [seconds_of_steps(metrics, *turn) for turn in found] for name, found in turns.items()}
        return {"model": model, "ranks": ranks,
                "steps_per_second": {name: [len(steps) / sum(steps) for steps in found] for name, found in times.items()},
                "core_seconds_per_second": {name: watchers[name].cores for name in times if watchers[name]}}


def main():
    count, seconds = rounds(5), float(sys.argv[2]) if len(sys.argv) > 2 else 4
    print(f"{count} rounds of 3 turns of {seconds:g} s\n{machine()}\n")
    warm, cold = publishing(0, count), publishing(8 << 20, count)
    print(f"publishing: {warm * 1e6:.2f} us a step in a loop, {cold * 1e6:.2f} us after 8 MiB of other memory\n")
    jobs = []
    for model, ranks in JOBS:
        job = take_turns_at(model, ranks, count, seconds)
        rates = job["steps_per_second"]
        alone = median(rates[NOBODY])
        print(f"{model}, {ranks} ranks: {alone:.0f} steps/s; publishing is {100 * cold * alone:.3f} % of a step")
        for name in rates:
            if name == NOBODY:
                continue
            ratios = sorted(watched / unwatched for watched, unwatched in zip(rates[name], rates[NOBODY]))
            print(f"  {name:10} {median(rates[name]):7.0f} steps/s   ratio {median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})   "
                  f"{1e3 * median(job['core_seconds_per_second'][name]):.2f} ms of a core in a second")
        jobs.append(job)
    save("watched", {"rounds": count, "seconds": seconds, "publishing_seconds": {"in a loop": warm, "after 8 MiB": cold}, "jobs": jobs})


if __name__ == "__main__":
    main()
