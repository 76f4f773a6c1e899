"""What the examples of docs/packing.md need: run before them."""

import numpy as np

import megaindex

for name in ("web", "code"):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in np.random.default_rng(len(name)).lognormal(5, 1, 3000).astype(int) + 1:
            writer.add_document(np.arange(length) % 50000)
with open("lengths.txt", "w") as file:
    file.write("# tokens documents\n300 500000000\n1000 100000000\n6000 2000000\n")
