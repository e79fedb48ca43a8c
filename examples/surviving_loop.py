# SPDX-License-Identifier: Apache-2.0
"""A training loop that survives the loss of its ranks:

    lockstep run --nproc-per-node 2 --max-restarts 3 -- python examples/surviving_loop.py

Kill one of them while it trains: the result is the same, bit for bit."""

import torch
import torch.distributed as dist
from torch import nn

import lockstep


@lockstep.recover
def main():
    torch.manual_seed(1)
    dist.init_process_group("lockstep")
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = lockstep.DataLoader(lockstep.data.FashionMNIST(), global_batch_size=256, shuffle=True, seed=1)
    optimizer = lockstep.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
    model = lockstep.DistributedDataParallel(model, optimizer)
    recovery = lockstep.Recovery(model, optimizer, loader, scheduler=scheduler)
    for epoch in recovery.epochs(2):
        for images, labels in recovery.batches():
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
