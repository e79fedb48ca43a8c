#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the cases in logs of ctest: "N passed, N failed" is the last line. Skipped cases are named above it.

    tests/summary.py LOG...

An entry of ctest is a shard of a test binary, a module of Python tests, or a script, which counts as one case. An entry that
died counts as one failed case, whatever it had passed before. A missing log is a failure.
"""
import re
import sys
from pathlib import Path

ENTRY = re.compile(r"^\d+/\d+ Testing: ", re.MULTILINE)
# GoogleTest's and unittest's last lines: "[  PASSED  ] 7 tests." and "Ran 7 tests in 1.2s", "FAILED (failures=1, skipped=2)".
PASSED = re.compile(r"^\[  PASSED  \] (\d+) test", re.MULTILINE)
FAILED = re.compile(r"^\[  FAILED  \] (\d+) tests?, listed below", re.MULTILINE)
RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
NOT_RUN_WELL = re.compile(r"^(?:FAILED|OK) \((.*)\)$", re.MULTILINE)
SKIPPED = re.compile(r"^(?:\[  SKIPPED \] (\S+) \(|SKIPPED: (.*)$|(.*) \.\.\. skipped )", re.MULTILINE)


def last(pattern, text):
    """The sum of the numbers in what the pattern finds last."""
    found = pattern.findall(text)
    return sum(map(int, re.findall(r"\d+", found[-1]))) if found else 0


def count(entry):
    """(passed, failed) cases of an entry, and the names of those that it skipped."""
    well = re.search(r"^Test Passed\.$", entry, re.MULTILINE) is not None
    skipped = sorted({next(filter(None, names)) for names in SKIPPED.findall(entry)})
    passed, failed = last(PASSED, entry), last(FAILED, entry)
    if RAN.search(entry):
        passed, failed = last(RAN, entry) - last(NOT_RUN_WELL, entry), last(NOT_RUN_WELL, entry) - len(skipped)
    elif well and not PASSED.search(entry):
        passed = 1
    return passed, 0 if well else max(failed, 1), skipped


def main():
    passed, failed, skipped = 0, 0, []
    for log in map(Path, sys.argv[1:]):
        if not log.exists():
            print(f"{log} is missing")
            failed += 1
            continue
        for entry in ENTRY.split(log.read_text(errors="replace"))[1:]:
            more, worse, left_out = count(entry)
            passed, failed = passed + more, failed + worse
            skipped += left_out
    for name in skipped:
        print(f"skipped: {name}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
