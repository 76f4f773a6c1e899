"""What the examples of docs/recipes.md need: run before them."""

import numpy as np

import megaindex

for name, documents in (("web", 300), ("code", 80)):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in np.random.default_rng(0).integers(50, 400, documents):
            writer.add_document(np.arange(length))


def train_step(batch):
    pass


checkpoint = {}
