#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads what `--trace` writes.

  trace_test.py COMMAND MISBEHAVING_TASK OWN_LOOP   `lockstep`, a program that can lose a rank, one with a loop of its own
  trace_test.py --machines FILE                     a trace of two machines of two ranks each, whose clocks differ
"""
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

BATCH = {"threads": 1, "batch-size": 16, "timeout": 60}


def run(command, options, code=0, **variables):
    words = [*command, "--quiet"] + [str(word) for name, value in (BATCH | options).items() for word in (f"--{name}", value)]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120, env=os.environ | variables)
    assert done.returncode == code, (words, done.returncode, done.stderr)
    return done.stderr


def spans(trace):
    """The spans of each rank, in the order of their ends."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"]].append(event | {"end": event["ts"] + event["dur"]})
    return found


def events_of(trace, kind):
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def counters(trace):
    """The values of each counter of each rank."""
    found = defaultdict(list)
    for event in events_of(trace, "C"):
        found[event["pid"], event["name"]].append(event["args"]["value"])
    return found


def arrows(trace):
    """(from, to): of each message that has both ends in the trace; they lie within spans of those ranks."""
    starts, ends = ({event["id"]: event for event in events_of(trace, kind)} for kind in "sf")
    assert len(starts) == len(events_of(trace, "s")) and len(ends) == len(events_of(trace, "f")), "two arrows of one id"
    found, ranks = [], spans(trace)
    for number in starts.keys() & ends.keys():
        start, end = starts[number], ends[number]
        assert start["ts"] <= end["ts"], (start, end)
        for event, name in (start, f"send {end['pid']}"), (end, f"receive {start['pid']}"):
            around = [each for each in ranks[event["pid"]] if within(event | {"end": event["ts"]}, each)]
            if start["pid"] == end["pid"]:  # between threads that are devices
                name = "send to device" if event is start else "receive from device"
            assert any(each["name"].startswith(name) for each in around), (event, name, around)
        found.append((start["pid"], end["pid"]))
    return found


def named(events, name):
    return [event for event in events if event["name"] == name]


def expect_common_clock(ranks, name, microseconds):
    """Nobody leaves a collective before all have entered it."""
    calls = list(zip(*(named(events, name) for events in ranks.values()), strict=True))
    assert calls, f"no {name}"
    for call in calls:
        early = max(event["ts"] for event in call) - min(event["end"] for event in call)
        assert early <= microseconds, (name, early, call)


def within(inner, outer):
    slack = 0.002  # times are rounded to the microsecond's thousandth
    return outer["ts"] - slack <= inner["ts"] and inner["end"] <= outer["end"] + slack and inner["tid"] == outer["tid"]


def expect_steps(events, rank, first, end):
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [step["name"] for step in steps] == [f"step {number}" for number in range(first, end)], steps
    for step in steps:
        inside = [event for event in events if within(event, step)]
        for phase in ("forward", "backward", "exchange", "update", "barrier 1: gradients", "barrier 2: settings", "barrier 3: updated"):
            assert len(named(inside, phase)) == 1, (phase, step, inside)
        for module in ("conv1", "conv2", "fc1", "fc2", "avg_pool2d"):
            for way in ("forward", "backward"):
                (phase,) = named(inside, way)
                found = [event for event in named(inside, module) if event.get("cat") == way]
                assert any(within(event, phase) for event in found), (module, way, found)
    waits = {event["name"] for event in events if event["name"].startswith("wait for rank")}
    assert waits <= {f"wait for rank {1 - rank}"}, waits
    return waits


def expect_trace_of_some_steps(command, folder):
    file = Path(folder, "some.json")
    run([command, "train"], {"model": "lenet", "data": "synthetic:640x1x28x28", "ranks": 2, "max-steps": 12, "checkpoint-every": 5,
                             "checkpoint-dir": f"{folder}/some", "trace": file, "trace-steps": "3:7"})
    trace = json.loads(file.read_text())
    ranks, about = spans(trace), trace["otherData"]
    assert min(event["ts"] for event in trace["traceEvents"] if "ts" in event) == 0
    assert about == {"format": 1, "complete": True, "overwritten_spans": {"rank 0": 0, "rank 1": 0}}, about
    assert sorted(ranks) == [0, 1]
    assert set.union(*(expect_steps(events, rank, 3, 7) for rank, events in ranks.items())), "no rank ever waited for the other"
    for barrier in ("barrier 1: gradients", "barrier 2: settings", "barrier 3: updated"):
        expect_common_clock(ranks, barrier, 100)
    assert len(named(ranks[0], "checkpoint 5")) == 1
    for events in ranks.values():
        loop = named(events, "step 3")[0]["tid"]
        assert any(event["name"].startswith("load batch") and event["tid"] != loop for event in events), "no loading"
    assert min(event["ts"] for events in ranks.values() for event in events) >= 0
    gathered = [event.get("args", {}).get("bytes") for event in named(ranks[0], "all_gather")]
    assert 5056 in gathered, gathered  # torch's generator in a checkpoint
    assert list(Path(folder).glob("some.*.rank*")) == [], "rings are left"


def expect_what_is_around_the_steps(command, folder):
    """Two epochs of four steps, with a checkpoint after each."""
    file = Path(folder, "epochs.json")
    run([command, "train"], {"model": "lenet", "data": "synthetic:64x1x28x28", "ranks": 2, "epochs": 2, "checkpoint-dir": f"{folder}/epochs",
                             "trace": file})
    ranks = spans(json.loads(file.read_text()))
    for events in ranks.values():
        ends = [event for event in events if event["name"].startswith("end of epoch")]
        assert [end["name"] for end in ends] == ["end of epoch 0", "end of epoch 1"], ends
        assert all(end["tid"] == step["tid"] for end in ends for step in named(events, "step 0")), ends
    loop = named(ranks[0], "step 0")[0]["tid"]
    for number in 4, 8:
        (written,) = named(ranks[0], f"write checkpoint {number}")
        (copied,) = named(ranks[0], f"checkpoint {number}")
        assert written["tid"] != loop == copied["tid"] and copied["ts"] <= written["end"], (written, copied)


def expect_what_a_lost_rank_did(program, folder, *launcher):
    file = Path(folder, "lost.json")
    file.with_name("lost.json.rank7").write_text("of an earlier run")
    notes = file.with_name("lost.json.rank.notes")
    notes.write_text("not a ring")
    options = {"max-steps": 40, "trace": file} | ({} if launcher else {"ranks": 2})
    error = run([*launcher, program], options, code=128 + 9, MISBEHAVE="kill")
    assert "lost.json has what each rank did before the run failed" in error, error
    trace = json.loads(file.read_text())
    assert not trace["otherData"]["complete"]
    ranks = spans(trace)
    assert sorted(ranks) == [0, 1]
    for rank, events in ranks.items():  # the tenth step ended rank 1; it may be the last of rank 0
        steps = [event["name"] for event in events if event["name"].startswith("step ")]
        assert steps[: 9 if rank == 0 else None] == [f"step {step}" for step in range(9)], (rank, steps)
    earlier = [file.with_name("lost.json.rank7")] if launcher else []
    assert sorted(Path(folder).glob("lost.json.*")) == [notes] + earlier, "rings are left, or more is gone"


def expect_a_run_whose_trace_cannot_be_written(command, folder):
    """A folder is in the file's place: the run ends well, and the rings stay."""
    file, metrics = Path(folder, "folder.json"), Path(folder, "folder.jsonl")
    file.mkdir()
    (file / "something").touch()
    error = run([command, "train"], {"model": "lenet", "data": "synthetic:640x1x28x28", "ranks": 2, "max-steps": 3, "trace": file,
                                     "metrics": metrics})
    assert "the trace is not written" in error and "`lockstep trace" in error, error
    assert json.loads(metrics.read_text().splitlines()[-1])["event"] == "run"
    (file / "something").unlink()
    file.rmdir()
    assert merge(command, file) == ""
    trace = json.loads(file.read_text())
    assert trace["otherData"]["complete"] and sorted(spans(trace)) == [0, 1]


def expect_what_a_single_rank_did(program, folder):
    file = Path(folder, "single.json")
    error = run([program], {"max-steps": 40, "trace": file}, code=1, MISBEHAVE="throw")
    assert "thrown on purpose" in error, error
    trace = json.loads(file.read_text())
    assert not trace["otherData"]["complete"] and len(named(spans(trace)[0], "step 8")) == 1
    assert list(Path(folder).glob("single.json.*")) == [], "rings are left"


def expect_strategies(command, folder):
    for strategy, names in {"pipeline": {"forward 0", "backward 1"}, "towers": {"forward", "exchange", "device 0", "all_reduce"},
                            "averaging": {"backward", "update"}, "kvstore": {"forward", "exchange"}}.items():
        file = Path(folder, f"{strategy}.json")
        run([command, "train"], {"model": "lenet", "data": "synthetic:640x1x28x28", "strategy": strategy, "ranks": 2, "max-steps": 3,
                                 "trace": file})
        trace = json.loads(file.read_text())
        found = {event["name"] for events in spans(trace).values() for event in events}
        assert names <= found, (strategy, names - found)
        assert all(value > 1e6 for value in counters(trace)[0, "memory"]), counters(trace)
        assert counters(trace)[0, "batches ready"], counters(trace).keys()
        assert set(arrows(trace)) == ({(0, 0)} if strategy == "pipeline" else set()), (strategy, arrows(trace))
        if strategy == "pipeline":
            assert {"send to device 1", "receive from device 0", "send to device 0", "receive from device 1"} <= found, found


def expect_messages(command, folder):
    """A pipeline of processes, and servers: who sends, and who receives."""
    file = Path(folder, "messages.json")
    options = {"model": "lenet", "data": "synthetic:640x1x28x28", "max-steps": 3, "trace": file}
    launched = [command, "run", "--nproc-per-node", 2, "--", command, "train"]
    run(list(map(str, launched)), options | {"strategy": "pipeline"})
    assert set(arrows(json.loads(file.read_text()))) == {(0, 1), (1, 0)}, "no messages between stages"
    run([command, "train"], options | {"strategy": "kvstore", "kvstore": "dist_async", "ranks": 2})
    trace = json.loads(file.read_text())
    found = arrows(trace)
    assert {(0, 1), (1, 0), (0, 2), (2, 0)} <= set(found), set(found)
    assert found.count((1, 0)) >= 3 and found.count((0, 1)) >= 3, "no push or pull of each step"
    delays = counters(trace)[0, "staleness"]
    assert delays and min(delays) >= 0, delays


def expect_loops_of_ones_own(command, program, folder):
    """`lockstep run --trace`: 15 steps; rank 1 has a forked child, which does not end the trace of its parent."""
    file = Path(folder, "own.json")
    done = subprocess.run([command, "run", "--nproc-per-node", "2", "--trace", file, "--", program], capture_output=True, text=True,
                          timeout=120, env=os.environ | {"HABIT": "fork"})
    assert done.returncode == 0, done
    trace = json.loads(file.read_text())
    ranks, about = spans(trace), trace["otherData"]
    assert counters(trace)[1, "memory"]
    assert about["complete"] and sorted(ranks) == [0, 1], about
    for events in ranks.values():
        for name in ("backward", "exchange", "optimizer step", "barrier 1: gradients", "barrier 3: updated"):
            assert len(named(events, name)) == 15, (name, len(named(events, name)))
        for way in ("forward", "backward"):
            assert len([event for event in named(events, "2") if event.get("cat") == way]) >= 15, "no module 2"
    expect_common_clock(ranks, "barrier 1: gradients", 100)
    assert list(Path(folder).glob("own.json.*")) == [], "rings are left"


def expect_what_a_loop_that_failed_did(command, program, folder):
    file = Path(folder, "failed.json")
    done = subprocess.run([command, "run", "--nproc-per-node", "2", "--trace", file, "--", program], capture_output=True, text=True,
                          timeout=120, env=os.environ | {"HABIT": "write_gradient"})
    assert done.returncode != 0 and "failed.json has what each rank did" in done.stderr, done
    trace = json.loads(file.read_text())
    assert not trace["otherData"]["complete"] and all(named(events, "backward") for events in spans(trace).values())
    assert list(Path(folder).glob("failed.json.*")) == [], "rings are left"


def merge(command, file, code=0):
    done = subprocess.run([command, "trace", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done
    return done.stderr


def expect_rings_of_another_launcher(command, program, folder):
    """LOCKSTEP_TRACE alone: the ranks leave their rings, `lockstep trace` makes the file."""
    file = Path(folder, "left.json")
    launched = [command, "run", "--nproc-per-node", "2", "--", program]
    subprocess.run(launched, check=True, stdout=subprocess.DEVNULL, timeout=120, env=os.environ | {"LOCKSTEP_TRACE": str(file)})
    assert len(list(Path(folder).glob("left.json.rank*"))) == 2 and not file.exists()
    broken = file.with_name("left.json.rank2")
    broken.write_bytes(file.with_name("left.json.rank1").read_bytes()[:10000])
    earlier = file.with_name("left.json.rank1").read_bytes()
    said = merge(command, file)
    assert "left.json.rank2" in said and "cut off" in said, said
    trace = json.loads(file.read_text())
    assert trace["otherData"]["complete"] and sorted(spans(trace)) == [0, 1]
    assert list(Path(folder).glob("left.json.*")) == [broken], "what can't be read stays"
    broken.unlink()
    assert "neither" in merge(command, file, code=1)

    other = file.with_name("left.json.rank1")
    other.write_bytes(earlier)
    assert "left.json has 1 of 2 ranks" in merge(command, file)
    assert not json.loads(file.read_text())["otherData"]["complete"]
    other.write_bytes(earlier)
    launched[3] = "1"
    subprocess.run(launched, check=True, stdout=subprocess.DEVNULL, timeout=120, env=os.environ | {"LOCKSTEP_TRACE": str(file)})
    assert "left.json.rank1 is of an earlier job" in merge(command, file)
    trace = json.loads(file.read_text())
    assert trace["otherData"]["complete"] and sorted(spans(trace)) == [0]
    assert list(Path(folder).glob("left.json.*")) == [other], "what is of another job stays"
    done = subprocess.run([command, "run", "--trace", "x.txt", "--", "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "FILE.json, which Perfetto" in done.stderr, done


def expect_ranks_that_end_when_they_like(command, folder):
    """With lockstep's own launcher the file is there at the end; with another one rank 0 says how to make it."""
    file = Path(folder, "async.json")
    options = {"model": "lenet", "data": "synthetic:640x1x28x28", "strategy": "kvstore", "kvstore": "dist_async", "max-steps": 3, "trace": file}
    said = run([command, "train"], options | {"ranks": 2})
    expect_server_and_workers(file, folder)
    assert "`lockstep trace" not in said, said
    file.unlink()
    said = run([command, "run", "--nproc-per-node", "3", "--", command, "train"], options)
    assert said.count(f"`lockstep trace {file}` puts it together") == 1 and not file.exists(), said
    assert merge(command, file) == ""
    expect_server_and_workers(file, folder)


def expect_server_and_workers(file, folder):
    trace = json.loads(file.read_text())
    ranks = spans(trace)
    assert trace["otherData"]["complete"] and sorted(ranks) == [0, 1, 2], trace["otherData"]
    assert named(ranks[1], "forward") and not named(ranks[0], "forward"), "rank 0 is the server"
    assert list(Path(folder).glob("async.json.*")) == [], "rings are left"


def expect_usage_errors(command, folder):
    for options, said in (({"trace": f"{folder}/x.pftrace"}, "FILE.json, which Perfetto"), ({"trace-steps": "1:2"}, "without --trace"),
                          ({"trace": f"{folder}/x.json", "trace-steps": "5:3"}, "not a range of steps")):
        error = run([command, "train"], {"max-steps": 1} | options, code=2)
        assert said in error, error


def expect_machines(file):
    ranks = spans(json.loads(Path(file).read_text()))
    assert sorted(ranks) == [0, 1, 2, 3]
    expect_common_clock(ranks, "machines: all_reduce", 1000)
    for events in ranks.values():
        assert named(events, "send bucket 0") and named(events, "receive bucket 0")
        assert all(event["args"]["bytes"] > 0 for event in named(events, "machines: all_reduce"))


def main():
    if sys.argv[1] == "--machines":
        return expect_machines(sys.argv[2])
    command, program, own_loop = (str(Path(path).resolve()) for path in sys.argv[1:4])
    with tempfile.TemporaryDirectory() as folder:
        expect_trace_of_some_steps(command, folder)
        expect_what_is_around_the_steps(command, folder)
        expect_what_a_lost_rank_did(program, folder)
        expect_what_a_lost_rank_did(program, folder, command, "run", "--nproc-per-node", "2", "--")
        expect_a_run_whose_trace_cannot_be_written(command, folder)
        expect_what_a_single_rank_did(program, folder)
        expect_strategies(command, folder)
        expect_messages(command, folder)
        expect_loops_of_ones_own(command, own_loop, folder)
        expect_what_a_loop_that_failed_did(command, own_loop, folder)
        expect_rings_of_another_launcher(command, own_loop, folder)
        expect_ranks_that_end_when_they_like(command, folder)
        expect_usage_errors(command, folder)


if __name__ == "__main__":
    main()
