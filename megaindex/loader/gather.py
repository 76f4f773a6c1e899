"""Copies the tokens that spans point at into rows of a batch."""

from __future__ import annotations

import numpy as np

from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.spans import Spans
from megaindex.kernels.types import I64


def gather(dataset: IndexedDataset, spans: Spans, width: int, pad_id: int) -> I64:
    """The tokens of the located samples, int64[samples, width].

    A sample with fewer than ``width`` tokens is filled up with ``pad_id``.

    Raises:
        FormatError: a sequence of the dataset lies outside its ``.bin``.
    """
    itemsize = dataset.dtype.itemsize
    pointers = dataset.sequence_pointers[spans.document]
    begin = pointers // itemsize + spans.offset
    if spans.length.size:
        _check_inside(dataset, begin, begin + spans.length)
    # flat[k] is where the k-th token of all samples lies in the .bin
    ends = np.cumsum(spans.length)
    flat = np.arange(ends[-1] if ends.size else 0) + np.repeat(
        begin - (ends - spans.length), spans.length
    )
    out = np.full((spans.row_splits.size - 1, width), pad_id, np.int64)
    tokens_before = np.concatenate(([0], ends))[spans.row_splits]
    sizes = np.diff(tokens_before)
    out[np.arange(width) < sizes[:, None]] = dataset.tokens[flat]
    return out


def _check_inside(dataset: IndexedDataset, begin: I64, end: I64) -> None:
    if begin.min() < 0 or end.max() > dataset.tokens.size:
        raise FormatError(
            f"{dataset.path_prefix}.idx: a sequence points outside the .bin of "
            f"{dataset.tokens.size} tokens (tokens {int(begin.min())} to {int(end.max())}); "
            "write the pair again"
        )
