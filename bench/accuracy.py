#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Validation accuracy of LeNet on Fashion-MNIST after the 5 epochs of `make demo`, for three seeds."""
from common import machine, median, save, train

OPTIONS = ["--ranks", "auto", "--epochs", "5", "--batch-size", "256", "--lr", "0.1", "--momentum", "0.9", "--nesterov",
           "--schedule", "cosine", "--warmup-epochs", "0.5"]
SEEDS = (1, 2, 3)


def main():
    print(f"LeNet, Fashion-MNIST, 5 epochs\n{machine()}\n")
    found = {seed: train(*OPTIONS, "--seed", seed)[-1]["val_accuracy"] for seed in SEEDS}
    for seed, value in found.items():
        print(f"seed {seed}: {value:.4f}")
    print(f"median: {median(found.values()):.4f}")
    save("accuracy", {"val_accuracy": found, "median": median(found.values())})


if __name__ == "__main__":
    main()
