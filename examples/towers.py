# SPDX-License-Identifier: Apache-2.0
"""A LeNet from scratch, on two devices of one process: python examples/towers.py (examples/towers.cc is the same in C++)"""

import sys

import torch
from torch.nn import functional

import lockstep
from lockstep import towers

EPOCHS, BATCH, RATE = int(sys.argv[1]) if len(sys.argv) > 1 else 2, 256, 0.2


def lenet(weights, images):  # (samples, 1, 28, 28) -> (samples, 10)
    first, first_bias, second, second_bias, hidden, hidden_bias, output, output_bias = weights
    small = functional.avg_pool2d(functional.conv2d(images, first, first_bias).relu(), 2)
    smaller = functional.avg_pool2d(functional.conv2d(small, second, second_bias).relu(), 2)
    return functional.linear(functional.linear(smaller.flatten(1), hidden, hidden_bias).relu(), output, output_bias)


def loss_of(weights, batch):
    images, labels = batch
    return functional.cross_entropy(lenet(weights, images), labels)


def main():
    torch.manual_seed(1)
    shapes = (20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)
    scratch = [each for shape in shapes for each in (torch.empty(shape), torch.zeros(shape[0]))]
    for weight in scratch[::2]:
        torch.nn.init.kaiming_uniform_(weight, a=5**0.5)
    devices = lockstep.Devices(2)
    weights = towers.get_params(devices, scratch)  # a list of tensors on each device
    dataset = lockstep.data.FashionMNIST()
    held_out = next(iter(lockstep.DataLoader(lockstep.data.FashionMNIST(train=False), batch_size=10000)))
    loader = lockstep.DataLoader(dataset, batch_size=BATCH, shuffle=True, seed=1)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            shards = towers.split_and_load(devices, batch)
            losses = towers.losses(devices, loss_of, weights, shards)
            towers.backward(devices, losses, shards)
            towers.all_reduce_gradients(devices, weights, "central")  # sum on device 0, copy to all
            with torch.no_grad():
                devices.run(lambda device: [weight.sub_(weight.grad, alpha=RATE) for weight in weights[device]])
        with torch.no_grad():
            accuracy = (lenet(weights[0], held_out[0]).argmax(1) == held_out[1]).float().mean().item()
        print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    assert accuracy > 0.6


if __name__ == "__main__":
    main()
