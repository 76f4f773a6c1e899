"""What the examples of docs/cookbook.md need: run before them."""

import json
import os
from pathlib import Path

import numpy as np

import megaindex

rng = np.random.default_rng(0)
os.makedirs("texts")
os.makedirs("corpora")
for i in range(30):
    Path(f"texts/{i}.txt").write_text(f"The {i}th keeper counted ships.\n" * (20 + i))
for name in ("web", "code", "math", *(f"corpora/{i:03}" for i in range(8))):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in rng.integers(50, 400, 300):
            writer.add_document(rng.integers(0, 50_000, length))
Path("names.txt").write_text("\n".join(f"{i:03}" for i in range(8)))


def train(batch):
    pass
