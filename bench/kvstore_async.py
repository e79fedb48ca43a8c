#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Accuracy of LeNet on Fashion-MNIST with asynchronous workers, all options at their defaults: 5 epochs of seeds 1 to 10,
one epoch of seeds 11 to 20. Beside it `dist_sync`, and MXNet's dist_async (tools/setup.sh originals) with the same options.

    bench/kvstore_async.py [CASE...]        # such as dist_async-2, dist_bounded-4-slow, mxnet-2; none: all of them

The number is that of the workers; `slow`: the steps of one of them take three times as long, because it sleeps.
Each run is kept as it ends, in bench/results/kvstore_async.jsonl, and not repeated. Prints the table of all that are kept.
"""
import json
import sys

from common import BIN, LOCKSTEP, ROOT, machine, median, require_peers, run_mxnet, train

KEPT = ROOT / "bench/results/kvstore_async.jsonl"
RUNS = [(seed, 5) for seed in range(1, 11)] + [(seed, 1) for seed in range(11, 21)]  # seed, epochs
CASES = [f"{store}-{workers}{slow}" for slow in ("", "-slow") for store in ("dist_sync", "dist_async", "dist_bounded", "mxnet")
         for workers in (2, 4) if not (slow and store in ("dist_sync", "mxnet"))]
SAMPLES = 60_000  # of an epoch
GOAL = 0.75  # after one epoch


def accuracies(case, seed, epochs):
    """The validation accuracy after each epoch of one run."""
    store, workers, *slow = case.split("-")
    if store == "mxnet":
        return run_mxnet(int(workers), "mxnet_kvstore_accuracy.py", "dist_async", epochs, seed)
    options = ["--strategy", "kvstore", "--kvstore", store, "--seed", seed, "--epochs", epochs]
    if slow:
        command = [LOCKSTEP, "run", "--servers", "1", "--workers", workers, "--", BIN / "slow_lenet"]
        events = train(*options, command=command, SLOW_RANK="1")  # the first worker: rank 0 is the server
    else:
        events = train(*options, "--ranks", workers)
    ended = [event for event in events if event["event"] == "epoch"]
    if any(event["samples"] != SAMPLES for event in ended):
        sys.exit(f"bench: {case}, seed {seed}: a worker was lost, so this run does not count; start again")
    return [event["val_accuracy"] for event in ended]


def kept():
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def run(case, seed, epochs):
    if any((one["case"], one["seed"]) == (case, seed) for one in kept()):
        return
    result = {"case": case, "seed": seed, "val_accuracy": accuracies(case, seed, epochs), "machine": machine()}
    with KEPT.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(case, "seed", seed, *result["val_accuracy"], flush=True)


def print_table():
    print(f"\n| | runs | after 1 epoch: median | worst | above {GOAL} | runs | after 5 epochs: median | worst |")
    print("| --- " * 8 + "|")
    for case in CASES:
        reached = [one["val_accuracy"] for one in kept() if one["case"] == case]
        if not reached:
            continue
        cells = [f"`{case}`"]
        for after in (1, 5):
            values = [each[after - 1] for each in reached if len(each) >= after]
            cells += [str(len(values)), *(f"{of(values):.3f}" if values else "" for of in (median, min))]
            cells += [str(sum(value > GOAL for value in values))] if after == 1 else []
        print("|", " | ".join(cells), "|")


def main():
    chosen = sys.argv[1:] or CASES
    for case in chosen:
        if case not in CASES:
            sys.exit(f"bench: no case {case!r}; choose from {' '.join(CASES)}")
    if any("mxnet" in case for case in chosen):
        require_peers("originals", "mxnet")
    for case in chosen:
        for seed, epochs in RUNS:
            run(case, seed, epochs)
    print_table()


if __name__ == "__main__":
    main()
