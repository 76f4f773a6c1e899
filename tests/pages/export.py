"""What the examples of docs/export.md need: run before them."""

import json

import numpy as np

import megaindex

with megaindex.IndexedDatasetWriter("web", dtype="uint16") as writer:
    for length in np.random.default_rng(0).integers(50, 400, 2000):
        writer.add_document(np.arange(length))
matrix = [[0, 0.99], [0.99, 1.0], None]
described = {
    "class": "GPTDataset",
    "dataset_path": "other",
    "num_samples": 100,
    "index_split": "train",
    "random_seed": 1234,
    "sequence_length": 64,
    "split": "99,1",
    "split_matrix": matrix,
    "tokenizer": {"class": "HuggingFaceTokenizer", "tokenizer_path": ["tokenizer.json"]},
}
with open("old-description.txt", "w") as file:
    file.write(json.dumps(described, indent=4))
