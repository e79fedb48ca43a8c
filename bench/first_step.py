# SPDX-License-Identifier: Apache-2.0
"""LeNet's first step on Fashion-MNIST in Python, which bench/what_waits.py measures.

    first_step.py torch | lockstep

Under a launcher each rank has a part of the batch: with PyTorch's DistributedDataParallel over Gloo, or with lockstep's.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from fashion_mnist import read_idx
from step import lenet

BATCH = 256


def main():
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    images, labels = read_idx("train-images-idx3-ubyte"), read_idx("train-labels-idx1-ubyte")
    images, labels = (torch.from_numpy(whole[rank:BATCH:ranks].copy()) for whole in (images, labels))
    images = (images.unsqueeze(1).float() / 255 - 0.2860) / 0.3530
    torch.manual_seed(1)
    model = lenet()
    if sys.argv[1] == "lockstep":
        import lockstep

        optimizer = lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model = lockstep.DistributedDataParallel(model, optimizer)
    else:
        if ranks > 1:
            dist.init_process_group("gloo")
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(images), labels.long()).backward()
    optimizer.step()
    if rank == 0:
        print("the first step is done", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
