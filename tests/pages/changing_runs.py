"""What the examples of docs/changing-runs.md need: run before them."""

from pathlib import Path

import numpy as np
from support.corpora import write_pairs

from megaindex import IndexedDatasetWriter

write_pairs(web=700, code=80, math=60)

rng = np.random.default_rng(0)
for name, documents, mean in (("articles", 3000, 400), ("books", 60, 8000)):
    with IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in rng.exponential(mean, documents).astype(int) + 1:
            writer.add_document(rng.integers(0, 50_000, length))
Path("code_read.txt").write_text(" ".join(map(str, range(50))))
