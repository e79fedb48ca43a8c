# SPDX-License-Identifier: Apache-2.0
"""lockstep.DataLoader beside PyTorch's DataLoader and torchvision, each in a process of its own, in turn; medians.

    python3 bench/python_data.py [ROUNDS]

Runs in an environment with lockstep's wheel, torchvision and Pillow. Images per second of an epoch, the first one left out.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, machine, median, rounds, save, spread, take_turns

PHOTOGRAPHS = 512
CROPS = "random-resized-crop:224,flip"
EPOCHS = {"fashion": 3, "jpeg": 1, "packed": 1}


def write_photographs(folder):
    """FOLDER/CLASS/N.jpg of 500 x 375 pixels: waves with noise, about as many bytes as a photograph has; as `lockstep bench data`."""
    import numpy as np
    from PIL import Image

    rows, columns, channels = np.ogrid[:375, :500, :3]
    for i in range(PHOTOGRAPHS):
        random = np.random.default_rng(i)
        down, across = random.uniform(0.01, 0.1, 2)
        waves = 110 + 80 * np.sin(down * rows + across * columns + channels) + random.integers(0, 24, (375, 500, 3))
        into = folder / ("even" if i % 2 == 0 else "odd")
        into.mkdir(parents=True, exist_ok=True)
        Image.fromarray(waves.astype(np.uint8)).save(into / f"{i}.jpg", quality=90)


def run_epoch(loader):
    start = time.perf_counter()
    samples = sum(len(images) for images, _ in loader)
    return samples / (time.perf_counter() - start)


def lockstep_rates(kind, workers, path):
    """What lockstep's side of a turn runs; prints one JSON line."""
    import torch

    import lockstep

    torch.set_num_threads(1)
    dataset = {
        "fashion": lambda: lockstep.data.FashionMNIST(),
        "jpeg": lambda: lockstep.data.ImageFolder(path, transform=CROPS),
        "packed": lambda: lockstep.data.PackedDataset(path, transform=CROPS),
    }[kind]()
    loader = lockstep.DataLoader(dataset, batch_size=256 if kind == "fashion" else 32, shuffle=True, num_workers=int(workers))
    run_epoch(loader)
    print(json.dumps({"rates": [run_epoch(loader) for _ in range(EPOCHS[kind])]}))


def rate(script, *arguments):
    """The median over the epochs that a process runs."""
    command = [sys.executable, ROOT / "bench" / script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return median(json.loads(done.stdout.strip().splitlines()[-1])["rates"])


def ours(kind, workers, path=""):
    return lambda: rate("python_data.py", "--lockstep", kind, workers, path)


def peer(kind, *arguments):
    return lambda: rate("peers/data.py", kind, *arguments, EPOCHS[kind])


def compare(title, count, runs):
    """Prints the median of each and how many times that of the first it is. The first ones are the peers."""
    found = take_turns(count, runs)
    best = max(median(values) for name, values in found.items() if "lockstep" not in name)
    print(f"\n{title}: images/s")
    for name, values in found.items():
        print(f"  {name:42} {median(values):12,.0f}  {median(values) / best:6.2f} x  ({spread([value / best for value in values])})")
    return found


def main():
    import lockstep

    count, cores = rounds(3), len(os.sched_getaffinity(0))
    print(machine())
    result = {}
    result["fashion"] = compare(
        "Fashion-MNIST, batches of 256, shuffled, normalised",
        count,
        {
            "DataLoader, in process": peer("fashion", 0),
            "DataLoader, 2 workers": peer("fashion", 2),
            "lockstep, in process": ours("fashion", 0),
            "lockstep, 1 worker": ours("fashion", 1),
        },
    )
    with tempfile.TemporaryDirectory() as name:
        folder, packed = Path(name) / "photographs", Path(name) / "packed"
        write_photographs(folder)
        lockstep.data.pack(lockstep.data.ImageFolder(folder, transform=CROPS), packed)
        result["jpeg"] = compare(
            f"{PHOTOGRAPHS} JPEG of 500 x 375, random-resized crop to 224, flip, normalise, batches of 32, {cores} workers",
            count,
            {
                "torchvision and DataLoader, folder": peer("jpeg", folder, cores),
                "lockstep, folder": ours("jpeg", cores, folder),
                "lockstep, packed": ours("packed", cores, packed),
            },
        )
    save("python_data", result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--lockstep"]:
        lockstep_rates(*sys.argv[2:])
    else:
        main()
