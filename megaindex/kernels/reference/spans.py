"""Spans of samples in framework arrays, blends, computed epochs and windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaindex._types import I32, I64, U64, IndexArrays, IntArray
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.bijection import bijection_apply, bijection_invert


def array_spans(
    shuffle_index: IntArray,
    sample_index: IntArray,
    document_index: I32,
    lengths: I32,
    extra: int,
    sample_ids: I64,
) -> tuple[I64, I64, I64, I64]:
    """Return the token runs of samples: (document, offset, length, row_splits), all int64.

    Sample i of training is sample ``s = shuffle_index[i]`` of the concatenated documents: its
    tokens are those from row s of ``sample_index`` to row s + 1, and ``extra`` more. The runs of
    the k-th id are ``row_splits[k]:row_splits[k + 1]``; empty runs are left out. With lengths
    3 0 4, documents 0 1 2 and rows (0, 2) and (2, 1), a sample and its extra token are the runs
    (0, 2, 1) and (2, 0, 2).

    Raises:
        InvalidArgument: an id, an entry or a row is out of range; the arrays may be damaged.
    """
    runs: list[tuple[int, int, int]] = []
    splits = [0]
    for sample in sample_ids.tolist():
        if not 0 <= sample < shuffle_index.size:
            raise InvalidArgument(f"sample_ids: sample {sample} of {shuffle_index.size} samples")
        row = int(shuffle_index[sample])
        if not 0 <= row < len(sample_index) - 1:
            raise InvalidArgument(
                f"shuffle_index: entry {sample} is {row}, sample_index holds "
                f"{len(sample_index) - 1} samples; build the index again"
            )
        (first, begin), (last, end) = sample_index[row : row + 2].tolist()
        runs += _sample(document_index, lengths, first, begin, last, end + extra)
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)


def _sample(
    document_index: I32, lengths: I32, first: int, begin: int, last: int, end: int
) -> list[tuple[int, int, int]]:
    """Return runs from ``begin`` at position ``first`` to ``end`` at position ``last``."""
    valid = 0 <= first <= last < document_index.size
    runs = []
    for position in range(first, last + 1) if valid else ():
        document = int(document_index[position])
        valid = valid and 0 <= document < lengths.size
        length = int(lengths[document]) if valid else 0
        low = begin if position == first else 0
        high = end if position == last else length
        valid = valid and 0 <= low <= high <= length
        if low < high:
            runs.append((document, low, high - low))
    if not valid:
        raise InvalidArgument(
            f"sample_index: a sample from offset {begin} at position {first} to offset {end} at "
            f"position {last} of document_index leaves its documents; build the index again"
        )
    return runs


def span_table(indices: Sequence[IndexArrays]) -> list[IndexArrays]:
    """Return a table of the sources' arrays for `blended_spans`, in a form of the backend's own.

    ``indices`` holds the arguments of `array_spans` for each source, without the ids. The table
    keeps the arrays alive.
    """
    return list(indices)


def blended_spans(
    table: list[IndexArrays], which: I64, samples: I64
) -> tuple[I32, I64, I64, I64, I64]:
    """Return the token runs of ``samples[k]`` of source ``which[k]``, for every k.

    Returns:
        (source, document, offset, length, row_splits): int32 sources, then as `array_spans`.

    Raises:
        InvalidArgument: a source or sample does not exist, or the arrays are damaged.
    """
    parts = []
    for source, sample in zip(which.tolist(), samples, strict=True):
        if not 0 <= source < len(table):
            raise InvalidArgument(f"which: source {source} of {len(table)} sources")
        shuffle, rows, documents, lengths, extra = table[source]
        one = np.array([sample], np.int64)
        parts.append(array_spans(shuffle, rows, documents, lengths, extra, one))
    nothing = np.zeros(0, np.int64)
    document, offset, length = (
        np.concatenate([nothing, *(part[field] for part in parts)]) for field in range(3)
    )
    counts = [part[0].size for part in parts]
    splits = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return np.repeat(which, counts).astype(np.int32), document, offset, length, splits


def epoch_starts(
    key: U64, lengths: I32, copies: int, stride: int, out: I64, num_threads: int = 1
) -> None:
    """Fill ``out`` with the number of tokens before every stride-th position of a pass.

    A pass over ``copies`` epochs has ``copies * len(lengths)`` positions: position p holds document
    ``bijection(p) % len(lengths)``. ``out`` is int64[ceil(positions / stride) + 1]; its last entry
    is the tokens of the pass. With lengths 3 0 4 2 in the order 2 0 3 1, a stride of 2 gives 0 7 9.
    """
    size = copies * lengths.size
    position = np.arange(size)
    document = bijection_apply(key, size, position) % lengths.size
    out[0] = 0
    for row, begin in enumerate(range(0, size, stride)):
        out[row + 1] = out[row] + int(lengths[document[begin : begin + stride]].sum())


def epoch_begins(
    key: U64,
    lengths: I32,
    copies: int,
    stride: int,
    starts: I64,
    entries: I64,
    num_threads: int = 1,
) -> I64:
    """Return the token of a pass at which entries of the concatenated copies begin, int64[n].

    Entry ``c * len(lengths) + d`` is document d of copy c; ``starts`` is the result of
    `epoch_starts`. With lengths 3 0 4 2 in the order 2 0 3 1, entry 3 begins at token 7.
    """
    size = copies * lengths.size
    documents = bijection_apply(key, size, np.arange(size)) % lengths.size
    found = []
    for position in bijection_invert(key, size, entries).tolist():
        row = position // stride
        before = lengths[documents[row * stride : position]]
        found.append(int(starts[row]) + int(before.sum(dtype=np.int64)))
    return np.array(found, np.int64)


def epoch_spans(
    key: U64, lengths: I32, copies: int, stride: int, starts: I64, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    """Return the runs of tokens begins[k] … ends[k] - 1 of a pass.

    ``starts`` is the result of `epoch_starts`. Each request has at least one token.

    Returns:
        (document, offset, length, row_splits), all int64, as `array_spans`.
    """
    size = copies * lengths.size
    document = bijection_apply(key, size, np.arange(size)) % lengths.size
    runs, splits = [], [0]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        row = int(np.searchsorted(starts, begin, side="right")) - 1
        start, position = int(starts[row]), row * stride
        while start < end:
            stop = start + int(lengths[document[position]])
            low, high = max(start, begin), min(stop, end)
            if low < high:
                runs.append((int(document[position]), low - start, high - low))
            start, position = stop, position + 1
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)


def window_spans(
    pointers: I64, lengths: I32, item_size: int, first: int, stop: int, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    """Return the runs of tokens begins[k] … ends[k] - 1 of a .bin.

    Sequences ``first`` … ``stop - 1`` have ``lengths`` items of ``item_size`` bytes and begin at
    byte ``pointers``. Each request has at least one token, and 0 <= begin.

    Returns:
        (sequence, offset, length, row_splits), all int64, as `array_spans`.

    Raises:
        InvalidArgument: a sequence of a request does not begin where the one before it ends, or
            the next one does not begin where it ends.
    """
    runs: list[tuple[int, int, int]] = []
    splits = [0]
    start = pointers[first:stop]

    def refusal(sequence: int) -> InvalidArgument:
        low = int(pointers[sequence])
        return InvalidArgument(
            f"sequence {sequence} fills bytes {low} to {low + int(lengths[sequence]) * item_size} "
            "of the .bin, and the next one does not begin there"
        )

    def check_seam(sequence: int) -> None:
        end = int(pointers[sequence]) + int(lengths[sequence]) * item_size
        if sequence + 1 < stop and int(pointers[sequence + 1]) != end:
            raise refusal(sequence)

    for begin, end in zip((begins * item_size).tolist(), (ends * item_size).tolist(), strict=True):
        sequence = first + max(0, int(np.searchsorted(start, begin, side="right")) - 1)
        at = begin
        if sequence > first:
            check_seam(sequence - 1)
        while at < end:
            low = int(pointers[sequence])
            high = low + int(lengths[sequence]) * item_size
            fits = low <= at and (at - low) % item_size == 0
            if fits and at < min(high, end):
                run = (at - low) // item_size, (min(high, end) - at) // item_size
                runs.append((sequence, *run))
                at = min(high, end)
            check_seam(sequence)
            if at < end:
                if not fits or sequence + 1 == stop:
                    raise refusal(sequence)
                sequence += 1
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)
