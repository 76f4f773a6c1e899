"""Batches in Numba; see reference/gather.py for what they are."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from megaindex.kernels.reference.gather import check_holds
from megaindex.kernels.reference.gather import token_table as token_table
from megaindex.kernels.types import I32, I64, IntArray, TokenSource

__all__ = ["gather", "token_table"]


@numba.njit(cache=True, nogil=True)
def _first_bad(runs, number, size, itemsize, pointers, lengths):  # type: ignore[no-untyped-def]
    """First run of source ``number`` that leaves its sequence or the ``size`` tokens, else -1."""
    source, document, offset, length = runs
    for r in range(document.size):
        if source[r] != number:
            continue
        d, begin, count = document[r], offset[r], length[r]
        if d < 0 or d >= lengths.size or begin < 0 or count < 0:
            return r
        pointer, whole = pointers[d], np.int64(lengths[d])
        if begin > whole or count > whole - begin:
            return r
        if pointer < 0 or pointer % itemsize or begin + count > size - pointer // itemsize:
            return r
    return -1


def gather(
    table: Sequence[TokenSource],
    source: I32,
    document: I64,
    offset: I64,
    length: I64,
    row_splits: I64,
    out: IntArray,
    labels: IntArray | None,
    pad_id: int,
    num_threads: int = 1,
) -> int:
    check_holds(table, out)
    runs = source, document, offset, length
    begin = np.empty_like(offset)
    bad = []
    for number in np.unique(source).tolist():
        of_source = np.flatnonzero(source == number)
        if not 0 <= number < len(table):
            bad.append(int(of_source[0]))
            continue
        tokens, pointers, lengths = table[number]
        first = _first_bad(runs, number, tokens.size, tokens.itemsize, pointers, lengths)
        if first >= 0:
            bad.append(int(first))
            continue
        pointer = pointers[document[of_source]]
        begin[of_source] = pointer // tokens.itemsize + offset[of_source]
    if bad:
        return min(bad)
    for rows, shift in ((out, 0), (labels, 1)):
        if rows is not None:
            _copy(table, source, begin, length, row_splits, rows, shift, pad_id)
    return -1


def _copy(
    table: Sequence[TokenSource],
    source: I32,
    begin: I64,
    length: I64,
    row_splits: I64,
    rows: IntArray,
    shift: int,
    pad_id: int,
) -> None:
    """The text of every row from its token ``shift`` on; NumPy converts a run at a time."""
    runs = list(zip(source.tolist(), begin.tolist(), length.tolist(), strict=True))
    splits = row_splits.tolist()
    for row, first, last in zip(rows, splits, splits[1:], strict=False):
        at = -shift
        for number, start, count in runs[first:last]:
            skipped = max(0, -at)
            stop = min(count, row.size - at)
            if skipped < stop:
                row[at + skipped : at + stop] = table[number][0][start + skipped : start + stop]
            at += count
        row[max(0, at) :] = pad_id
