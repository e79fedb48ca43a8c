# SPDX-License-Identifier: Apache-2.0
"""MXNet with a KVStore on Fashion-MNIST: `local` and `device` with several devices in one process, `dist_sync` and
`dist_async` with a server and two workers, whose roles MXNet takes from the environment (DMLC_ROLE).

    mxnet_kvstore.py KIND DEVICES MODEL BATCH STEPS

MODEL: lenet | mlp-wide. BATCH: global. Prints, in the first worker, seconds per step as JSON: STEPS of them after ten that warm up.
"""
import json
import os
import sys
import time

import mxnet as mx
import numpy as np
from fashion_mnist import training_set
from mxnet import autograd, gluon, nd

WARM_UP = 10


def make_net(model):
    net = gluon.nn.HybridSequential()
    if model == "lenet":
        net.add(gluon.nn.Conv2D(20, 3, activation="relu"), gluon.nn.AvgPool2D(2, 2),
                gluon.nn.Conv2D(50, 5, activation="relu"), gluon.nn.AvgPool2D(2, 2),
                gluon.nn.Dense(128, activation="relu"), gluon.nn.Dense(10))
    else:
        net.add(gluon.nn.Dense(4096, activation="relu"), gluon.nn.Dense(4096, activation="relu"), gluon.nn.Dense(10))
    return net


def main():
    kind, devices, model, batch, steps = sys.argv[1], *map(int, sys.argv[2:3]), sys.argv[3], *map(int, sys.argv[4:6])
    images, labels = training_set()
    images, labels = images[:, None], labels.astype(np.float32)
    contexts = [mx.cpu(i) for i in range(devices)]
    net = make_net(model)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net.hybridize(static_alloc=True, static_shape=True)
    store = mx.kv.create(kind)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.RandomState(1).permutation(len(labels))[store.rank::store.num_workers]
    mine = batch // store.num_workers

    def run(first, count):
        for step in range(first, first + count):
            part = order[step * mine % len(order):][:mine]
            data = gluon.utils.split_and_load(nd.array(images[part]), contexts, even_split=False)
            target = gluon.utils.split_and_load(nd.array(labels[part]), contexts, even_split=False)
            with autograd.record():
                losses = [loss_of(net(x), y) for x, y in zip(data, target)]
            for loss in losses:
                loss.backward()
            trainer.step(batch)
        nd.waitall()

    run(0, WARM_UP)
    start = time.perf_counter()
    run(WARM_UP, steps)
    if store.rank == 0:
        print(json.dumps({"seconds_per_step": (time.perf_counter() - start) / steps}), flush=True)


if __name__ == "__main__":
    if os.environ.get("DMLC_ROLE", "worker") == "worker":
        main()
