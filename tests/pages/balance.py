"""What the examples of docs/balance.md need: run before them."""

import numpy as np

import megaindex

rng = np.random.default_rng(0)
with megaindex.IndexedDatasetWriter("my_corpus", dtype="uint16") as writer:
    for length in np.maximum(1, rng.lognormal(np.log(400) - 1.28, 1.6, 3000)).astype(int):
        writer.add_document(np.zeros(length, np.uint16))
