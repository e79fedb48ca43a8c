#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forecasts beside the measurements that are kept in bench/results: they stay as good as docs/planner.md says.

planner_test.py LOCKSTEP_COMMAND RESULTS_FOLDER
"""

import json
import pathlib
import subprocess
import sys
import tempfile

COMMAND, RESULTS = sys.argv[1], pathlib.Path(sys.argv[2])

# Goals for the mean errors: of a step's time, by the group of cases, of memory, and of bytes on links. What is kept of hosts
# was measured when each machine still sent its signature to all others: a message for each, which the forecasts no longer have.
STEP = {"a core for each device": 0.10, "more devices than cores": 0.15, "hosts, a core for each": 0.10, "hosts, more than cores": 0.16}
MEMORY, LINK_BYTES = 0.10, 0.02


def bench_plan(*options):
    return subprocess.run([COMMAND, "bench", "plan", *options], capture_output=True, text=True, timeout=300)


def require(condition, what):
    if not condition:
        sys.exit(f"planner_test: {what}")


def check_errors(results, folder):
    found = folder / results.name
    ended = bench_plan("--held-out", "--again", str(results), "--json", str(found))
    require(ended.returncode == 0, f"{results.name}: {ended.stderr}")
    means = json.loads(found.read_text())["mean_errors"]
    for group, mean in means.items():
        goals = {"step": STEP[group.removesuffix(", held out")], "memory": MEMORY}
        if group.startswith("hosts"):
            goals["link_bytes"] = LINK_BYTES
        for what, goal in goals.items():
            require(mean[what] <= goal, f"{results.name}: {group}: {what}: off by {mean[what]:.1%}")
        print(f"{results.name}: {group}: {mean}")
    return set(means)


def check_bad_input(results, folder):
    other = folder / "other.json"
    for text in ("{", "[]", "{}", '{"rounds": [{}]}', '{"rounds": [{"profiles": {}, "cases": [{"name": "no such"}]}]}'):
        other.write_text(text)
        ended = bench_plan("--again", str(other))
        require(ended.returncode == 1 and str(other) in ended.stderr, f"{text}: {ended.returncode} {ended.stderr}")
    ended = bench_plan("--again", str(results), "--only", "no such case")
    require(ended.returncode == 2 and "no case is left" in ended.stderr, f"--only: {ended.stderr}")


with tempfile.TemporaryDirectory() as temporary:
    all_results = sorted(RESULTS.glob("plan*.json"))
    require(all_results, f"no results in {RESULTS}")
    groups = set().union(*(check_errors(each, pathlib.Path(temporary)) for each in all_results))
    without = {group + end for group in STEP for end in ("", ", held out")} - groups
    require(not without, f"no cases of {without} in {RESULTS}")
    check_bad_input(all_results[0], pathlib.Path(temporary))
