# SPDX-License-Identifier: Apache-2.0
"""LeNet with PyTorch's DistributedDataParallel under torchrun, which restarts all ranks from the last checkpoint.

    elastic_training.py STEPS PROGRESS CHECKPOINT EVERY

Rank 0 writes a line with its number after each step to PROGRESS, and a checkpoint after every EVERY steps.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from fashion_mnist import training_set
from step import lenet

BATCH = 256


def main():
    steps, progress, checkpoint, every = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = map(torch.from_numpy, training_set())
    images = images.unsqueeze(1)
    torch.manual_seed(1)
    net = nn.parallel.DistributedDataParallel(lenet())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    first = 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    with open(progress, "a", buffering=1) as lines:
        for step in range(first, steps):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step // (len(images) // BATCH)))
            begin = step % (len(images) // BATCH) * BATCH
            part = order[begin : begin + BATCH].tensor_split(ranks)[rank]
            optimizer.zero_grad()
            F.cross_entropy(net(images[part]), labels[part]).backward()
            optimizer.step()
            if rank == 0:
                print(step, file=lines)
                if (step + 1) % every == 0:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, checkpoint + ".new")
                    os.replace(checkpoint + ".new", checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
