# SPDX-License-Identifier: Apache-2.0
"""A timeline of a training loop in Python."""

import json
import tempfile
import unittest
from pathlib import Path

import lockstep
from support import expect_error, run_ranks
from test_step import global_batch, loss_of, make_model


def traced_loop(file):
    net = make_model()
    optimizer = lockstep.SGD(net.parameters(), lr=0.01)
    model = lockstep.DistributedDataParallel(net, optimizer)
    with lockstep.Timeline(file, steps=range(1, 4)) as timeline:
        for step in range(5):
            timeline.begin_step(step)
            loss_of(model, [tensor[model.rank * 3 : model.rank * 3 + 3] for tensor in global_batch(step)]).backward()
            optimizer.step()
            optimizer.zero_grad()


class Timeline(unittest.TestCase):
    def test_has_the_steps_and_modules_of_all_ranks(self):
        for machines in None, [0, 1]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "steps.json")
                run_ranks(2, traced_loop, str(file), backend="gloo", machines=machines)
                self.assertEqual(list(Path(folder).iterdir()), [file])
                trace = json.loads(file.read_text())
                self.assertTrue(trace["otherData"]["complete"])
                for rank in range(2):
                    events = [event for event in trace["traceEvents"] if event["pid"] == rank and event["ph"] == "X"]
                    for name in "backward", "optimizer step":
                        self.assertEqual(sum(event["name"] == name for event in events), 3, (rank, name))
                    for way in "forward", "backward":
                        modules = {event["name"] for event in events if event.get("cat") == way}
                        named = {name.rpartition(".")[0] for name, parameter in make_model().named_parameters()}
                        self.assertLessEqual(named, modules, (rank, way))

    def test_refuses_another_kind_of_file(self):
        def enter():
            with lockstep.Timeline("steps.txt"):
                pass

        expect_error(lockstep.UsageError, ".json or .pftrace", enter)


if __name__ == "__main__":
    unittest.main()
