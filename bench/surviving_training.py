# SPDX-License-Identifier: Apache-2.0
"""LeNet with lockstep in Python, which goes on when a rank is lost: bench/recovery.py kills one.

    surviving_training.py STEPS PROGRESS

Rank 0 writes a line with its number after each step to PROGRESS.
"""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lockstep

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from step import lenet


@lockstep.recover
def main():
    steps, progress = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(1)
    dist.init_process_group("lockstep")
    loader = lockstep.DataLoader(lockstep.data.FashionMNIST(), global_batch_size=256, shuffle=True, seed=1)
    net = lenet()
    optimizer = lockstep.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    net = lockstep.DistributedDataParallel(net, optimizer)
    recovery = lockstep.Recovery(net, optimizer, loader)
    with open(progress, "a", buffering=1) as lines:
        for epoch in recovery.epochs(steps // len(loader)):
            for images, labels in recovery.batches():
                optimizer.zero_grad()
                F.cross_entropy(net(images), labels).backward()
                optimizer.step()
                if dist.get_rank() == 0:
                    print(recovery.steps, file=lines)


if __name__ == "__main__":
    main()
