"""What the examples of docs/audit.md need: run before them."""

import numpy as np

import megaindex

with megaindex.IndexedDatasetWriter("my_corpus", dtype="uint16") as writer:
    for length in np.random.default_rng(0).integers(50, 400, 2000):
        writer.add_document(np.arange(length))
