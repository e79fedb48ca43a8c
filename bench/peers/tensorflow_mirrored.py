# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's MirroredStrategy over two logical CPUs on Fashion-MNIST.

    tensorflow_mirrored.py MODEL BATCH STEPS

MODEL: lenet | mlp-wide. BATCH: global. Prints seconds per step as JSON: of STEPS, once as many have warmed up.
"""
import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from fashion_mnist import training_set

K = tf.keras


def make_model(name):
    if name == "lenet":
        layers = [K.layers.Conv2D(20, 3, activation="relu"), K.layers.AvgPool2D(2), K.layers.Conv2D(50, 5, activation="relu"),
                  K.layers.AvgPool2D(2), K.layers.Flatten(), K.layers.Dense(128, activation="relu"), K.layers.Dense(10)]
    else:
        layers = [K.layers.Flatten(), K.layers.Dense(4096, activation="relu"), K.layers.Dense(4096, activation="relu"),
                  K.layers.Dense(10)]
    return K.Sequential([K.layers.Input((28, 28, 1)), *layers])


def main():
    name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tf.config.threading.set_intra_op_parallelism_threads(2)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    images, labels = training_set()
    with strategy.scope():
        model = make_model(name)
        model.compile(K.optimizers.SGD(0.01, momentum=0.9), K.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices((images[..., None], labels.astype(np.int32))).shuffle(10000).repeat().batch(batch).prefetch(4)
    model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)
    start = time.perf_counter()
    model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)
    print(json.dumps({"seconds_per_step": (time.perf_counter() - start) / steps}))


if __name__ == "__main__":
    main()
