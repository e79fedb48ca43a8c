# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST for the peers: images (60000, 28, 28) float32, normalised as `lockstep train` does, and labels."""
import gzip
from pathlib import Path

import numpy as np

FOLDER = Path("/usr/share/datasets/fashion-mnist")


def read_idx(name):
    plain = FOLDER / name
    raw = plain.read_bytes() if plain.exists() else gzip.open(f"{plain}.gz").read()
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(np.frombuffer(raw, ">u4", raw[3], offset=4))


def training_set():
    images = (read_idx("train-images-idx3-ubyte").astype(np.float32) / 255 - 0.2860) / 0.3530
    return images, read_idx("train-labels-idx1-ubyte").astype(np.int64)
