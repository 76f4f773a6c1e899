"""What the examples of docs/llm-foundry.md need: run before them."""

import numpy as np

from megaindex import IndexedDatasetWriter

rng = np.random.default_rng(0)
with IndexedDatasetWriter("web", dtype="uint16") as web:
    for length in rng.integers(50, 400, 800):
        web.add_document(rng.integers(0, 50_000, length))
with IndexedDatasetWriter("valid", dtype="uint16") as valid:
    for length in rng.integers(50, 400, 40):
        valid.add_document(rng.integers(0, 50_000, length))
with (
    IndexedDatasetWriter("chat", dtype="uint16") as chat,
    IndexedDatasetWriter("chat_mask", dtype="uint8") as mask,
):
    for prompt, response in zip(rng.integers(5, 30, 500), rng.integers(10, 60, 500), strict=True):
        chat.add_document(rng.integers(0, 50_000, prompt + response))
        mask.add_document(np.repeat([0, 1], [prompt, response]))
