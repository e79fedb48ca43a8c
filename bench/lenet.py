#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An epoch of LeNet on Fashion-MNIST: lockstep beside PyTorch's DDP over Gloo, 2 ranks of one thread, in turn.

    bench/lenet.py [ROUNDS]

Then where the step's time goes, beside what the same arithmetic takes at the speed of sgemm.
"""
from common import machine, median, require_peers, rounds, run_peer, save, spread, take_turns, train

RANKS, BATCH, STEPS = 2, 256, 235
# Multiply-adds of a forward pass per image, times 2: conv1, conv2, fc1, fc2. Backward computes as much for the weights,
# and again for the inputs of all but conv1.
FORWARD = [2 * 26 * 26 * 20 * 9, 2 * 9 * 9 * 50 * 500, 2 * 800 * 128, 2 * 128 * 10]
FLOP = {"forward": sum(FORWARD), "backward": 2 * sum(FORWARD) - FORWARD[0]}


def lockstep():
    events = train("--ranks", RANKS, "--threads", 1, "--epochs", 1, "--lr", 0.1, "--nesterov", "--layout", "auto")
    epoch = next(event for event in events if event["event"] == "epoch")
    return {**events[-1], "seconds": epoch["seconds"]}


RUNS = {
    "lockstep": lockstep,
    "PyTorch DDP": lambda: run_peer("pytorch_ddp.py", RANKS, "contiguous"),
    "PyTorch DDP, channels_last": lambda: run_peer("pytorch_ddp.py", RANKS, "channels_last"),
}


def print_phases(runs, gflops):
    print(f"\na step of lockstep in ms, medians of {len(runs)} runs; sgemm reaches {gflops:.1f} GFLOP/s per core beside it")
    table = {}
    for phase in ("data", "forward", "backward", "exchange", "update"):
        table[phase] = median([run[f"{phase}_seconds"] for run in runs]) / STEPS * 1e3
    table["the rest"] = median([run["seconds"] for run in runs]) / STEPS * 1e3 - sum(table.values())
    for phase, ms in table.items():
        ideal = FLOP.get(phase, 0) * BATCH / RANKS / gflops / 1e6
        share = f"   {ideal:6.2f} at the speed of sgemm: {ideal / ms:4.0%}" if ideal else ""
        print(f"  {phase:18} {ms:7.2f}{share}")
    total = sum(table.values())
    ideal = sum(FLOP.values()) * BATCH / RANKS / gflops / 1e6
    print(f"  {'step':18} {total:7.2f}   {ideal:6.2f} at the speed of sgemm: {ideal / total:4.0%}")
    return table


def main():
    count = rounds(5)
    require_peers("pytorch", "pytorch")
    print(f"LeNet, Fashion-MNIST, batch {BATCH}, {RANKS} ranks x 1 thread; {count} rounds in turn\n{machine()}\n")
    runs = take_turns(count, RUNS)
    gflops = run_peer("sgemm.py", RANKS)["gflops_per_core"]
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    base = median(seconds["lockstep"])
    print(f"{'':28} s per epoch   min to max      time / lockstep's")
    for name, values in seconds.items():
        print(f"{name:28} {median(values):8.2f}      {spread(values):16}{median(values) / base:6.2f}")
    phases = print_phases(runs["lockstep"], gflops)
    save("lenet", {"rounds": count, "seconds_per_epoch": seconds, "step_ms": phases, "sgemm_gflops_per_core": gflops})


if __name__ == "__main__":
    main()
