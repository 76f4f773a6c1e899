"""Batches, masks, document bounds and rows of token ids in Numba.

reference/gather.py documents the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from megaindex._types import F32, I32, I64, IntArray, TokenSource
from megaindex.kernels.jit.spans import blended_spans
from megaindex.kernels.reference.gather import RowTable, assemble_rows, check_holds


@numba.njit(cache=True, nogil=True)
def _first_bad(runs, number, size, itemsize, pointers, lengths):  # type: ignore[no-untyped-def]
    """Return the first run of a source that is not in its sequence and its tokens, or -1."""
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
    """Copy every row's text from its token ``shift`` on, one run at a time."""
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


@numba.njit(cache=True, nogil=True)
def _mask_loss(tokens, labels, pad_id, has_eod, eod_id, loss_mask):  # type: ignore[no-untyped-def]
    for k in range(tokens.shape[0]):
        for j in range(tokens.shape[1]):
            token, label = tokens[k, j], labels[k, j]
            masked = label == pad_id or (has_eod and token == eod_id)
            loss_mask[k, j] = 0 if masked else 1
            tokens[k, j] = 0 if token == pad_id else token
            labels[k, j] = 0 if label == pad_id else label


def mask_loss(
    tokens: IntArray, labels: IntArray, pad_id: int, eod_id: int | None, loss_mask: F32
) -> None:
    _mask_loss(tokens, labels, pad_id, eod_id is not None, eod_id or 0, loss_mask)


# in place of outputs that are not wanted, so that each combination needs no compilation of its own
_NO_POSITIONS = np.empty((0, 0), np.int64)
_NO_BOUNDS = np.empty((0, 0), np.int32)
_NO_LONGEST = np.empty(0, np.int32)


@numba.njit(cache=True, nogil=True)
def _row(k, ends, width, position_ids, cu_seqlens, max_seqlen):  # type: ignore[no-untyped-def]
    """Fill row k, whose documents end at ``ends``; the cells after them are one more document."""
    begin, documents, longest = 0, 0, 0
    for i in range(ends.size + 1):
        end = min(ends[i], width) if i < ends.size else width
        if end <= begin:
            continue
        if position_ids.size > 0:
            position_ids[k, begin:end] = np.arange(end - begin)
        if cu_seqlens.size > 0:
            cu_seqlens[k, documents] = begin
        documents += 1
        longest = max(longest, end - begin)
        begin = end
    if cu_seqlens.size > 0:
        cu_seqlens[k, documents:] = width
    if max_seqlen.size > 0:
        max_seqlen[k] = longest


def _outputs(
    position_ids: I64 | None, cu_seqlens: I32 | None, max_seqlen: I32 | None
) -> tuple[I64, I32, I32]:
    return (
        _NO_POSITIONS if position_ids is None else position_ids,
        _NO_BOUNDS if cu_seqlens is None else cu_seqlens,
        _NO_LONGEST if max_seqlen is None else max_seqlen,
    )


@numba.njit(cache=True, nogil=True)
def _by_token(tokens, eod_id, position_ids, cu_seqlens, max_seqlen):  # type: ignore[no-untyped-def]
    for k in range(tokens.shape[0]):
        ends = np.flatnonzero(tokens[k] == eod_id) + 1
        _row(k, ends, tokens.shape[1], position_ids, cu_seqlens, max_seqlen)


def documents_by_token(
    tokens: IntArray,
    eod_id: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    _by_token(tokens, eod_id, *_outputs(position_ids, cu_seqlens, max_seqlen))


@numba.njit(cache=True, nogil=True)
def _by_run(length, row_splits, width, position_ids, cu_seqlens, max_seqlen):  # type: ignore[no-untyped-def]
    for k in range(row_splits.size - 1):
        sizes = length[row_splits[k] : row_splits[k + 1]]
        ends = np.cumsum(sizes[sizes > 0])[:-1]
        _row(k, ends, width, position_ids, cu_seqlens, max_seqlen)


def documents_by_run(
    length: I64,
    row_splits: I64,
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    _by_run(length, row_splits, width, *_outputs(position_ids, cu_seqlens, max_seqlen))


def read_rows(table: RowTable, sample_ids: list[Any], width: int, pad_id: int) -> I64 | None:
    return assemble_rows(blended_spans, gather, table, sample_ids, width, pad_id)
