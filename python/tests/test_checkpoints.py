# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a loop of one's own, written while it goes on."""

import tempfile
import unittest
from pathlib import Path

import torch

import lockstep


class OwnCheckpoints(unittest.TestCase):
    def test_the_newest_two_are_kept_and_are_as_saved(self):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = lockstep.Checkpoints(folder)
            self.assertIsNone(checkpoints.newest())
            for step in (1, 2, 3):
                tensors = {"weight": torch.full((3, 2), float(step)).t(), "count": torch.tensor(step)}
                checkpoints.save(step, tensors, {"step": str(step)})
                tensors["weight"].zero_()  # a copy is saved
            checkpoints.finish(3)
            newest = checkpoints.newest()
            self.assertEqual(newest, Path(folder) / "step-00000003.safetensors")
            self.assertIn(b'"step":"3"', newest.read_bytes())
            self.assertEqual(len(list(Path(folder).glob("step-*"))), 2)
            with self.assertRaisesRegex(lockstep.CheckpointError, "step 7 is not saved"):
                checkpoints.finish(7)
            with self.assertRaisesRegex(lockstep.CheckpointError, "is in use by process"):
                lockstep.Checkpoints(folder)


if __name__ == "__main__":
    unittest.main()
