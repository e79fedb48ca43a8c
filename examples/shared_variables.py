# SPDX-License-Identifier: Apache-2.0
"""Towers that share their variables: python examples/shared_variables.py (examples/shared_variables.cc is the same in C++)"""

import torch
from torch import nn

import lockstep
from lockstep import towers


def loss_of(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def train(count):  # the variables exist once; each tower has gradients of its own, and one Adam applies their sum
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    images = torch.randn(400, 20)
    batch = images, (images @ torch.randn(20, 5)).argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001 * (len(images) / 100) ** 0.5)  # 0.001 suits a batch of 100
    devices = lockstep.Devices(count)
    nets = towers.share_variables(devices, net)
    means = []
    for _ in range(200):
        shards = towers.split_and_load(devices, batch)  # 134 + 133 + 133 samples for three towers
        losses = towers.losses(devices, loss_of, nets, shards)
        towers.backward(devices, losses, shards)
        towers.combine_gradients(nets)  # the synchronisation point: returns gradients and variables
        optimizer.step()
        means.append(sum(loss.item() * len(shard[1]) for loss, shard in zip(losses, shards)) / len(images))
    return net, means


if __name__ == "__main__":
    (one, _), (three, losses) = train(1), train(3)
    print(f"three towers: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0] / 2
    for ours, alone in zip(three.parameters(), one.parameters()):
        torch.testing.assert_close(ours, alone, rtol=1e-3, atol=1e-3)
