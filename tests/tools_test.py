#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `lockstep top` says about two made-up looks at a job, how it lays out a job as text, what the examples of --on-event
make of events, what `lockstep compare slow-links` makes of metrics, and what bench/step_memory.py leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools/runs"))

import top  # noqa: E402
from jobs import Job  # noqa: E402
from summary import summary  # noqa: E402
from verdicts import verdicts_on  # noqa: E402

MS = 10**6
SECOND = 1000 * MS
PHASES = "starting meeting loading forward backward exchange update validating saving ended".split() + ["own code"]


def reading(rank, at):
    """What `lockstep jobs` prints of a rank."""
    return {
        "rank": rank,
        "pid": 1000 + rank,
        "at": at,
        "phase": "forward",
        "phase_since": 100 * SECOND,
        "step": 10,
        "moves": 0,
        "samples": 0,
        "loss": 0.25,
        "loader_workers": -1,
        "wait_since": 0,
        "waits_for": 0,
        "calls_others": 0,
        "in_phase": dict.fromkeys(PHASES, 0),
        "waited": dict.fromkeys(PHASES, 0),
        "waited_for": {},
        "state": "R",
        "memory_bytes": 1023 << 20,
        "private_bytes": 0,
        "ns_without_core": 0,
    }


class TwoLooks:
    """A second apart, at ranks that have done nothing in between."""

    def __init__(self, ranks):
        self.before, self.now = ([reading(rank, at * SECOND) for rank in range(ranks)] for at in (100, 101))

    def spends(self, rank, phase, ms):
        self.now[rank]["in_phase"][phase] += ms * MS
        self.now[rank]["moves"] += 1
        return self

    def waits(self, rank, phase, peer, ms):
        self.now[rank]["waited"][phase] += ms * MS
        self.now[rank]["waited_for"][str(1000 + peer)] = self.now[rank]["waited_for"].get(str(1000 + peer), 0) + ms * MS
        return self.spends(rank, phase, ms)

    def is_waiting(self, rank, peer):
        """For long."""
        self.both(rank, phase="exchange", wait_since=80 * SECOND, phase_since=80 * SECOND, waits_for=1000 + peer)

    def both(self, rank, **fields):
        for looks in (self.before, self.now):
            looks[rank].update(fields)

    def serves(self, rank, **grown):
        none = dict.fromkeys(("in_hand", "requests", "ns_in_hand", "gradients", "delays", "most_delay"), 0) | {
            "clients": 3
        }
        self.before[rank]["server"], self.now[rank]["server"] = none, none | grown

    def job(self, before=True):
        about = {
            "job": 4711,
            "name": "lockstep train",
            "command": "lockstep train --strategy ddp --ranks 2",
            "started_at": 0,
            "world_size": len(self.now),
            "machines": 1,
            "machine": 0,
        }
        return Job(about | {"ranks": self.now}, 3700, {"ranks": self.before} if before else None)

    def first(self):
        return verdicts_on(self.job())[0]


class Rates(unittest.TestCase):
    def test_the_time_between_the_looks_is_divided(self):
        looks = TwoLooks(1).spends(0, "forward", 200).spends(0, "backward", 300).spends(0, "loading", 100)
        looks.waits(0, "update", 7, 100).spends(0, "update", 100).spends(0, "exchange", 200)
        looks.now[0].update(step=15, samples=640)
        (rank,) = looks.job().ranks
        for part, share in {"compute": 0.5, "data": 0.1, "wait": 0.1, "update": 0.1, "exchange": 0.2}.items():
            self.assertAlmostEqual(rank.shares[part], share)
        self.assertAlmostEqual(rank.steps_per_second, 5)
        self.assertAlmostEqual(rank.samples_per_second, 640)

    def test_there_are_none_at_the_first_look_nor_of_a_process_that_is_new(self):
        looks = TwoLooks(2).spends(1, "forward", 500)
        looks.now[0]["samples"] = looks.now[1]["samples"] = 100
        looks.before[0]["pid"] = 4711
        self.assertEqual([rank.samples_per_second for rank in looks.job().ranks], [0, 100])
        self.assertEqual(looks.job(before=False).samples_per_second, 0)

    def test_a_rank_that_stands_still_says_since_when(self):
        looks = TwoLooks(2).spends(1, "forward", 900)
        looks.both(0, phase_since=61 * SECOND)
        still, moves = looks.job().ranks
        self.assertAlmostEqual(still.seconds_since_progress, 40)
        self.assertLessEqual(moves.seconds_since_progress, 1)

    def test_a_server_counts_its_requests_and_delays(self):
        looks = TwoLooks(2)
        looks.serves(0, requests=20, ns_in_hand=500 * MS, gradients=10, delays=20, most_delay=4)
        server = looks.job().ranks[0].server
        expected = {
            "clients": 3,
            "requests_in_hand": 0.5,
            "requests_per_second": 20,
            "seconds_per_request": 0.025,
            "mean_delay": 2,
            "most_delay": 4,
        }
        self.assertEqual(server.keys(), expected.keys())
        for key, value in expected.items():
            self.assertAlmostEqual(server[key], value, msg=key)


class Verdicts(unittest.TestCase):
    def expect(self, looks, kind, ranks=None, text=None, part=""):
        verdict = looks.first()
        self.assertEqual(verdict.kind, kind, verdict)
        self.assertIn(part, verdict.text)
        if ranks is not None:
            self.assertEqual(verdict.ranks, ranks)
        if text is not None:
            self.assertEqual(verdict.text, text)

    def test_names_the_rank_that_waits_for_data_and_how_many_workers_it_needs(self):
        looks = (
            TwoLooks(3)
            .spends(0, "forward", 1000)
            .spends(1, "forward", 1000)
            .spends(2, "loading", 380)
            .spends(2, "forward", 620)
        )
        looks.now[2]["loader_workers"] = 1
        self.expect(looks, "data", [2], "rank 2 waits for data: 38 % of its time; --workers 2")

    def test_of_ranks_that_all_wait_for_data_is_one(self):
        looks = TwoLooks(3)
        for rank in range(3):
            looks.spends(rank, "loading", 750).spends(rank, "forward", 250).now[rank]["loader_workers"] = 2
        self.assertEqual(len(verdicts_on(looks.job())), 1)
        self.expect(looks, "data", [0, 1, 2], "ranks 0, 1 and 2 wait for data: up to 75 % of their time; --workers 8")

    def test_says_that_a_rank_without_data_holds_up_the_others(self):
        looks = (
            TwoLooks(2)
            .spends(0, "forward", 600)
            .waits(0, "exchange", 1, 400)
            .spends(1, "forward", 600)
            .spends(1, "loading", 400)
        )
        self.assertEqual(len(verdicts_on(looks.job())), 1)
        self.expect(
            looks,
            "data",
            text="rank 1 waits for data: 40 % of its time, and the others wait for it 40 % of theirs; --workers 1",
        )

    def test_blames_no_data_for_waits_of_both_sides(self):
        looks = TwoLooks(2).spends(0, "forward", 310).waits(0, "exchange", 1, 600).spends(0, "loading", 90)
        looks.spends(1, "forward", 260).waits(1, "exchange", 0, 620).spends(1, "loading", 120)
        self.expect(looks, "data", text="rank 1 waits for data: 12 % of its time; --workers 1")

    def test_names_the_straggler_by_whom_the_others_wait_for(self):
        looks = TwoLooks(4).spends(1, "forward", 1000)
        for rank in (0, 2, 3):
            looks.spends(rank, "forward", 600).waits(rank, "exchange", 1, 400)
        self.expect(
            looks,
            "straggler",
            [1],
            part="rank 1 is the straggler: the others wait for it 40 % of their time; it computes 100 %",
        )

    def test_says_of_a_straggler_without_a_core_that_it_has_none(self):
        looks = TwoLooks(2).spends(0, "forward", 500).waits(0, "update", 1, 500).spends(1, "forward", 1000)
        looks.now[1]["ns_without_core"] = 450 * MS
        self.expect(looks, "straggler", part="it gets no core 45 % of its time")

    def test_takes_nobody_for_a_straggler_where_all_wait_alike(self):
        looks = TwoLooks(2)
        for rank in (0, 1):
            looks.spends(rank, "forward", 800).waits(rank, "exchange", 1 - rank, 200)
        self.expect(
            looks,
            "fine",
            text="no rank holds up the others; 80 % of the time is computing, 20 % waiting for one another in turn",
        )

    def test_names_a_straggler_that_waits_itself_but_much_less(self):
        """It waits for its core, and sometimes for the others."""
        looks = (
            TwoLooks(2)
            .spends(0, "forward", 320)
            .waits(0, "exchange", 1, 680)
            .spends(1, "forward", 620)
            .waits(1, "exchange", 0, 380)
        )
        self.expect(looks, "straggler", [1])

    def test_names_ranks_that_get_no_core(self):
        looks = TwoLooks(2)
        for rank in (0, 1):
            looks.spends(rank, "forward", 900).waits(rank, "exchange", 1 - rank, 100).now[rank]["ns_without_core"] = (
                500 + 100 * rank
            ) * MS
        self.expect(
            looks,
            "cores",
            [0, 1],
            "ranks 0 and 1 get no core up to 60 % of their time: fewer ranks or --threads, or see what else runs on "
            "these cores",
        )
        for rank in looks.now:
            rank["ns_without_core"] = 150 * MS
        self.expect(looks, "fine")

    def test_names_a_rank_that_is_stopped(self):
        looks = TwoLooks(2)
        looks.is_waiting(0, 1)
        looks.now[1]["state"] = "T"
        self.expect(looks, "stopped", [1], "rank 1 is stopped by a signal; kill -CONT 1001")

    def test_names_a_rank_that_has_died(self):
        looks = TwoLooks(2)
        looks.now[1]["state"] = ""
        self.expect(looks, "died", [1], "rank 1 has died, in forward of step 10")
        looks.now[1]["phase"] = "ended"
        self.expect(looks, "fine")

    def test_finds_ranks_that_wait_for_one_another(self):
        looks = TwoLooks(3)
        for rank in range(3):
            looks.is_waiting(rank, (rank + 1) % 3)
        self.expect(looks, "circle", [0, 1, 2], part="all ranks wait for one another, rank 0 for rank 1")

    def test_says_where_a_rank_stands_for_which_others_wait(self):
        looks = TwoLooks(2)
        looks.is_waiting(0, 1)
        looks.both(1, phase_since=61 * SECOND)
        self.expect(
            looks,
            "stuck",
            [1],
            "rank 1 has not moved for 40.0 s, in forward of step 10, and others wait for it; gdb -p 1001 shows where it is",
        )

    def test_names_who_has_not_come_to_the_meeting(self):
        looks = TwoLooks(3)
        looks.now[0]["phase"] = looks.now[1]["phase"] = "meeting"
        looks.now[2]["pid"] = 0
        self.expect(looks, "meeting", [2], "the others wait at the meeting for rank 2")
        for rank in looks.now:
            rank["pid"] = 0
        self.expect(looks, "starting", [0, 1, 2])

    def test_tells_a_busy_server_from_a_slow_worker(self):
        looks = TwoLooks(4)
        looks.serves(0)
        for rank in (1, 2, 3):
            looks.spends(rank, "forward", 500).waits(rank, "exchange", 0, 500)
        self.expect(
            looks, "server", [0], "rank 0 is a server for which the workers wait 50 % of their time; --servers 2"
        )
        slow = TwoLooks(4).spends(2, "forward", 1000)
        slow.serves(0)
        for rank in (1, 3):
            slow.spends(rank, "forward", 400).waits(rank, "exchange", 0, 600)
        self.expect(slow, "straggler", [2])

    def test_takes_nobody_for_a_straggler_where_servers_update_asynchronously(self):
        looks = (
            TwoLooks(3)
            .spends(1, "forward", 950)
            .waits(1, "exchange", 0, 50)
            .spends(2, "forward", 300)
            .waits(2, "exchange", 0, 700)
        )
        looks.serves(0, most_delay=3)
        looks.now[1]["step"] += 5
        looks.now[2]["step"] += 15
        self.expect(looks, "server")
        looks.now[1]["step"] += 10  # but where all make as many steps
        self.expect(looks, "straggler", [1])

    def test_finds_the_worker_that_waits_less_for_servers_than_the_others_do(self):
        looks = TwoLooks(4).spends(2, "forward", 900).waits(2, "exchange", 0, 100)
        looks.serves(0)
        for rank in (1, 3):
            looks.spends(rank, "forward", 550).waits(rank, "exchange", 0, 450)
        self.expect(looks, "straggler", [2])

    def test_says_of_a_rank_that_validates_or_saves_for_long_what_it_does(self):
        """The others wait for rank 0's whole second, which is longer than any step."""
        looks = TwoLooks(2).waits(1, "exchange", 0, 1000).spends(0, "validating", 1000)
        looks.is_waiting(1, 0)
        looks.both(0, phase="validating", phase_since=90 * SECOND, moves=7)
        self.expect(looks, "straggler", part="it validates or saves 100 % of its time, the others 0 %")
        looks.both(0, phase_since=30 * SECOND)
        self.expect(looks, "stuck")

    def test_says_where_a_programs_own_code_takes_the_time(self):
        looks = TwoLooks(2)
        for rank in (0, 1):
            looks.spends(rank, "forward", 300).spends(rank, "own code", 700)
        self.expect(looks, "fine", part="70 % in the program's own code")
        slow = (
            TwoLooks(2)
            .spends(0, "forward", 400)
            .waits(0, "exchange", 1, 600)
            .spends(1, "forward", 400)
            .spends(1, "own code", 600)
        )
        self.expect(slow, "straggler", part="it runs the program's own code 60 % of its time, the others 0 %")

    def test_is_content_where_nobody_waits(self):
        looks = TwoLooks(2)
        for rank in (0, 1):
            looks.spends(rank, "forward", 930).spends(rank, "update", 70)
        self.expect(looks, "fine", text="no rank holds up the others; 93 % of the time is computing")


class Text(unittest.TestCase):
    def setUp(self):
        looks = TwoLooks(2)
        for rank in (0, 1):
            looks.waits(rank, "validating", 1 - rank, 200).spends(rank, "forward", 800)
            looks.both(rank, pid=1234567 + rank, phase="validating", phase_since=101 * SECOND, step=12345678, state="S")
            looks.now[rank]["samples"] = 12345
        looks.now[1]["ns_without_core"] = 900 * MS  # a verdict
        self.looks, self.job = looks, looks.job()

    def heading(self, width):
        return next(line.text for line in top.lines_of(self.job, width) if line.style == "heading")

    def test_is_never_wider_than_the_terminal(self):
        self.looks.serves(0, requests=100, ns_in_hand=300 * MS, gradients=1, delays=1, most_delay=7)
        for job in (self.job, self.looks.job()):
            for width in range(1, 201):
                self.assertLessEqual(max(len(line.text) for line in top.lines_of(job, width)), width)
                self.assertLessEqual(len(top.line_of(job, width)), width)

    def test_leaves_out_columns_in_a_fixed_order(self):
        self.assertEqual(
            self.heading(200),
            "rank     step samples/s comp wait exch data  upd     memory    age phase        for      pid       loss",
        )
        self.assertEqual(self.heading(80), "rank     step samples/s comp wait exch data  upd     memory    age phase")
        self.assertEqual(self.heading(40), "rank     step comp wait data  upd    age")
        for width in range(5, top.WIDTH_OF_ALL_COLUMNS):
            self.assertLessEqual(set(self.heading(width).split()), set(self.heading(width + 1).split()))
        self.assertEqual(self.heading(5), "rank")

    def test_keeps_the_whole_verdict_in_a_narrow_terminal(self):
        said = " ".join(line.text for line in top.lines_of(self.job, 40) if line.style == "warning")
        self.assertEqual(said, "> " + verdicts_on(self.job)[0].text)

    def test_shows_what_a_rank_does(self):
        lines = top.lines_of(self.job, 200)
        self.assertEqual(lines[1].text, "job 4711, up 1:01:40, 2 ranks, 12,345 samples/s")
        self.assertEqual(
            lines[-1].text,
            "   1 12345678    12,345  80%  20%   0%   0%   0% 1023.0 MiB   0 ms validating     -  1234568     0.2500",
        )
        self.assertEqual(top.line_of(self.job, 30), "job 4711, lockstep train")

    def test_json_has_the_fields_that_are_documented(self):
        found = self.job.json(verdicts_on(self.job))
        self.assertEqual((found["job"], found["verdicts"][0]["ranks"]), (4711, [1]))
        rank = found["ranks"][1]
        self.assertEqual(
            (rank["state"], rank["phase"], rank["shares"]["wait"], rank["waits_for"]),
            ("running", "validating", 0.2, None),
        )
        self.assertNotIn("server", rank)


EVENTS = (
    {"event": "start", "settings": {"lr": 0.1}},
    {"event": "step", "epoch": 0, "step": 7, "loss": 0.5},
    {"event": "epoch", "epoch": 0, "train_loss": 0.25, "val_loss": None},
    {"event": "run"},
)

# A package that prints every call.
RECORDER = """
import json, sys

class Recorder:
    def __init__(self, name): self.name = name
    def __getattr__(self, name): return Recorder(name)
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def __call__(self, *arguments, **named):
        print(json.dumps([self.name, arguments, named]))
        return self

sys.modules[__name__] = Recorder(__name__)
"""


class OnEvent(unittest.TestCase):
    def calls_of(self, package):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"{package}.py").write_text(RECORDER)
            command = [sys.executable, "-B", str(ROOT / f"examples/on_event_{package}.py")]
            lines = "".join(json.dumps(event) + "\n" for event in EVENTS)
            done = subprocess.run(command, input=lines, env={**os.environ, "PYTHONPATH": folder}, stdout=subprocess.PIPE,
                                  text=True, timeout=60, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_mlflow_gets_settings_and_curves(self):
        self.assertEqual(
            self.calls_of("mlflow"),
            [
                ["start_run", [], {}],
                ["log_params", [{"lr": 0.1}], {}],
                ["log_metrics", [{"step/loss": 0.5}], {"step": 7}],
                ["log_metrics", [{"epoch/train_loss": 0.25}], {"step": 0}],
            ],
        )

    def test_wandb_gets_settings_and_curves(self):
        self.assertEqual(
            self.calls_of("wandb"),
            [
                ["init", [], {"project": "lockstep"}],
                ["update", [{"lr": 0.1}], {}],
                ["log", [{"step/epoch": 0, "step/step": 7, "step/loss": 0.5}], {}],
                ["log", [{"epoch/epoch": 0, "epoch/train_loss": 0.25}], {}],
            ],
        )


class SlowLinks(unittest.TestCase):
    """20 steps: losses as given, down to the last. others: what differs in the case of a run."""

    def table(self, target_loss=0, others={}, **losses):
        cases = []
        with tempfile.TemporaryDirectory() as folder:
            for name, values in losses.items():
                seconds = 0.5 if name == "ddp" else 0.25
                events = [
                    {"event": "step", "step": i, "seconds": seconds, "samples": 8, "loss": values[min(i, len(values) - 1)]}
                    for i in range(20)
                ]
                case = {"name": name, "group": name, "contender": name, "strategy": "ddp", "devices": 4, "seed": 1}
                link = 5e6 if name == "ddp" else 1e6
                case |= {"folder": name, "state": "finished", "varied": {}} | others.get(name, {})
                forward = 4 / case["devices"]
                events.append({"event": "run", "forward_seconds": forward, "backward_seconds": 2, "update_seconds": 1})
                Path(folder, name).mkdir()
                lines = "".join(json.dumps(event) + "\n" for event in events)
                Path(folder, name, "metrics.jsonl").write_text(lines)
                cases.append(case | {"busiest_link_bytes_per_step": {"sent": link, "received": link / 2}})
            settings = {"experiment": "slow-links", "model": "mlp", "threads": 1, "ranks_per_host": 2}
            settings |= {"megabits_per_second": 100, "target_loss": target_loss}
            text = summary(settings, "a machine", Path(folder), cases)
        return {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in text.split("s to loss |")[1].splitlines()}

    def test_show_share_of_the_least_and_time_to_the_same_loss(self):
        rows = self.table(ddp=[4, 3, 2, 1], diloco=[5, 4, 3, 2, 1], topk=[5, 4])
        # 5 MB take 400 ms, and computing 200 ms. The mean of two steps is 1 at the fifth, and at the sixth.
        self.assertEqual(rows["ddp"], ["500.0", "5.000", "400.0", "80", "1.000", "2.5 |"])
        self.assertEqual(rows["diloco"], ["250.0", "1.000", "200.0", "80", "1.000", "1.5 |"])
        self.assertEqual(rows["topk"][-1], "never |")

    def test_compare_runs_of_one_size(self):
        others = {"more": {"devices": 8}, "larger": {"varied": {"batch_size": "64"}}}
        rows = self.table(others=others, ddp=[4, 3, 2, 1], diloco=[5, 4, 3, 2, 1], more=[1], larger=[1])
        self.assertEqual([rows[name][2] for name in ("ddp", "diloco", "more", "larger")], ["400.0", "200.0", "175.0", "200.0"])
        self.assertEqual([rows[name][-1] for name in ("diloco", "more", "larger")], ["1.5 |", " |", " |"])

    def test_leave_out_the_seeds_whose_ddp_has_failed(self):
        others = {"diloco_2": {"group": "diloco", "seed": 2}}
        rows = self.table(others=others, ddp=[4, 3, 2, 1], diloco=[5, 4, 3, 2, 1], diloco_2=[1])
        self.assertEqual(rows["diloco"][-1], "1.5 |")

    def test_take_the_loss_that_is_asked_for(self):
        rows = self.table(target_loss=4.5, diloco=[5, 4, 3], topk=[6])
        self.assertEqual([row[-1] for name, row in rows.items() if name in ("diloco", "topk")], ["0.5 |", "never |"])


class StepMemory(unittest.TestCase):
    RANK = "import os, signal, sys; print(os.getpid(), file=open(sys.argv[1], 'w', 1)); os.kill(os.getpid(), signal.SIGSTOP)"
    # One of two ranks has stopped: the other is waited for.
    PROGRAM = f"""
import sys
pid, bench = sys.argv.pop(), sys.argv.pop()
sys.path[:0] = [bench]
import step_memory
step_memory.command_of = lambda *_: [sys.executable, "-c", {RANK!r}, pid]
step_memory.main()
"""

    def test_ends_stopped_ranks_when_it_is_told_to_end(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "pid")
            command = [sys.executable, "-B", "-c", self.PROGRAM, "mlp", "--only", "ddp_gloo", ROOT / "bench", file]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as measuring:
                try:
                    end = time.monotonic() + 30
                    while time.monotonic() < end and not (file.exists() and file.read_text()):
                        time.sleep(0.01)
                    rank = int(file.read_text())
                finally:
                    measuring.terminate()
            try:
                self.assertFalse(Path(f"/proc/{rank}").exists())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)


if __name__ == "__main__":
    unittest.main()
