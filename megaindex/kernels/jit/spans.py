"""Samples of the three arrays in Numba; see reference/spans.py for what it computes."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, I64, IntArray


@numba.njit(cache=True, nogil=True, inline="always")
def _run(documents, lengths, rows, extra, row, position):  # type: ignore[no-untyped-def]
    """(document, offset, length) of a sample at one position; length -1 where it is damaged."""
    document = documents[position]
    if document < 0 or document >= lengths.size:
        return 0, 0, -1
    length = lengths[document]
    low = rows[row, 1] if position == rows[row, 0] else 0
    high = rows[row + 1, 1] + extra if position == rows[row + 1, 0] else length
    if low < 0 or low > high or high > length:
        return 0, 0, -1
    return document, low, high - low


@numba.njit(cache=True, nogil=True)
def _count(shuffle, rows, documents, lengths, extra, ids, splits):  # type: ignore[no-untyped-def]
    """Fills splits with the runs of each sample; the first damaged sample, or -1."""
    for k in range(ids.size):
        row = np.int64(shuffle[ids[k]])
        if row < 0 or row >= rows.shape[0] - 1:
            return k
        first, last = rows[row, 0], rows[row + 1, 0]
        if first < 0 or first > last or last >= documents.size:
            return k
        splits[k + 1] = splits[k]
        for position in range(first, last + 1):
            length = _run(documents, lengths, rows, extra, row, position)[2]
            if length < 0:
                return k
            splits[k + 1] += length > 0
    return -1


@numba.njit(cache=True, nogil=True)
def _fill(shuffle, rows, documents, lengths, extra, ids, runs):  # type: ignore[no-untyped-def]
    at = 0
    for k in range(ids.size):
        row = np.int64(shuffle[ids[k]])
        for position in range(rows[row, 0], rows[row + 1, 0] + 1):
            document, offset, length = _run(documents, lengths, rows, extra, row, position)
            if length > 0:
                runs[0, at], runs[1, at], runs[2, at] = document, offset, length
                at += 1


def array_spans(
    shuffle_index: IntArray,
    sample_index: IntArray,
    document_index: I32,
    lengths: I32,
    extra: int,
    sample_ids: I64,
) -> tuple[I64, I64, I64, I64]:
    outside = (sample_ids < 0) | (sample_ids >= shuffle_index.size)
    if outside.any():
        raise InvalidArgument(
            f"sample_ids: sample {sample_ids[outside][0]} of {shuffle_index.size} samples"
        )
    arrays = (shuffle_index, sample_index, document_index, lengths, extra, sample_ids)
    splits = np.zeros(sample_ids.size + 1, np.int64)
    damaged = int(_count(*arrays, splits))
    if damaged >= 0:
        sample = int(sample_ids[damaged])
        raise InvalidArgument(
            f"shuffle_index, sample_index: sample {sample}, entry {shuffle_index[sample]}, leaves "
            "its documents; build the index again"
        )
    runs = np.empty((3, int(splits[-1])), np.int64)
    _fill(*arrays, runs)
    return runs[0], runs[1], runs[2], splits
