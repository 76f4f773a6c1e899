"""Batches: tokens of located samples, loss masks, document bounds; rows read by sample id."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import F32, I32, I64, DatasetIndex, IndexArrays, IntArray, TokenSource
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.spans import blended_spans


def token_table(sources: Sequence[TokenSource]) -> list[TokenSource]:
    """Return a table of the sources' arrays for `gather`, in a form of the backend's own.

    Args:
        sources: for each source the tokens of the whole ``.bin``, one-dimensional and of its
            dtype; the pointers of the ``.idx``, int64[n] in bytes; and its lengths, int32[n] in
            tokens. Pointers and lengths may be unaligned. The table keeps the arrays alive.
    """
    return list(sources)


def gather(
    table: list[TokenSource],
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
    """Fill row k of ``out`` with the tokens of the runs ``row_splits[k]:row_splits[k + 1]``.

    ``out[k, j]`` is the j-th token of their concatenation, and ``labels[k, j]`` the one after it;
    beyond the concatenation both are ``pad_id``. With runs of 5 6 7 and 8 and a width of 3, out is
    5 6 7 and labels 6 7 8.

    Args:
        out: int64, int32 or float32 [samples, width] with contiguous rows. Its dtype holds every
            token of every source; float32 takes any, rounded.
        labels: None, or another array like ``out``.

    Returns:
        -1 if all runs are valid. Else nothing is written, and the result is the number of the first
        run that is outside its sequence, the ``.bin`` or the sources, or begins inside a token.

    Raises:
        InvalidArgument: the dtype of ``out`` does not hold every token of the sources.
    """
    check_holds(table, out)
    runs = list(zip(*(a.tolist() for a in (source, document, offset, length)), strict=True))
    for number, run in enumerate(runs):
        if not _inside(table, *run):
            return number
    for k in range(row_splits.size - 1):
        parts = [_tokens(table, *run) for run in runs[row_splits[k] : row_splits[k + 1]]]
        text = np.concatenate([np.zeros(0, out.dtype), *(part.astype(out.dtype) for part in parts)])
        for row, words in ((out, text), (labels, text[1:])):
            if row is not None:
                row[k] = pad_id
                row[k, : words.size] = words[: row.shape[1]]
    return -1


def check_holds(table: Sequence[TokenSource], out: IntArray) -> None:
    """Raise InvalidArgument unless the dtype of ``out`` holds every token of the sources."""
    for tokens, _, _ in table:
        if out.dtype != np.float32 and not np.can_cast(tokens.dtype, out.dtype):
            raise InvalidArgument(
                f"out: {out.dtype} does not hold every token of a source of {tokens.dtype}; use "
                "int64, or float32 for floats"
            )


def _inside(table: list[TokenSource], source: int, document: int, offset: int, size: int) -> bool:
    if not 0 <= source < len(table):
        return False
    tokens, pointers, lengths = table[source]
    if not 0 <= document < lengths.size or offset < 0 or size < 0:
        return False
    pointer, whole = int(pointers[document]), int(lengths[document])
    begin, between = divmod(pointer, tokens.itemsize)
    return (
        pointer >= 0
        and not between
        and offset + size <= whole
        and begin + offset + size <= tokens.size
    )


def _tokens(
    table: list[TokenSource], source: int, document: int, offset: int, size: int
) -> IntArray:
    tokens, pointers, _ = table[source]
    begin = int(pointers[document]) // tokens.itemsize + offset
    return tokens[begin : begin + size]


def mask_loss(
    tokens: IntArray, labels: IntArray, pad_id: int, eod_id: int | None, loss_mask: F32
) -> None:
    """Fill ``loss_mask``, and replace padding by id 0, which every embedding has.

    The mask is 0 where the label is ``pad_id`` or the token is ``eod_id``, else 1. Then tokens and
    labels that are ``pad_id`` become 0. All three are [samples, width]; the first two int64 or
    int32.
    """
    loss_mask[:] = 1
    loss_mask[labels == pad_id] = 0
    if eod_id is not None:
        loss_mask[tokens == eod_id] = 0
    tokens[tokens == pad_id] = 0
    labels[labels == pad_id] = 0


def documents_by_token(
    tokens: IntArray,
    eod_id: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    """Fill the fields that separate documents, each of which ends with the token ``eod_id``.

    Args:
        tokens: int64 or int32 [samples, width].
        position_ids: int64 [samples, width], filled with positions counted from the start of the
            document, or None.
        cu_seqlens: int32 [samples, width + 1], filled with the starts of the documents, the end of
            the last one, then ``width`` to the end, or None. Documents of 2 and 3 tokens give
            0 2 5 5 5 5.
        max_seqlen: int32 [samples], filled with the tokens of the longest document, or None.
    """
    width = tokens.shape[1]
    for k, row in enumerate(tokens):
        ends = [*(np.flatnonzero(row == eod_id) + 1).tolist(), width]
        _fill(k, ends, width, position_ids, cu_seqlens, max_seqlen)


def documents_by_run(
    length: I64,
    row_splits: I64,
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    """Fill the fields of `documents_by_token`, where each run of a row is a document.

    Row k has the runs ``row_splits[k]:row_splits[k + 1]``. Cells after the runs belong to the last
    document; empty runs are skipped.
    """
    for k in range(row_splits.size - 1):
        sizes = [size for size in length[row_splits[k] : row_splits[k + 1]].tolist() if size]
        ends = [*np.cumsum(sizes[:-1], dtype=np.int64).tolist(), width]
        _fill(k, ends, width, position_ids, cu_seqlens, max_seqlen)


def _fill(
    k: int,
    ends: Sequence[int],
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None:
    bounds = sorted({0, *(end for end in ends if end < width), width})
    sizes = np.diff(bounds)
    if position_ids is not None:
        position_ids[k] = np.arange(width) - np.repeat(bounds[:-1], sizes)
    if cu_seqlens is not None:
        cu_seqlens[k] = width
        cu_seqlens[k, : len(bounds)] = bounds
    if max_seqlen is not None:
        max_seqlen[k] = sizes.max(initial=0)


@dataclass(frozen=True, eq=False)
class RowTable:
    """Arrays and tokens of every source, and the draws of their blend."""

    indices: list[IndexArrays]
    sources: list[TokenSource]
    dataset_index: DatasetIndex | None
    dataset_sample_index: I64 | None

    def draws(self, ids: I64) -> tuple[I64, I64] | None:
        """Return source and sample of each id; None if one does not exist."""
        size = self.indices[0][0].size if self.dataset_index is None else self.dataset_index.size
        if ids.size and not 0 <= ids.min() <= ids.max() < size:
            return None
        if self.dataset_index is None or self.dataset_sample_index is None:
            return np.zeros_like(ids), ids
        return self.dataset_index[ids].astype(np.int64), self.dataset_sample_index[ids]


def row_table(
    indices: Sequence[IndexArrays],
    sources: Sequence[TokenSource],
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
    descriptors: Sequence[int],
) -> RowTable:
    """Return a table for `read_rows`, in a form of the backend's own; it keeps the arrays alive.

    Args:
        indices, sources: the arguments of `span_table` and `token_table`, of the same sources.
        dataset_index, dataset_sample_index: source of each sample of the blend, uint8 or int16, and
            its number there; None for the samples of a single source.
        descriptors: files with the bytes of the tokens, one for each source, which a backend may
            read in place of the memory; -1 for a source without; empty without any. They stay open
            as long as the table is used.

    Raises:
        InvalidArgument: the lists differ in length, or int64 does not hold every token of a source.
    """
    if not indices or len(indices) != len(sources):
        raise InvalidArgument("indices, sources: must be as many, and at least one")
    if len(descriptors) not in (0, len(sources)):
        raise InvalidArgument("descriptors: must be one for each source, or none")
    if dataset_index is None and len(indices) > 1:
        raise InvalidArgument("dataset_index: must be given for several sources")
    check_holds(sources, np.zeros(0, np.int64))
    return RowTable(list(indices), list(sources), dataset_index, dataset_sample_index)


def read_rows(table: RowTable, sample_ids: list[Any], width: int, pad_id: int) -> I64 | None:
    """Return the tokens of samples as int64 [samples, width], with ``pad_id`` after them.

    None if an id is not the integer of a sample, or a sample is not in its source, the arrays or
    the tokens; `blended_spans` and `gather` then name the reason.
    """
    return assemble_rows(blended_spans, gather, table, sample_ids, width, pad_id)


def assemble_rows(
    find: Callable[..., Any],
    copy: Callable[..., int],
    table: RowTable,
    sample_ids: list[Any],
    width: int,
    pad_id: int,
) -> I64 | None:
    """Return the result of `read_rows` by the kernels `blended_spans` and `gather` of a backend."""
    if {bool, np.bool_} & set(map(type, sample_ids)):
        return None
    try:
        ids = np.array([operator.index(sample) for sample in sample_ids], np.int64)
        draws = table.draws(ids)
        if draws is None:
            return None
        spans = find(table.indices, *draws)
    except (TypeError, OverflowError, InvalidArgument):
        return None
    rows: I64 = np.empty((ids.size, width), np.int64)
    return rows if copy(table.sources, *spans, rows, None, pad_id) < 0 else None
