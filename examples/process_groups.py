# SPDX-License-Identifier: Apache-2.0
"""Four processes without a master, shards that never overlap, buckets around a ring, and sub-groups:
lockstep run --nproc-per-node 4 -- python examples/process_groups.py      (examples/process_groups.cc is the same in C++)"""

import torch
from torch import nn
from torch.utils.data import BatchSampler

import lockstep


def main():
    world = lockstep.World.from_env()
    torch.manual_seed(1)  # the same data on every rank; the sampler says which samples are this rank's
    inputs = torch.randn(1000, 16)
    targets = (inputs @ torch.randn(16, 1)).tanh()
    torch.manual_seed(2 + world.rank)  # other parameters on every rank, until rank 0's are broadcast
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = lockstep.DistributedDataParallel(net, algorithm="ring")
    optimizer = lockstep.SGD(model.parameters(), lr=0.2)
    sampler = lockstep.Sampler(1000, seed=1)
    times_seen, losses = torch.zeros(1000), []
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for mine in BatchSampler(sampler, batch_size=64 // world.size, drop_last=False):
            loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times_seen[mine] += 1
            losses.append(loss.detach())
    first, last = world.all_reduce(torch.stack([losses[0], losses[-1]]), "mean").tolist()
    assert last < first / 3, "the loss did not fall"
    assert world.all_reduce(times_seen).eq(12).all(), "the shards of an epoch overlap, or leave samples out"
    weights = net[0].weight.detach().clone()
    assert torch.equal(world.all_gather(weights), weights.expand(world.size, -1, -1)), "the replicas differ"
    total = world.split(world.rank // 2).all_reduce(torch.tensor([world.rank]))  # one call makes {0, 1} and {2, 3}
    assert total.item() == (1 if world.rank < 2 else 5), "the sum over half of the ranks is wrong"
    assert (world.group([0, 2]) is not None) == (world.rank % 2 == 0), "a rank is in a group that does not name it"
    if world.rank == 0:
        print(f"{world.size} processes: loss {first:g} -> {last:g}")


if __name__ == "__main__":
    main()
