"""Which bytes of which files hold the tokens of a batch, and where they go in a staging buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megaindex.format import IndexedDataset
from megaindex.index.spans import Spans
from megaindex.kernels.types import I64
from megaindex.loader.tokens import refuse_run

_ALIGNMENT = 64  # of every range in the staging buffer: enough for any token type


@dataclass(frozen=True, kw_only=True, eq=False)
class RunBytes:
    """The bytes of runs of tokens, in the order of the runs."""

    source: I64
    begin: I64
    """First byte, in the .bin of the source."""
    nbytes: I64


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """Ranges to read, sorted by file and position."""

    source: I64
    begin: I64
    nbytes: I64
    at: I64
    """Where each range goes in the staging buffer."""
    run_at: I64
    """int64[runs]: where each run begins there."""
    staging_nbytes: int


def locate_bytes(datasets: Sequence[IndexedDataset], spans: Spans) -> RunBytes:
    """Where the runs lie in their files, each checked against the .idx and the size of the .bin.

    Raises:
        OutOfRange: a source, sequence or range of tokens that does not exist.
        FormatError: a sequence lies outside its .bin, or begins inside a token.
    """
    source = spans.source.astype(np.int64)
    begin, nbytes = np.full_like(spans.offset, -1), np.empty_like(spans.offset)
    for number, runs in _runs_by_source(source):
        if 0 <= number < len(datasets):
            part = spans.document[runs], spans.offset[runs], spans.length[runs]
            begin[runs] = _begins(datasets[number], *part)
            nbytes[runs] = part[2] * datasets[number].dtype.itemsize
    if begin.size and begin.min() < 0:
        refuse_run(datasets, spans, int(begin.argmin()))
    return RunBytes(source=source, begin=begin, nbytes=nbytes)


def merge(runs: RunBytes, gap: int | I64) -> Ranges:
    """Ranges that hold all the runs; runs of a file at most ``gap`` bytes apart share one.

    With a gap of 10, bytes 0-9, 50-59 and 15-20 of a file become 0-20 and 50-59. An array gives
    each source a gap of its own.
    """
    sources, rank = np.unique(runs.source, return_inverse=True)
    end = runs.begin + runs.nbytes
    gaps = np.full(sources.size, gap) if np.isscalar(gap) else np.asarray(gap)[sources]
    # one axis for all files, each a stretch of its own that no gap bridges
    reach = np.zeros(sources.size, np.int64)
    np.maximum.at(reach, rank, end)
    stretch = reach + gaps + 1
    shift = (np.cumsum(stretch) - stretch)[rank]
    order = np.argsort(runs.begin + shift, kind="stable")
    begins, ends = (runs.begin + shift)[order], np.maximum.accumulate((end + shift)[order])
    first = np.ones(order.size, bool)
    first[1:] = begins[1:] > ends[:-1] + gaps[rank[order[:-1]]]
    starts = np.flatnonzero(first)
    lasts = np.append(starts[1:], order.size)[: starts.size] - 1
    nbytes = ends[lasts] - begins[starts]
    room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    at = np.cumsum(room) - room
    number = np.cumsum(first) - 1  # of the range that holds each run
    run_at = np.empty_like(begins)
    run_at[order] = at[number] + begins - begins[starts][number]
    chosen = order[starts]
    return Ranges(
        source=runs.source[chosen],
        begin=runs.begin[chosen],
        nbytes=nbytes,
        at=at,
        run_at=run_at,
        staging_nbytes=int(room.sum()),
    )


def row_groups(spans: Spans, nbytes: I64, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive rows whose runs take at most ``limit`` bytes together; at least one row each."""
    ends = np.concatenate(([0], np.cumsum(nbytes)))[spans.row_splits]
    row, rows = 0, spans.row_splits.size - 1
    while row < rows:
        fitting = int(np.searchsorted(ends, ends[row] + limit, side="right")) - 1
        stop = min(max(fitting, row + 1), rows)
        yield row, stop
        row = stop


def _runs_by_source(source: I64) -> Iterator[tuple[int, I64 | slice]]:
    if not source.size:
        return
    if (source == source[0]).all():  # by far the most frequent
        yield int(source[0]), slice(None)
        return
    order = np.argsort(source, kind="stable")
    numbers, starts = np.unique(source[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)


def _begins(dataset: IndexedDataset, document: I64, offset: I64, length: I64) -> I64:
    """First byte of each run; -1 for what is not in the dataset."""
    known = (document >= 0) & (document < len(dataset))
    if not known.all():
        return np.where(known, 0, -1)
    size = dataset.sequence_lengths[document].astype(np.int64)
    bad = (offset < 0) | (length < 0) | (offset > size) | (length > size - offset)
    itemsize = dataset.dtype.itemsize
    pointer = dataset.sequence_pointers[document].astype(np.int64)
    room = (dataset.nbytes - pointer) // itemsize  # tokens from there to the end of the file
    bad |= (pointer < 0) | (pointer % itemsize != 0) | (size > room)
    return np.where(bad, -1, pointer + offset * itemsize)
