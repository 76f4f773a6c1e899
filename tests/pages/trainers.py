"""What the examples of docs/trainers.md need: run before them."""

import numpy as np

from megaindex import IndexedDatasetWriter

with IndexedDatasetWriter("web", "uint16") as writer:
    for length in np.random.default_rng(0).integers(10, 400, 200):
        writer.add_document(np.arange(length))
