#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that each pattern of a filter of GoogleTest's matches a test: one that was renamed would be left out without a word.

    filter_test.py [BINARY FILTER]...
"""

import fnmatch
import subprocess
import sys


def tests_of(binary):
    """Their full names. The list has "Suite." and, below it, "  test  # its parameter"."""
    suite, names = "", []
    for line in subprocess.run([binary, "--gtest_list_tests"], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith(" "):
            names.append(suite + name)
        elif name.endswith("."):
            suite = name
    return names


def main():
    unmatched = []
    for binary, patterns in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        names = tests_of(binary)
        unmatched += [f"{binary}: no test matches {pattern}" for pattern in patterns.replace("-", ":").split(":")
                      if pattern and not fnmatch.filter(names, pattern)]
    sys.exit("\n".join(unmatched) or 0)


if __name__ == "__main__":
    main()
