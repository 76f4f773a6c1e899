"""What the examples of docs/export.md need: run before them."""

import numpy as np

import megaindex

with megaindex.IndexedDatasetWriter("web", dtype="uint16") as writer:
    for length in np.random.default_rng(0).integers(50, 400, 2000):
        writer.add_document(np.arange(length))
