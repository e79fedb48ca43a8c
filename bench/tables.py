#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small tables and Fashion-MNIST: `lockstep train` and `lockstep eval` beside what a user of scikit-learn or PyTorch would write.

    bench/tables.py [NAME...] [--rounds 3] [--lockstep lockstep] [--save]

Needs scikit-learn and pandas, for Fashion-MNIST torchvision and Debian's dataset-fashion-mnist. Tables: all get the same four fifths for training, of which they hold out a fifth to stop early, and the same last fifth
for the figure: accuracy, or R2 for diabetes. Two hidden layers of 512. Fashion-MNIST: LeNet, five epochs, accuracy of the test set. Each has a
process of its own, in turn, with all cores. Seconds are those of everything that a user waits for, from the start of Python or of the command.
Lines are those that a user types.
"""

import argparse
import gzip
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import common

SKLEARN = """
import pandas, sys
from sklearn.neural_network import {model}
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
train, test = pandas.read_csv("train.csv"), pandas.read_csv("test.csv")
net = {model}(hidden_layer_sizes=(512, 512), early_stopping=True, validation_fraction=0.2, random_state=1)
model = make_pipeline(StandardScaler(), net).fit(train.drop(columns="target"), train["target"])
print(model.score(test.drop(columns="target"), test["target"]))
"""

PYTORCH = """
import copy, pandas, torch
from torch import nn
train, test = pandas.read_csv("train.csv"), pandas.read_csv("test.csv")
names = None if pandas.api.types.is_numeric_dtype(train["target"]) else sorted(train["target"].unique())
def tensors(table):
    x = torch.tensor(table.drop(columns="target").values, dtype=torch.float32)
    y = table["target"].map(names.index).values if names else table["target"].values
    return x, torch.tensor(y, dtype=torch.int64 if names else torch.float32)
torch.manual_seed(1)
(x, y), (test_x, test_y) = tensors(train), tensors(test)
order = torch.randperm(len(x))
x, y = x[order], y[order]
held_out = len(x) // 5
mean, deviation = x[:-held_out].mean(0), x[:-held_out].std(0)
x, test_x = [(each - mean) / deviation.where(deviation > 0, 1) for each in (x, test_x)]
model = nn.Sequential(nn.Linear(x.shape[1], 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, len(names) if names else 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
loss_of = nn.functional.cross_entropy if names else lambda output, target: nn.functional.mse_loss(output.flatten(), target)
best, best_loss, waited = None, float("inf"), 0
while waited < 10:
    for part in torch.randperm(len(x) - held_out).split(32):
        loss_of(model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model(x[-held_out:]), y[-held_out:]).item()
    waited += 1
    if loss < best_loss:
        best, best_loss, waited = copy.deepcopy(model.state_dict()), loss, 0
model.load_state_dict(best)
with torch.no_grad():
    output = model(test_x)
if names:
    print((output.argmax(1) == test_y).float().mean().item())
else:
    print(1 - ((output.flatten() - test_y).square().sum() / (test_y - test_y.mean()).square().sum()).item())
"""

LOCKSTEP = """
lockstep train --model mlp --data csv:train.csv --optimizer adam --lr 0.001 --batch-size 32 --epochs 200 --patience 10 --keep-best --checkpoint-dir run
lockstep eval --checkpoint-dir run --data csv:test.csv
"""

PYTORCH_FASHION = """
import torch
from torch import nn
from torchvision.datasets import FashionMNIST
def tensors(train):
    data = FashionMNIST("data", train)
    images = (data.data[:, None] / 255 - 0.286) / 0.353
    return images.contiguous(memory_format=torch.channels_last), data.targets
torch.manual_seed(1)
(x, y), (test_x, test_y) = tensors(True), tensors(False)
model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
                      nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * -(-len(x) // 256))
for _ in range(5):
    for part in torch.randperm(len(x)).split(256):
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
with torch.no_grad():
    print((model(test_x).argmax(1) == test_y).float().mean().item())
"""

LOCKSTEP_FASHION = """
lockstep train --data fashion-mnist --ranks auto --lr 0.1 --schedule cosine
"""


def tables():
    from sklearn import datasets

    for name in ("digits", "wine", "breast_cancer", "diabetes"):
        found = getattr(datasets, f"load_{name}")(as_frame=True)
        table = found.data.copy()
        numbers = name == "diabetes"
        table["target"] = found.target / 100 if numbers else [f"c{each}" for each in found.target]
        yield name, table.sample(frac=1, random_state=1)


# As torchvision leaves it after its download.
def unpack_fashion_mnist(folder):
    folder.mkdir(parents=True)
    for packed in Path("/usr/share/datasets/fashion-mnist").glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.open(packed).read())


TABLE = {"lockstep": LOCKSTEP, "scikit-learn": SKLEARN, "PyTorch": PYTORCH}
FASHION = {"lockstep": LOCKSTEP_FASHION, "PyTorch": PYTORCH_FASHION}


def run(system, text, folder, lockstep):
    """Seconds, and the figure."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    shutil.rmtree(Path(folder) / "run", ignore_errors=True)
    command = ["bash", "-e", "-c", text.strip().replace("lockstep ", f"{lockstep} ")] if system == "lockstep" else [sys.executable, "-c", text]
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    seconds = time.monotonic() - start
    if system != "lockstep":
        return seconds, float(done.stdout.split()[-1])
    return seconds, float(re.findall(r"(?:^  (?:accuracy|r_squared) +|validation accuracy )(\S+)", done.stdout, re.MULTILINE)[-1])


def compare(name, texts, folder, arguments):
    runs = {system: partial(run, system, text, folder, arguments.lockstep) for system, text in texts.items()}
    result = {}
    for system, all_rounds in common.take_turns(arguments.rounds, runs).items():
        seconds, figures = zip(*all_rounds)
        lines = len(texts[system].strip().splitlines())
        result[system] = {"seconds": statistics.median(seconds), "range": [min(seconds), max(seconds)],
                          "figure": statistics.median(figures), "figures": figures, "lines": lines}
        print(f"{name:14} {system:13} {statistics.median(seconds):6.1f} s ({min(seconds):.1f}-{max(seconds):.1f})  "
              f"{statistics.median(figures):.3f}  {lines} lines", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of digits, wine, breast_cancer, diabetes, fashion_mnist; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lockstep", default="lockstep", help="the command [%(default)s]")
    parser.add_argument("--save", action="store_true", help="write bench/results/tables.json")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, table in tables():
            if arguments.names and name not in arguments.names:
                continue
            cut = len(table) * 4 // 5
            table[:cut].to_csv(Path(folder) / "train.csv", index=False)
            table[cut:].to_csv(Path(folder) / "test.csv", index=False)
            model = "MLPRegressor" if name == "diabetes" else "MLPClassifier"
            texts = TABLE | {"scikit-learn": SKLEARN.format(model=model)}
            results[name] = {"rows": len(table)} | compare(name, texts, folder, arguments)
        if not arguments.names or "fashion_mnist" in arguments.names:
            unpack_fashion_mnist(Path(folder) / "data/FashionMNIST/raw")
            results["fashion_mnist"] = compare("fashion_mnist", FASHION, folder, arguments)
    if arguments.save:
        common.save("tables", {"tables": results})


if __name__ == "__main__":
    main()
