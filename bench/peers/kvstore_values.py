# SPDX-License-Identifier: Apache-2.0
"""A linear model by stochastic gradient descent with momentum, over a KVStore of MXNet or of lockstep: the same calls, the same data.

    kvstore_values.py mxnet|lockstep KIND

KIND: `local` with two devices, or `dist_sync` or `dist_async` with a server and two workers, which take turns with dist_async. Each
worker prints its weights after each pull as JSON.
"""

import json
import os
import sys

import numpy as np

LIBRARY, KIND = sys.argv[1:3]
STEPS, BATCH, RATE, MOMENTUM = 20, 12, 0.05, 0.9
DATA = np.random.RandomState(1)
INPUTS, TRUTH = DATA.randn(STEPS, BATCH, 5).astype("float32"), DATA.randn(5).astype("float32")


def gradient_of(weight, step, part):  # of the sum of the losses of a half of the batch
    inputs = INPUTS[step, part * BATCH // 2 : (part + 1) * BATCH // 2]
    return 2 * (inputs @ weight - inputs @ TRUTH) @ inputs


class OfMXNet:
    def __init__(self):
        import mxnet

        self.array, self.store = mxnet.nd.array, mxnet.kv.create(KIND)
        counted = BATCH // 2 if KIND == "dist_async" else BATCH  # samples of an update
        self.optimizer = mxnet.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM, rescale_grad=1 / counted)
        self.rank, self.barrier = self.store.rank, self.store._barrier

    def begin(self, zeros):
        self.store.init("weight", self.array(zeros))
        self.store.set_optimizer(self.optimizer)

    def push(self, sums):
        self.store.push("weight", [self.array(each) for each in sums])

    def pull(self):
        weight = self.array(np.zeros(5, "float32"))
        self.store.pull("weight", out=weight)
        return weight.asnumpy()


class OfLockstep:
    def __init__(self):
        import lockstep
        import torch

        self.array, self.optimizer, self.samples = torch.from_numpy, lockstep.SGD, BATCH // 2
        self.store = lockstep.KVStore.create(KIND, adapt_to_delay=False)
        if self.store is not None:
            self.rank, self.barrier = self.store.rank, self.store.barrier

    def begin(self, zeros):
        self.store.init("weight", self.array(zeros))
        self.store.set_optimizer(self.optimizer, lr=RATE, momentum=MOMENTUM)

    def push(self, sums):  # the store takes means, and adds up those of devices
        self.store.push("weight", [self.array(each / (len(sums) * self.samples)) for each in sums], samples=len(sums) * self.samples)

    def pull(self):
        return self.store.pull("weight", out=self.array(np.zeros(5, "float32"))).numpy()


def main():
    store = OfMXNet() if LIBRARY == "mxnet" else OfLockstep()
    if store.store is None:  # a server
        return
    store.begin(np.zeros(5, "float32"))
    seen = []
    for step in range(STEPS):
        if KIND == "dist_async":  # both read, then worker 0's gradient is applied, then worker 1's, which is one update old
            seen.append(store.pull().tolist())
            store.barrier()
            for turn in range(2):
                if store.rank == turn:
                    store.push([gradient_of(np.float32(seen[-1]), step, store.rank)])
                    store.pull()
                store.barrier()
        else:
            seen.append(store.pull().tolist())
            parts = (0, 1) if KIND == "local" else (store.rank,)
            store.push([gradient_of(np.float32(seen[-1]), step, part) for part in parts])
    seen.append(store.pull().tolist())
    store.barrier()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    if os.environ.get("DMLC_ROLE", "worker") == "worker":
        main()
    else:
        import mxnet  # noqa: F401  serves
