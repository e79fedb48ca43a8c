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

# Mean errors of a step's time: of ranks that have a core each, and of crowded ones.
A_CORE_FOR_EACH, CROWDED = 0.10, 0.15
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
    require(means, f"{results.name}: no cases")
    for group, mean in means.items():
        if "sleep" not in group:  # the table of docs/planner.md has these; they have no goal of their own
            most = CROWDED if "more" in group else A_CORE_FOR_EACH
            require(mean["step"] <= most, f"{results.name}: {group}: steps are off by {mean['step']:.1%}")
            require(mean["memory"] <= MEMORY, f"{results.name}: {group}: memory is off by {mean['memory']:.1%}")
        bytes_off = mean.get("link_bytes", 0)
        require(bytes_off <= LINK_BYTES, f"{results.name}: {group}: bytes are off by {bytes_off:.1%}")
        print(f"{results.name}: {group}: {mean}")


def check_bad_input(results, folder):
    other = folder / "other.json"
    for text in ("{", "[]", "{}", '{"rounds": [{}]}', '{"rounds": [{"profiles": {}, "cases": [{"name": "no such"}]}]}'):
        other.write_text(text)
        ended = bench_plan("--again", str(other))
        require(ended.returncode == 1 and str(other) in ended.stderr, f"{text}: {ended.returncode} {ended.stderr}")
    ended = bench_plan("--again", str(results), "--only", "no such case")
    require(ended.returncode == 2 and "no case is left" in ended.stderr, f"--only: {ended.stderr}")
    ended = bench_plan("--sleeping")
    require(ended.returncode == 2 and "--hosts" in ended.stderr, f"--sleeping: {ended.stderr}")


with tempfile.TemporaryDirectory() as temporary:
    all_results = sorted(RESULTS.glob("plan*.json"))
    require(all_results, f"no results in {RESULTS}")
    for each in all_results:
        check_errors(each, pathlib.Path(temporary))
    check_bad_input(all_results[0], pathlib.Path(temporary))
