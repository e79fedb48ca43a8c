# SPDX-License-Identifier: Apache-2.0
"""1 + N threads: this one prepares batches, N train a net each, and their weights are averaged: python examples/averaged_nets.py
(examples/averaged_nets.cc is the same in C++)"""

import copy

import torch
from torch import nn

import lockstep
from lockstep import towers

RATE = 0.2


def train(net, batch):  # a step of plain SGD; returns the loss before it
    loss = nn.functional.mse_loss(net(batch[0]), batch[1])
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= RATE * parameter.grad
    return loss.item()


def main():
    torch.manual_seed(1)
    truth, alone = torch.randn(10, 2), nn.Linear(10, 2)
    devices = lockstep.Devices(3)
    nets = [copy.deepcopy(alone) for _ in range(len(devices))]
    blocks = towers.flat_blocks(nets)  # one copy moves all weights of a net
    losses = [1.0]
    while max(losses) > 1e-4:
        inputs = torch.randn(60, 10)
        batch = inputs, inputs @ truth
        shards = towers.split_and_load(devices, batch)
        losses = devices.run(lambda device: train(nets[device], shards[device]))
        towers.average(devices, blocks)  # returns when every net has its copy
        train(alone, batch)
        for net in nets:  # what one net learns from the whole batch
            torch.testing.assert_close(net.weight, alone.weight, rtol=1e-3, atol=1e-4)
    print(f"loss {max(losses):.6f}")


if __name__ == "__main__":
    main()
