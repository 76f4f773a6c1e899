"""Token runs of samples in Numba.

reference/spans.py documents the functions.
"""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I32, I64, U64, IndexArrays, IntArray
from megaindex.errors import InvalidArgument
from megaindex.kernels.jit.bijection import bijection_apply, bijection_invert, bijection_range


@numba.njit(cache=True, nogil=True, inline="always")
def _run(documents, lengths, rows, extra, row, position):  # type: ignore[no-untyped-def]
    """Return (document, offset, length) of a sample at one position; length -1 if damaged."""
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
    """Fill ``splits``; return the first damaged sample, or -1."""
    for k in range(ids.size):
        row = np.int64(shuffle[ids[k]])
        if row < 0 or row >= rows.shape[0] - 1:
            return k
        # arrays may be another program's: a wrong entry must not read outside them
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
            # a sample may end before the first token of its last document
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


def blended_spans(
    table: list[IndexArrays], which: I64, samples: I64
) -> tuple[I32, I64, I64, I64, I64]:
    counts = np.zeros(which.size, np.int64)
    parts = []
    for source in np.unique(which).tolist():  # one call for all samples of a source
        if not 0 <= source < len(table):
            raise InvalidArgument(f"which: source {source} of {len(table)} sources")
        places = np.flatnonzero(which == source)
        shuffle, rows, documents, lengths, extra = table[source]
        part = array_spans(shuffle, rows, documents, lengths, extra, samples[places])
        counts[places] = np.diff(part[3])
        parts.append((places, part))
    splits = np.concatenate(([0], np.cumsum(counts)))
    columns = np.empty((3, splits[-1]), np.int64)
    for places, (*runs, part_splits) in parts:
        shift = splits[places] - part_splits[:-1]
        rows = np.arange(part_splits[-1]) + np.repeat(shift, counts[places])
        for column, values in zip(columns, runs, strict=True):
            column[rows] = values
    source = np.repeat(which, counts).astype(np.int32)
    return source, columns[0], columns[1], columns[2], splits


_BATCH = 1 << 18  # positions, rounded down to whole strides


@numba.njit(cache=True, nogil=True)
def _sum_strides(documents, lengths, stride, out):  # type: ignore[no-untyped-def]
    """Set out[j + 1] to out[0] plus the tokens of strides 0 … j."""
    total = out[0]
    for k in range(documents.size):
        total += lengths[documents[k]]
        if (k + 1) % stride == 0:
            out[(k + 1) // stride] = total
    out[-1] = total


def epoch_starts(
    key: U64, lengths: I32, copies: int, stride: int, out: I64, num_threads: int = 1
) -> None:
    size = copies * lengths.size
    strides = max(1, _BATCH // stride)
    out[0] = 0
    for row in range(0, out.size - 1, strides):
        begin = row * stride
        documents = np.empty(min(strides * stride, size - begin), np.int64)
        bijection_range(key, size, begin, documents)
        if copies > 1:
            documents %= lengths.size
        _sum_strides(documents, lengths, stride, out[row : row + strides + 1])


@numba.njit(cache=True, nogil=True)
def _sum_before(documents, positions, lengths, stride, starts, out):  # type: ignore[no-untyped-def]
    """``documents`` has the row of each position, up to it."""
    at = 0
    for k in range(positions.size):
        row = positions[k] // stride
        token = starts[row]
        for _ in range(positions[k] - row * stride):
            token += lengths[documents[at]]
            at += 1
        out[k] = token


def epoch_begins(
    key: U64,
    lengths: I32,
    copies: int,
    stride: int,
    starts: I64,
    entries: I64,
    num_threads: int = 1,
) -> I64:
    size = copies * lengths.size
    out = np.empty(entries.size, np.int64)
    for begin in range(0, entries.size, _BATCH):
        positions = bijection_invert(key, size, entries[begin : begin + _BATCH])
        counts = positions % stride
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        documents = bijection_apply(key, size, np.repeat(positions - counts, counts) + within)
        documents %= lengths.size
        rows = positions, lengths, stride, starts
        _sum_before(documents, *rows, out[begin : begin + _BATCH])
    return out


@numba.njit(cache=True, nogil=True)
def _find_epoch_spans(documents, first, stop, lengths, start, begins, ends, runs, splits):  # type: ignore[no-untyped-def]
    """Fill ``runs`` as far as there is room, and ``splits``; return the number of runs.

    ``documents[first[k]:stop[k]]`` are the candidates of request k.
    """
    found = 0
    for k in range(begins.size):
        at = start[k]
        for p in range(first[k], stop[k]):
            end = at + lengths[documents[p]]
            low, high = max(at, begins[k]), min(end, ends[k])
            if low < high:
                if found < runs.shape[1]:
                    runs[0, found] = documents[p]
                    runs[1, found] = low - at
                    runs[2, found] = high - low
                found += 1
            at = end
            # documents after the request are candidates of the stride alone
            if at >= ends[k]:
                break
        splits[k + 1] = found
    return found


def _documents(key: U64, size: int, low: I64, high: I64) -> tuple[I64, I64]:
    """Return the bijection at positions low[k] … high[k] - 1, and where those of k begin.

    Overlapping and adjacent ranges share their entries.
    """
    begin, end = int(low.min(initial=size)), int(high.max(initial=0))
    # requests overlap so much that the whole range costs less than each by itself
    if end - begin <= (high - low).sum():
        documents = np.empty(max(0, end - begin), np.int64)
        bijection_range(key, size, begin, documents)
        return documents, low - begin
    first = np.cumsum(high - low) - (high - low)
    positions = np.arange((high - low).sum()) + np.repeat(low - first, high - low)
    return bijection_apply(key, size, positions), first


def epoch_spans(
    key: U64, lengths: I32, copies: int, stride: int, starts: I64, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    size = copies * lengths.size
    row = np.searchsorted(starts, begins, side="right") - 1
    last = np.searchsorted(starts, ends, side="left")  # a request ends before this stride
    low, high = row * stride, np.minimum(last * stride, size)
    documents, first = _documents(key, size, low, high)
    documents %= lengths.size
    given = (documents, first, first + (high - low), lengths, starts[row], begins, ends)
    splits = np.zeros(begins.size + 1, np.int64)
    runs = np.empty((3, 2 * begins.size + 16), np.int64)
    found = int(_find_epoch_spans(*given, runs, splits))
    if found > runs.shape[1]:
        runs = np.empty((3, found), np.int64)
        _find_epoch_spans(*given, runs, splits)
    return runs[0, :found].copy(), runs[1, :found].copy(), runs[2, :found].copy(), splits


@numba.njit(cache=True, nogil=True)
def _sequence_at(pointers, first, stop, byte):  # type: ignore[no-untyped-def]
    """Return the last sequence that begins at or before a byte, or the first."""
    low, high = first, stop
    while high - low > 1:
        middle = (low + high) >> 1
        if pointers[middle] <= byte:
            low = middle
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def _meets_next(pointers, lengths, size, stop, sequence):  # type: ignore[no-untyped-def]
    """Return whether a sequence ends where the next one begins, or is the last."""
    end = pointers[sequence] + lengths[sequence] * size
    return sequence + 1 == stop or pointers[sequence + 1] == end


@numba.njit(cache=True, nogil=True)
def _find_window_spans(pointers, lengths, size, first, stop, begins, ends, runs, splits):  # type: ignore[no-untyped-def]
    """Fill ``splits``, and ``runs`` as far as there is room; return a damaged sequence or -1."""
    found = 0
    for k in range(begins.size):
        at, end = begins[k] * size, ends[k] * size
        sequence = _sequence_at(pointers, first, stop, at)
        # else the bytes between it and this one belong to no sequence
        if sequence > first and not _meets_next(pointers, lengths, size, stop, sequence - 1):
            return sequence - 1
        while at < end:
            low = pointers[sequence]
            high = low + lengths[sequence] * size
            to = min(high, end)
            fits = low <= at and (at - low) % size == 0
            if fits and at < to:
                if found < runs.shape[1]:
                    runs[0, found] = sequence
                    runs[1, found] = (at - low) // size
                    runs[2, found] = (to - at) // size
                found += 1
                at = to
            if not _meets_next(pointers, lengths, size, stop, sequence):
                return sequence
            if at < end:
                if not fits or sequence + 1 == stop:
                    return sequence
                sequence += 1
        splits[k + 1] = found
    return -1


def window_spans(
    pointers: I64, lengths: I32, item_size: int, first: int, stop: int, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    given = (pointers, lengths, item_size, first, stop, begins, ends)
    splits = np.zeros(begins.size + 1, np.int64)
    runs = np.empty((3, 2 * begins.size + 16), np.int64)
    damaged = int(_find_window_spans(*given, runs, splits))
    if damaged >= 0:
        low = int(pointers[damaged])
        raise InvalidArgument(
            f"sequence {damaged} fills bytes {low} to {low + int(lengths[damaged]) * item_size} of "
            "the .bin, and the next one does not begin there"
        )
    if splits[-1] > runs.shape[1]:
        runs = np.empty((3, int(splits[-1])), np.int64)
        _find_window_spans(*given, runs, splits)
    found = int(splits[-1])
    return runs[0, :found], runs[1, :found], runs[2, :found], splits
