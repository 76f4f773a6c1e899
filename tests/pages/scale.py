"""What the examples of docs/scale.md need: run before them."""

import numpy as np

import megaindex

paths = ["web", "code"]
for name in paths:
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in np.random.default_rng(len(name)).integers(50, 400, 100):
            writer.add_document(np.arange(length))
