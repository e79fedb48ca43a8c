# SPDX-License-Identifier: Apache-2.0
"""Programs of several kinds in the manner of public ones, in programs/: each computes over lockstep, with at most three lines
changed, what it computes with PyTorch's DistributedDataParallel over Gloo, on 1, 2 and 4 ranks.

LOCKSTEP_ALL_PROGRAMS=1: all of them, and those that are refused; without it, five.
LOCKSTEP_SPOILED_PROGRAMS=1: with a gradient of rank 0 that is 1.01 of what it should be, each comparison has to fail.
"""

import os
import unittest

from programs import runner

CORE = "gan", "language_model", "recommender", "resume", "weight_clipping"
OVER_THE_BACKEND = "fsdp2", "fsdp2_bfloat16", "pipelining", "sharded_checkpoint", "tensor_parallel", "zero_redundancy"
SIZES = 1, 2, 4
ALL = os.environ.get("LOCKSTEP_ALL_PROGRAMS") == "1"
SPOILED = os.environ.get("LOCKSTEP_SPOILED_PROGRAMS") == "1"

# Each is a program, what it has in place of a line of its second version, and the error on one of two ranks. No rank goes on.
REFUSED = {
    "clipping_of_torchs": (
        "language_model",
        ("lockstep.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_("),
        "was changed between backward() and step()",
    ),
    "gradients_changed_by_hand": (
        "gradient_noise",
        ("with model.mean_gradients(): add_noise(", "add_noise("),
        "was changed between backward() and step()",
    ),
    "a_scaler_of_torchs_that_unscales": (
        "mixed_precision",
        ("lockstep.GradScaler(", "torch.amp.GradScaler("),
        "torch.amp.GradScaler.unscale_() where .grad is this rank's own gradient",
    ),
    "weights_clipped_by_hand": ("weight_clipping", ("model.write_parameters(lambda: clip(critic))", "clip(critic)"), "was written between two steps"),
    "weights_moved_by_hand": (
        "sam",
        ("DistributedDataParallel(net, share_parameters=False)", "DistributedDataParallel(net)"),
        "was written between two steps",
    ),
    "weights_swapped_by_hand": (
        "swapped_average",
        ("model.write_parameters(lambda: validate(", "(lambda each: each)(validate("),
        "was written between two steps",
    ),
    "join_without_an_optimizer_of_lockstep": ("uneven_join", ("lockstep.SGD", "torch.optim.SGD"), "join() without an optimizer"),
    "a_graph_older_than_the_first_forward": (
        "spectral_norm",
        (
            "scores = model(x)\n        last = net[4].weight\n        penalty = (last @ last.T - torch.eye(2)).square().sum()\n",
            "last = net[4].weight\n        penalty = (last @ last.T - torch.eye(2)).square().sum()\n        scores = model(x)\n",
        ),
        "modified by an inplace operation",
    ),
}

# A program, the number of ranks on which lockstep computes something else, and why.
DIFFERENT = {("powersgd", 1): "a rank alone exchanges nothing, so its hook is not called; PyTorch calls it"}


class PublicPrograms(unittest.TestCase):
    def compare(self, name):
        for size in SIZES:
            with self.subTest(ranks=size):
                if (name, size) in DIFFERENT:
                    self.assertRaisesRegex(AssertionError, "differs between Gloo and lockstep", runner.compare, name, size)
                else:
                    runner.compare(name, size)
        if name in OVER_THE_BACKEND:
            with self.subTest(ranks=4, machines=2):
                runner.compare(name, 4, machines=2)

    def compare_spoiled(self, name):
        with self.assertRaisesRegex(AssertionError, "differs between Gloo and lockstep") as caught:
            runner.compare(name, 2, spoiled=True)
        print(caught.exception)

    def refuse(self, name, altered, text):
        with self.assertRaises(runner.Failed) as caught:
            runner.run(name, 2, altered=altered)
        self.assertEqual(caught.exception.backend, "lockstep")
        self.assertIn(text, str(caught.exception))
        self.assertEqual(len(caught.exception.texts), 3, caught.exception)  # both ranks have raised


def _add_tests():
    for name in runner.names() if ALL else CORE:
        method = PublicPrograms.compare_spoiled if SPOILED else PublicPrograms.compare
        setattr(PublicPrograms, f"test_{name}", lambda self, name=name, method=method: method(self, name))
    for name, arguments in REFUSED.items() if ALL and not SPOILED else ():
        setattr(PublicPrograms, f"test_refused_{name}", lambda self, arguments=arguments: self.refuse(*arguments))


_add_tests()

if __name__ == "__main__":
    unittest.main()
