"""What the examples of docs/subsets.md need: run before them."""

import numpy as np

import megaindex

for name, documents in (("web", 6000), ("math", 1250)):
    lengths = np.random.default_rng(documents).integers(2, 480, documents)
    with megaindex.IndexedDatasetWriter(name, "uint16") as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
