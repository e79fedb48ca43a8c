# SPDX-License-Identifier: Apache-2.0
"""A timeline of a training loop in Python."""

import json
import os
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist

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


def messages():
    """Over the default group and over another one."""
    rank = dist.get_rank()
    for group in None, dist.new_group([0, 1], backend="lockstep"):
        here, there = torch.full((5,), float(rank)), torch.empty(5)
        sent = dist.isend(here, 1 - rank, group=group)
        dist.recv(there, 1 - rank if rank == 0 else None, group=group)
        sent.wait()
        assert there.tolist() == [1.0 - rank] * 5, there
        dist.all_reduce(here, group=group)


def traced_messages(file):
    with lockstep.Timeline(file):
        messages()


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

    def test_has_messages_and_collectives_of_a_process_group(self):
        for machines in None, [0, 1]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "messages.json")
                run_ranks(2, traced_messages, str(file), machines=machines)
                events = json.loads(file.read_text())["traceEvents"]
                ends = [{event["id"]: event["pid"] for event in events if event["ph"] == kind} for kind in "sf"]
                self.assertEqual(sorted((ends[0][arrow], ends[1][arrow]) for arrow in ends[0]), [(0, 1)] * 2 + [(1, 0)] * 2)
                for rank in range(2):
                    of_rank = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
                    for name in f"send {1 - rank}", f"receive {1 - rank}", "all_reduce":
                        found = [event["args"]["bytes"] for event in of_rank if event["name"].endswith(name)]
                        self.assertGreaterEqual(found.count(20), 2, (name, found))

    def test_has_what_LOCKSTEP_TRACE_asks_for(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "asked.json")
            with unittest.mock.patch.dict(os.environ, LOCKSTEP_TRACE=str(file)):
                run_ranks(2, messages)
            self.assertEqual(sorted(path.name for path in Path(folder).iterdir()), ["asked.json.rank0", "asked.json.rank1"])

    def test_refuses_another_kind_of_file(self):
        def enter():
            with lockstep.Timeline("steps.txt"):
                pass

        expect_error(lockstep.UsageError, "FILE.json, which Perfetto", enter)


if __name__ == "__main__":
    unittest.main()
