#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a Python program of two ranks takes after `import torch`: to its first all-reduce, and to the end of its first training step.

    python3 bench/python_startup.py [ROUNDS]

Runs in an environment with lockstep's wheel. PyTorch over Gloo in turn.
"""
import json
import os
import subprocess
import sys
import tempfile
import time

from common import machine, median, rounds, save, spread, take_turns

RANKS = 2


def run_rank(system, rank, store):
    """Prints the times on the machine's clock: torch is imported, the all-reduce is done, the step is done."""
    import torch

    times = [time.perf_counter()]
    if system == "lockstep":
        import lockstep
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(system, init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    dist.all_reduce(torch.ones(1024))
    times.append(time.perf_counter())
    model = torch.nn.Linear(256, 16)
    if system == "lockstep":
        optimizer = lockstep.SGD(model.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(model, optimizer)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def seconds_of(system):
    """To the first all-reduce, and to the end of the first step; both ranks', since both have imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank", system]
        started = [subprocess.Popen([*command, str(rank), folder + "/store"], stdout=subprocess.PIPE, text=True,
                                    env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in range(RANKS)]
        times = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in started]
    imported, *done = map(max, zip(*times))
    return [end - imported for end in done]


def main():
    found = take_turns(rounds(7), {system: lambda system=system: seconds_of(system) for system in ("lockstep", "gloo")})
    print(f"seconds after `import torch`, {RANKS} ranks\n{machine()}\n")
    for system, runs in found.items():
        for what, values in zip(("first all-reduce", "first step"), zip(*runs)):
            print(f"{system:9} {what:17} {median(values):6.2f}   ({spread(values)})")
    save("python_startup", {"seconds": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*sys.argv[2:])
    else:
        main()
