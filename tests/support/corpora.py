"""Small corpora for tests: random lengths, and tokens that tell where they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megaindex.format import IndexedDataset, IndexedDatasetWriter


def write_corpus(
    prefix: Path, lengths: list[int] | np.ndarray, dtype: type = np.int32, eod: int | None = None
) -> IndexedDataset:
    """Documents whose tokens count on through the corpus, modulo what the dtype holds.

    With ``eod`` the last token of every document is that id.
    """
    limit = 50_000 if dtype is np.uint16 else 2**31 - 1
    position = 0
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for length in map(int, lengths):
            tokens = (np.arange(position, position + length) % limit).astype(dtype)
            if eod is not None and length:
                tokens[-1] = eod
            writer.add_document(tokens)
            position += length
    return IndexedDataset(str(prefix))
