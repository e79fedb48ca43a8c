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

    def test_a_save_below_a_checkpoint_that_was_not_read_is_an_error_at_the_call(self):
        with tempfile.TemporaryDirectory() as folder:
            tensors = {"weight": torch.zeros(3)}
            first = lockstep.Checkpoints(folder)
            first.save(1000, tensors)
            first.finish(1000)
            del first
            again = lockstep.Checkpoints(folder)
            with self.assertRaisesRegex(lockstep.CheckpointError, "step 1: .*step 1000"):
                again.save(1, tensors)
            self.assertEqual(again.newest(), Path(folder) / "step-00001000.safetensors")
            again.save(1001, tensors)
            again.finish(1001)

    def test_going_back_on_purpose_moves_later_ones_aside(self):
        with tempfile.TemporaryDirectory() as folder:
            tensors = {"weight": torch.zeros(3)}
            first = lockstep.Checkpoints(folder)
            for step in (500, 1000):
                first.save(step, tensors)
            first.finish(1000)
            del first
            back = lockstep.Checkpoints(folder, after=500)
            self.assertEqual(back.newest(), Path(folder) / "step-00000500.safetensors")
            back.save(501, tensors)
            back.finish(501)
            self.assertTrue((Path(folder) / "step-00001000.safetensors.after-500").exists())

    def test_every_dtype_of_the_format_is_saved_and_reserved_names_are_refused_at_the_call(self):
        with tempfile.TemporaryDirectory() as folder:
            dtypes = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64"}
            checkpoints = lockstep.Checkpoints(folder)
            checkpoints.save(1, {name: torch.ones(3).to(getattr(torch, name)) for name in dtypes})
            checkpoints.finish(1)
            for torchs, formats in dtypes.items():
                self.assertIn(f'"{torchs}":{{"dtype":"{formats}"'.encode(), checkpoints.newest().read_bytes())
            for tensors, metadata, name in (({"__metadata__": torch.zeros(3)}, {}, "__metadata__"), ({}, {"lockstep.xxh3": "mine"}, "lockstep.xxh3")):
                with self.assertRaisesRegex(lockstep.UsageError, name):
                    checkpoints.save(2, tensors, metadata)


if __name__ == "__main__":
    unittest.main()
