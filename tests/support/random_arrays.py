"""Random arguments of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaindex.kernels import load


def index_arrays(rng: np.random.Generator, extra: int) -> tuple[Any, ...]:
    """An index over random lengths, in any of the types its arrays may have."""
    lengths = rng.integers(0, 30, rng.integers(2, 40)).astype(np.int32)
    lengths[0] = 30
    documents = rng.permutation(lengths.size).astype(np.int32)
    total, length = int(lengths.sum()), int(rng.integers(1, 20))
    samples = (total - extra) // length
    rows = np.zeros((samples + 1, 2), rng.choice(["int32", "int64"]))
    load("reference").cut_samples(lengths, documents, length, extra, samples, total, rows)
    shuffle = rng.permutation(samples).astype(rng.choice(["uint32", "int64"]))
    return shuffle, rows, documents, lengths, extra
