# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed: those that pass over Gloo pass over lockstep's backend (2 min)."""

import subprocess
import sys
import unittest
from pathlib import Path


class PytorchsOwnTests(unittest.TestCase):
    def test_those_that_pass_over_gloo_pass_over_lockstep(self):
        result = subprocess.run([sys.executable, Path(__file__).parent / "torch_tests.py", "both"], capture_output=True, text=True,
                                timeout=800)
        print(result.stdout)
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])


if __name__ == "__main__":
    unittest.main()
