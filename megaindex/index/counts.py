"""Samples of each source in a range of positions, and the next sample of each, without locating.

A hole serves nothing, and a sample that is served again counts again. A *reading* is a source in
samples of one sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from megaindex._types import I64, IntArray
from megaindex.index.spans import (
    Index,
    ShownIndex,
    check_range,
    check_sources,
    separates_documents,
    sequence_lengths_at,
)

_AT_ONCE = 1 << 18  # entries of an array

CountsByLength: TypeAlias = dict[int, I64]
"""Samples of each source, int64[sources], by sequence length."""
Cursors: TypeAlias = dict[tuple[int, int], int]
"""Next sample of each reading, by number of the source and sequence length."""


def counts_by_length(index: Index, begin: int, end: int) -> CountsByLength:
    """Return the samples that positions ``begin`` to ``end - 1`` serve, by sequence length.

    Raises:
        OutOfRange: the range is outside the index.
        InvalidArgument: the arrays of a blend name a source that it does not have.
    """
    begin, end = check_range(index, begin, end)
    if isinstance(index, ShownIndex):
        return index.counts_by_length(begin, end)
    return counts_of(index, range(begin, end))


def source_counts(index: Index, begin: int, end: int, num_sources: int = 1) -> I64:
    """Return int64[sources]: samples of each source that positions ``begin`` to ``end - 1`` serve.

    Args:
        num_sources: least number of sources, for an index that does not know how many it has.

    Raises:
        OutOfRange, InvalidArgument: as `counts_by_length`.
    """
    total = np.zeros(max(num_sources, len(separates_documents(index))), np.int64)
    for counts in counts_by_length(index, begin, end).values():
        total = added(total, counts)
    return total


def counts_of(index: Index, samples: range | I64) -> CountsByLength:
    """Return the counts of samples in any order, whose sources are looked up."""
    found: CountsByLength = {}
    for at in range(0, len(samples), _AT_ONCE):
        ids = np.asarray(samples[at : at + _AT_ONCE], np.int64)
        source, _ = origin_of(index, ids)
        lengths = np.broadcast_to(sequence_lengths_at(index, ids), ids.shape)
        for length in np.unique(lengths).tolist():
            counts = {length: np.bincount(source[lengths == length]).astype(np.int64)}
            found = add_counts([found, counts])
    return found


def origin_of(index: Any, ids: I64) -> tuple[I64, I64]:
    """Return the source and the sample of that source of each sample, int64[n] each."""
    origin = getattr(index, "origin", None)
    if origin is not None:
        found: tuple[I64, I64] = origin(ids)
        return found
    spans = index.locate(ids)
    return spans.source[spans.row_splits[:-1]].astype(np.int64), ids


def add_counts(pieces: Iterable[CountsByLength]) -> CountsByLength:
    """Return the sum of counts, some of which may have more sources."""
    total: CountsByLength = {}
    for piece in pieces:
        for length, counts in piece.items():
            total[length] = added(total[length], counts) if length in total else counts
    return total


def added(a: I64, b: I64) -> I64:
    """Return the sums of two arrays, of which one may be longer."""
    size = max(a.size, b.size)
    return np.pad(a, (0, size - a.size)) + np.pad(b, (0, size - b.size))


def drawn_counts(dataset_index: IntArray, num_sources: int) -> I64:
    """Return int64[num_sources]: how often each source is drawn, in constant memory.

    Raises:
        InvalidArgument: an entry is not the number of a source.
    """
    counts = np.zeros(num_sources, np.int64)
    for begin in range(0, dataset_index.size, _AT_ONCE):
        drawn = dataset_index[begin : begin + _AT_ONCE]
        check_sources(drawn, num_sources)
        counts += np.bincount(drawn, minlength=num_sources)
    return counts


def cursors(index: Any, position: int) -> Cursors:
    """Return the sample with which each reading goes on at a position.

    That is the one after the last that it drew before the position, skipped ones included; of a
    reading that has not begun, its first. Samples are numbered as by ``origin``; of a blend, by its
    draws of the source.

    Raises:
        OutOfRange: the index has no such position.
        InvalidArgument: samples before the position are served in an order that has no next one.
    """
    _, position = check_range(index, 0, position)
    if hasattr(index, "cursors"):
        found: Cursors = index.cursors(position)
        return found
    return draws_before(index, position)


def draws_before(index: Index, position: int) -> Cursors:
    """Return the number of samples of each reading that are served before a position."""
    return {
        (source, length): count
        for length, counts in counts_by_length(index, 0, position).items()
        for source, count in enumerate(counts.tolist())
    }
