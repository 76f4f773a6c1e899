"""What the examples of docs/orders.md need: run before them."""

import numpy as np

import megaindex

for name in ("web", "code"):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in np.random.default_rng(len(name)).integers(500, 4000, 200):
            writer.add_document(np.arange(length))
