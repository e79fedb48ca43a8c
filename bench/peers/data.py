# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DataLoader on the data of `lockstep bench data`; prints one JSON line with samples per second of each epoch.

    data.py fashion WORKERS EPOCHS
    data.py jpeg FOLDER WORKERS EPOCHS

fashion: a TensorDataset of images that were normalised beforehand, the fastest that a user gets without a sampler of batches
of their own. jpeg: torchvision's ImageFolder, random-resized crop to 224, flip, normalise.
"""
import json
import sys
import time

import torch
from fashion_mnist import training_set
from torch.utils.data import DataLoader, TensorDataset


def fashion():
    images, labels = map(torch.from_numpy, training_set())
    return TensorDataset(images.unsqueeze(1), labels)


def jpeg(folder):
    from torchvision import datasets, transforms
    return datasets.ImageFolder(folder, transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]))


def run_epoch(loader):
    start, samples = time.perf_counter(), 0
    for data, _ in loader:
        samples += len(data)
    return samples / (time.perf_counter() - start)


def main():
    torch.set_num_threads(1)
    kind, *names, workers, epochs = sys.argv[1:]
    dataset = {"fashion": fashion, "jpeg": jpeg}[kind](*names)
    loader = DataLoader(dataset, batch_size=256 if kind == "fashion" else 32, shuffle=True, num_workers=int(workers),
                        persistent_workers=int(workers) > 0)
    run_epoch(loader)
    print(json.dumps({"rates": [run_epoch(loader) for _ in range(int(epochs))]}))


if __name__ == "__main__":
    main()
