# SPDX-License-Identifier: Apache-2.0
"""LeNet on Fashion-MNIST with a KVStore of MXNet and the defaults of `lockstep train`: batch 256 over all workers, SGD with
learning rate 0.05 and momentum 0.9, the same split of each batch and the same normalisation.

    mxnet_kvstore_accuracy.py KIND EPOCHS SEED

Prints, in the first worker, the validation accuracy after each epoch as a JSON list. bench/common.py starts the roles.
"""
import json
import os
import sys

import mxnet as mx
import numpy as np
from fashion_mnist import test_set, training_set
from mxnet import autograd, gluon, nd
from mxnet_kvstore import make_net

BATCH = 256


def accuracy(net, images, labels):
    outputs = [net(nd.array(images[i:i + 1000])).asnumpy() for i in range(0, len(images), 1000)]
    return float((np.concatenate(outputs).argmax(1) == labels).mean())


def main():
    kind, epochs, seed = sys.argv[1], *map(int, sys.argv[2:4])
    images, labels = training_set()
    images, labels = images[:, None], labels.astype(np.float32)
    test_images, test_labels = test_set()
    mx.random.seed(seed)
    net = make_net("lenet")
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    store = mx.kv.create(kind)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    reached = []
    for epoch in range(epochs):
        order = np.random.RandomState([seed, epoch]).permutation(len(labels))
        for first in range(0, len(order), BATCH):
            batch = order[first:first + BATCH]
            part = np.array_split(batch, store.num_workers)[store.rank]
            with autograd.record():
                loss = loss_of(net(nd.array(images[part])), nd.array(labels[part]))
            loss.backward()
            trainer.step(BATCH)  # the same divisor for the last, smaller batch: the server cannot change it
        nd.waitall()
        if store.rank == 0:
            reached.append(accuracy(net, test_images[:, None], test_labels))
    if store.rank == 0:
        print(json.dumps(reached), flush=True)


if __name__ == "__main__":
    if os.environ.get("DMLC_ROLE", "worker") == "worker":
        main()
