"""What the examples of docs/audit.md need: run before them."""

import numpy as np

import megaindex

with megaindex.IndexedDatasetWriter("my_corpus", dtype="uint16") as writer:
    for length in np.random.default_rng(0).integers(50, 400, 2000):
        writer.add_document(np.arange(length))
loader = [{"source": np.array([0, 1, 0, -1]), "loss_mask": np.ones((4, 8))} for _ in range(20)]


def train(batch: dict[str, np.ndarray]) -> np.ndarray:
    return np.where(batch["source"] == 1, 2.5, 3.0)[:, None] + np.zeros(8)


def check_page() -> None:
    """Compare the losses that the page adds up."""
    expected = {"data/loss": (2 * 3.0 + 2.5) / 3, "data/loss/web": 3.0, "data/loss/code": 2.5}
    assert scalars == expected
