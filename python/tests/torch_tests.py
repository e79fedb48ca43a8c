#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's own tests of torch.distributed (torch/testing/_internal/distributed/distributed_test.py) over a backend.

    python python/tests/torch_tests.py gloo
    python python/tests/torch_tests.py lockstep [--machines 011] [PATTERN]
    python python/tests/torch_tests.py both [--machines 011] [PATTERN]

Each rank of each test is a process, forked after torch was imported. For lockstep, the tests that ask whether the backend is
called "gloo" before they ask it anything are told that lockstep will do as well; nothing else in them is changed.
--machines: the machine that each rank counts as. Exit code 1 if a test fails. The skipped ones are counted by torch's reason.
both: runs the two beside each other. Exit code 1 if a test passes over Gloo alone, unless GLOO_ALONE says why.
"""

import argparse
import collections
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

import torch

LIMIT = 60  # seconds for a test
FEWEST = 90  # tests that Gloo passes when nothing is chosen; it passed 99

# Tests that pass over Gloo and can't pass over another backend.
GLOO_ALONE = {
    "test_ddp_logging_data_cpu": "c10d's logger calls every other backend \"custom\"",
}
if int(torch.__version__.split(".")[1]) < 15:
    for name in ("test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"):
        GLOO_ALONE[name] = "dist.monitored_barrier refuses every backend that is not called \"gloo\""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("gloo", "lockstep", "both"))
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--machines", default="")
    return parser.parse_args()


def prepare(options, folder):
    """The variables that the tests read when they are imported; stand-ins for what they import and do not use here."""
    for name in ("barrier", "init_dir", "test_dir"):
        os.mkdir(os.path.join(folder, name))
    os.environ.update(BACKEND=options.backend, WORLD_SIZE=str(options.ranks), TEMP_DIR=folder, MASTER_ADDR="127.0.0.1",
                      OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    expecttest = types.ModuleType("expecttest")
    expecttest.TestCase = type("TestCase", (unittest.TestCase,), {})
    sys.modules.setdefault("expecttest", expecttest)
    sys.modules.setdefault("torch.utils.cpp_extension", unittest.mock.MagicMock(__spec__=None))


def load(backend):
    """The module of the tests."""
    import torch.testing._internal.distributed as package
    from torch.testing._internal import common_distributed

    path = os.path.join(package.__path__[0], "distributed_test.py")
    with open(path) as file:
        text = file.read()
    if backend == "lockstep":
        import lockstep  # noqa: F401

        for feature in ("ddp", "subgroup"):
            common_distributed.DistTestCases.backend_feature[feature].add("lockstep")
        text = text.replace('BACKEND != "gloo"', 'BACKEND != "lockstep"')
        text = text.replace('BACKEND == "gloo"', 'BACKEND == "lockstep"')
        text = text.replace('available({"gloo"})', 'available({"lockstep"})')
    module = types.ModuleType("torch.testing._internal.distributed.distributed_test")
    module.__file__ = path
    sys.modules[module.__name__] = module
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def run_rank(case, rank, name, store, pipe, machines):
    if machines:
        os.environ["GROUP_RANK"] = machines[rank]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    case._run(rank, name, store, pipe)


def run_test(case, name, options, folder, skips):
    """"pass", "skip" or "FAIL", and what the ranks say about it, or torch's reason to skip it."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(options.ranks)]
    store = tempfile.mktemp(dir=folder)
    ranks = [context.Process(target=run_rank, args=(case, rank, name, store, pipes[rank][1], options.machines))
             for rank in range(options.ranks)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + LIMIT
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank in ranks if rank.is_alive()]
    for rank in late:
        rank.kill()
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    if all(code == 0 for code in codes):
        return "pass", ""
    if all(code == 0 or code in skips for code in codes):
        return "skip", next(skips[code] for code in codes if code)
    said = [f"rank {rank}: {str(pipe.recv())[-800:]}" for rank, (pipe, _) in enumerate(pipes) if pipe.poll()]
    return "FAIL", "\n".join([f"exit codes {codes}, {len(late)} ranks did not end", *said])


def verdicts(backend):
    """Starts this script for one backend, with the other arguments as they are."""
    command = [sys.executable, __file__, *(backend if word == "both" else word for word in sys.argv[1:])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def compare(pattern):
    running = {backend: verdicts(backend) for backend in ("gloo", "lockstep")}
    said = {backend: process.communicate()[0] for backend, process in running.items()}
    passed = {backend: set(re.findall(r"^pass (\w+)", text, re.MULTILINE)) for backend, text in said.items()}
    for backend, text in said.items():
        print(f"{backend}: {text.splitlines()[-1] if text else 'nothing'}")
    alone = passed["gloo"] - passed["lockstep"]
    for name in sorted(alone & GLOO_ALONE.keys()):
        print(f"over Gloo alone: {name}: {GLOO_ALONE[name]}")
    wrong = [f"{name} passes over Gloo, and not over lockstep" for name in sorted(alone - GLOO_ALONE.keys())]
    wrong += [f"{name} passes over lockstep: take it off the list GLOO_ALONE" for name in GLOO_ALONE if name in passed["lockstep"]]
    if not pattern and len(passed["gloo"]) < FEWEST:
        wrong.append(f"only {len(passed['gloo'])} tests pass over Gloo: most did not run")
    print(f"{len(passed['gloo'] & passed['lockstep'])} of the {len(passed['gloo'])} tests that pass over Gloo pass over lockstep")
    if wrong:
        print(said["lockstep"], *wrong, sep="\n")
    return 1 if wrong else 0


def main():
    options = arguments()
    if options.backend == "both":
        return compare(options.pattern)
    with tempfile.TemporaryDirectory() as folder:
        prepare(options, folder)
        tests = load(options.backend)
        case = type("Tests", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
        skips = {skip.exit_code: reason for reason, skip in tests.TEST_SKIPS.items()}
        counts, skipped = collections.Counter(), collections.Counter()
        for name in sorted(name for name in dir(case) if name.startswith("test_") and re.search(options.pattern, name)):
            tests.Barrier.init()
            verdict, said = run_test(case, name, options, folder, skips)
            counts[verdict] += 1
            if verdict == "skip":
                skipped[said] += 1
            else:
                print(verdict, name, said, flush=True)
    print(f"{dict(counts)}, skipped for {dict(skipped)}")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
