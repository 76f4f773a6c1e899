"""What the examples of docs/lock.md need: run before them."""

import os

import numpy as np

from megaindex import IndexedDatasetWriter

os.makedirs("data")
for name, seed in (("web", 1), ("code", 2)):
    with IndexedDatasetWriter(f"data/{name}", "uint16") as writer:
        for length in np.random.default_rng(seed).integers(10, 400, 2000):
            writer.add_document(np.arange(length))
