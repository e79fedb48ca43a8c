#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the cases of the last ctest run of each build folder: "N passed, N failed" is the last line.

    tests/summary.py BUILD...

An entry of ctest is a shard of a test binary with many cases, or a script, which counts as one case. A shard that died
counts as one failed case, whatever it had passed before.
"""
import re
import sys
from pathlib import Path

ENTRY = re.compile(r"^\d+/\d+ Testing: ", re.MULTILINE)
PASSED = re.compile(r"^\[  PASSED  \] (\d+) test", re.MULTILINE)
FAILED = re.compile(r"^\[  FAILED  \] (\d+) tests?, listed below", re.MULTILINE)
SKIPPED = re.compile(r"^\[  SKIPPED \] (\d+) tests?, listed below", re.MULTILINE)


def last(pattern, text):
    found = pattern.findall(text)
    return int(found[-1]) if found else 0


def count(entry):
    """(passed, failed, skipped) cases of one entry of LastTest.log."""
    well = re.search(r"^Test Passed\.$", entry, re.MULTILINE) is not None
    passed, failed, skipped = (last(pattern, entry) for pattern in (PASSED, FAILED, SKIPPED))
    if well and not PASSED.search(entry):
        return 1, 0, 0
    return passed, failed if well else max(failed, 1), skipped


def main():
    totals = [0, 0, 0]
    for build in sys.argv[1:]:
        log = Path(build) / "Testing/Temporary/LastTest.log"
        if log.exists():
            for entry in ENTRY.split(log.read_text(errors="replace"))[1:]:
                totals = [total + more for total, more in zip(totals, count(entry))]
    if totals[2]:
        print(f"{totals[2]} skipped")
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(1 if totals[1] or not totals[0] else 0)


if __name__ == "__main__":
    main()
