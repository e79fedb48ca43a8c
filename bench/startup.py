#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From the command to the first all-reduce of two ranks: lockstep beside torchrun and Python, in turn.

    bench/startup.py [ROUNDS]
"""
import sys

from common import BIN, LOCKSTEP, ROOT, machine, median, python_with, require_peers, rounds, save, seconds_until, spread, take_turns

COMMANDS = {
    "lockstep run": ([LOCKSTEP, "run", "--nproc-per-node", "2", "--", BIN / "first_all_reduce"], None),
    "torchrun": ([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                  ROOT / "bench/peers/first_all_reduce.py"], python_with("pytorch", OMP_NUM_THREADS="1")),
}


def main():
    count = rounds(7)
    require_peers("pytorch", "pytorch")
    print(f"start to first all-reduce, 2 ranks; {count} rounds in turn\n{machine()}\n")
    seconds = take_turns(count, {name: lambda command=command: seconds_until("reduced 2", *command)
                                 for name, command in COMMANDS.items()})
    base = median(seconds["lockstep run"])
    for name, values in seconds.items():
        print(f"{name:16} {median(values):6.2f} s   ({spread(values)})   {median(values) / base:5.1f} x")
    save("startup", {"rounds": count, "seconds": seconds})


if __name__ == "__main__":
    main()
