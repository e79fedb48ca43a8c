# SPDX-License-Identifier: Apache-2.0
"""A two-level parameter server in its kinds: lockstep run --servers 1 --nproc-per-node 3 -- python examples/parameter_server.py
(examples/parameter_server.cc is the same in C++)"""

import torch

import lockstep

BATCH, STEPS, LEARNING_RATE = 60, 40, 0.1  # the batch is that of all workers and devices together
TRUTH = torch.arange(1, 9, dtype=torch.float64)


def gradient_of(weight, first=0, end=BATCH):  # of the mean loss of these samples, for a linear model
    inputs = torch.randn(BATCH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors = inputs @ weight - inputs @ TRUTH
    return inputs[first:end].T @ errors[first:end] * 2 / (end - first)


def train(store, devices, store_updates):  # pulls weights, or the gradients' sum where devices update
    weights = [torch.zeros_like(TRUTH) for _ in range(devices)]
    store.init("weight", weights[0])
    if store_updates:
        store.set_optimizer(lockstep.SGD, lr=LEARNING_RATE)
    part = BATCH // store.num_workers // devices
    firsts = range(store.rank * devices * part, BATCH, part)
    for _ in range(STEPS):
        gradients = [gradient_of(weight, first, first + part) / devices for weight, first in zip(weights, firsts)]
        store.push("weight", gradients, samples=part * devices)
        store.pull("weight", out=weights if store_updates else gradients)
        if not store_updates:
            weights = [weight - LEARNING_RATE * gradient for weight, gradient in zip(weights, gradients)]
    return weights[-1]


def run(kind, devices=1, store_updates=True):
    store = lockstep.KVStore.create(kind, devices=devices)
    if store is None:  # this rank was the server, until both workers had closed their stores
        return
    with store:
        weight, alone = train(store, devices, store_updates), torch.zeros_like(TRUTH)
    for _ in range(STEPS):
        alone -= LEARNING_RATE * gradient_of(alone)
    difference = (weight - alone).abs().max().item()
    print(f"{kind}: differs from one device by {difference:g}", flush=True)
    assert (weight - TRUTH).norm() < TRUTH.norm() / 2, "it has not learned"
    assert difference < 1e-9 or kind == "dist_async", "only dist_async applies gradients of older weights"


if __name__ == "__main__":
    run("dist_sync")
    run("dist_async")
    if lockstep.World.from_env().rank == 0:
        run("local_update_cpu", devices=2)
        run("local_allreduce_cpu", devices=2, store_updates=False)
        run("local_allreduce_device", devices=2, store_updates=False)
