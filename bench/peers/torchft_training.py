# SPDX-License-Identifier: Apache-2.0
"""LeNet with torchft: a replica group of one rank. Each gradient is reduced by itself: torchft 0.2.0's DistributedDataParallel
ends the group that is left with an AssertionError when the other is lost.

    torchft_training.py STEPS PROGRESS GROUP

GROUP: its number; of two. Group 0 writes a line with its number after each committed step to PROGRESS.
TORCHFT_LIGHTHOUSE says where the others are found.
"""
import sys
from datetime import timedelta

import torch
import torch.nn.functional as F
from fashion_mnist import training_set
from step import lenet
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

BATCH, GROUPS = 256, 2
TIMEOUT = timedelta(seconds=60)  # torchft's default


def main():
    steps, progress, group = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    images, labels = map(torch.from_numpy, training_set())
    images = images.unsqueeze(1)
    torch.manual_seed(1)
    net = lenet()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def load(state):
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=1, load_state_dict=load,
                      state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
                      replica_id=f"group_{group}_", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
                      timeout=TIMEOUT)
    optimizer = Optimizer(manager, inner)
    with open(progress, "a", buffering=1) as lines:
        while manager.current_step() < steps:
            step = manager.current_step()
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step // (len(images) // BATCH)))
            begin = step % (len(images) // BATCH) * BATCH
            part = order[begin : begin + BATCH].tensor_split(GROUPS)[group]
            optimizer.zero_grad()
            F.cross_entropy(net(images[part]), labels[part]).backward()
            for work in [manager.allreduce(parameter.grad) for parameter in net.parameters()]:
                work.wait()
            optimizer.step()
            if group == 0 and manager.current_step() > step:
                print(step, file=lines)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
