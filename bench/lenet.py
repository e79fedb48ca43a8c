#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An epoch of LeNet on Fashion-MNIST: lockstep beside PyTorch's DDP over Gloo, 2 ranks of one thread, in turn.

    bench/lenet.py [ROUNDS]
"""
from common import machine, median, require_peers, rounds, run_peer, save, spread, take_turns, train

RANKS, BATCH = 2, 256


def lockstep():
    events = train("--ranks", RANKS, "--threads", 1, "--epochs", 1, "--lr", 0.1, "--nesterov", "--layout", "auto")
    epoch = next(event for event in events if event["event"] == "epoch")
    return {**events[-1], "seconds": epoch["seconds"]}


RUNS = {
    "lockstep": lockstep,
    "PyTorch DDP": lambda: run_peer("pytorch_ddp.py", RANKS, "contiguous"),
    "PyTorch DDP, channels_last": lambda: run_peer("pytorch_ddp.py", RANKS, "channels_last"),
}


def main():
    count = rounds(5)
    require_peers("pytorch", "pytorch")
    print(f"LeNet, Fashion-MNIST, batch {BATCH}, {RANKS} ranks x 1 thread; {count} rounds in turn\n{machine()}\n")
    runs = take_turns(count, RUNS)
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    base = median(seconds["lockstep"])
    print(f"{'':28} s per epoch   min to max      time / lockstep's")
    for name, values in seconds.items():
        print(f"{name:28} {median(values):8.2f}      {spread(values):16}{median(values) / base:6.2f}")
    save("lenet", {"rounds": count, "seconds_per_epoch": seconds})


if __name__ == "__main__":
    main()
