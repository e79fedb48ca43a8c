# SPDX-License-Identifier: Apache-2.0
"""A rank that stands still in its forward: lockstep run names it, and shows where it is."""

import os
import shutil
import subprocess
import sys
import unittest

import torch
from torch import nn

import lockstep

PROGRAM = os.path.abspath(__file__)
LATE = 240  # seconds


class StandsStill(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        while self.calls == 6 and os.environ["RANK"] == "1":
            pass
        return self.layer(x)


def train():
    torch.set_num_threads(1)
    net = StandsStill()
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer)
    for _ in range(10):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Hang(unittest.TestCase):
    def test_names_the_rank_that_stands_still(self):
        lockstep_run = [shutil.which("lockstep"), "run", "--nproc-per-node", "2", "--hang-timeout", "3", "--"]
        ended = subprocess.run([*lockstep_run, sys.executable, PROGRAM], capture_output=True, text=True, timeout=LATE)
        self.assertEqual(ended.returncode, 128 + 9, ended.stderr)
        self.assertIn("rank 1 holds up the others", ended.stderr)
        self.assertIn(": forward of step 5\n", ended.stderr)
        self.assertIn(", waits for rank 1\n", ended.stderr)
        self.assertIn("_PyEval_EvalFrameDefault", ended.stderr)


if __name__ == "__main__":
    if "LOCKSTEP_PAGE" in os.environ:
        train()
    else:
        unittest.main()
