"""What the examples of docs/removal.md need: run before them."""

import numpy as np

import megaindex

rng = np.random.default_rng(0)
for name, count in (("web", 2000), ("code", 1000)):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in rng.integers(10, 500, count):
            writer.add_document([*rng.integers(1, 50000, length), 0])
