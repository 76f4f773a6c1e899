"""What the examples of README.md need: run before them."""

import numpy as np

import megaindex

with megaindex.IndexedDatasetWriter("my_corpus", dtype="uint16") as writer:
    for length in np.random.default_rng(0).integers(500, 4000, 200):
        writer.add_document(np.arange(length))


def train_step(tokens, labels):
    pass
