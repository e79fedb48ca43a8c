#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A run that resumes needs at most one copy of the state per machine beyond what training itself needs.

    resume_memory_test.py LOCKSTEP

Two ranks train an MLP of 25 million parameters: without checkpoints, then with one, then resumed from it. Memory is what the
processes of a run have, pages that they share counted once (PSS), looked at again and again while it runs.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLACK = 48 << 20  # other buffers of a loader or an allocator


def memory_of(pid):
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    own = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return own + sum(memory_of(child) for child in children)


def peak_of(command):
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.005)
    if process.returncode != 0:
        sys.exit(f"exit code {process.returncode}: {command}")
    return peak


if __name__ == "__main__":
    train = [sys.argv[1], "train", "--model", "mlp-wide", "--ranks", "2", "--threads", "1", "--batch-size", "16", "--quiet"]
    train += ["--data", "synthetic:64x1x28x28"]
    with tempfile.TemporaryDirectory() as folder:
        plain = peak_of([*train, "--max-steps", "3"])
        saves = [*train, "--checkpoint-dir", folder]
        peak_of([*saves, "--max-steps", "2"])
        state = max(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        resumed = peak_of([*saves, "--resume", "--max-steps", "4"])
    print(f"training {plain >> 20} MiB, state {state >> 20} MiB, resumed {resumed >> 20} MiB")
    sys.exit(0 if resumed <= plain + state + SLACK else "resuming takes more than one copy of the state")
