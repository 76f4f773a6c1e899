"""One call from a dataset and spans to a batch of tokens."""

from __future__ import annotations

import numpy as np

from megaindex.format import IndexedDataset
from megaindex.index.spans import Spans
from megaindex.kernels.types import I64
from megaindex.loader.choice import plain_reader


def gather(dataset: IndexedDataset, spans: Spans, width: int, pad_id: int) -> I64:
    """The tokens of the located samples, int64[samples, width], in a new array.

    A sample with fewer than ``width`` tokens is filled up with ``pad_id``. For batch after batch,
    keep a `megaindex.loader.tokens.MappedTokens` and an array to read into.

    Raises:
        OutOfRange, FormatError: as `megaindex.loader.tokens.TokenReader.read`.
    """
    out = np.empty((spans.row_splits.size - 1, width), np.int64)
    plain_reader([dataset]).read(spans, out, pad_id=pad_id)
    return out
