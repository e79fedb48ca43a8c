# SPDX-License-Identifier: Apache-2.0
"""torch.compile before and after wrapping. Inductor's gradients may be views of larger buffers."""

import os
import shutil
import subprocess
import sys
import unittest

import torch
import torch.distributed as dist

import lockstep
from ranks import RanksTestCase
from test_step import expect_equal, expect_same_on_all_ranks, global_batch, parts_of, train

BACKEND = "inductor" if shutil.which("g++") else "aot_eager"  # Inductor needs a compiler


def make_model():
    """Gradients of 16 KiB and more lie in shared memory, smaller ones are copied there."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 96), torch.nn.GELU(), torch.nn.Linear(96, 96), torch.nn.Tanh(), torch.nn.Linear(96, 2)]
    return torch.nn.Sequential(*layers)


def compiled(group, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{dist.get_rank(group)}"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    batches = [global_batch(step, dtype=torch.float32) for step in range(3)]
    alone = make_model()
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), batches)
    for before in (True, False):
        net = make_model()
        optimizer = lockstep.AdamW(net.parameters(), lr=0.01)
        if before:
            model = lockstep.DistributedDataParallel(torch.compile(net, backend=BACKEND), optimizer, process_group=group)
        else:
            model = torch.compile(lockstep.DistributedDataParallel(net, process_group=group), backend=BACKEND)  # finds it
        train(model, optimizer, [parts_of(batch, group) for batch in batches])
        assert model.statistics["exchanges"] == 3 and model.samples_of_last_batch == 2
        expect_equal(net, alone, 1e-4)
        expect_same_on_all_ranks(net, group)


class Compiled(RanksTestCase):
    def test_before_and_after_wrapping(self):
        self.on_ranks(2, compiled, self.folder.name)


# Importing it takes as long as importing torch.
WITHOUT_COMPILER = """
import sys, torch, lockstep
net = torch.nn.Sequential(torch.nn.Linear(4, 4), lockstep.SyncBatchNorm(4))
optimizer = lockstep.AdamW(net.parameters())
model = lockstep.DistributedDataParallel(net, optimizer)
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
"""


class NotCompiled(unittest.TestCase):
    def test_a_step_does_not_import_the_compiler(self):
        subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True)


if __name__ == "__main__":
    unittest.main()
