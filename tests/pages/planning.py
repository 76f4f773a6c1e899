"""What the examples of docs/planning.md need: run before them."""

import numpy as np

import megaindex

for name, documents in (("web", 3000), ("code", 900), ("math", 150)):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in np.random.default_rng(documents).integers(50, 400, documents):
            writer.add_document(np.arange(length))
