"""Readers of the tokens of located samples: their interface, and those that use a mapping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaindex._types import I64, IntArray
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import Tables
from megaindex.index.spans import Spans
from megaindex.io.mapping import major_faults, resident_pages, will_need
from megaindex.kernels import active

_PROBES = 8  # ranges of a batch that are looked at
_WARM_AFTER = 16  # batches in a row whose probes were all in memory
_MERGE_GAP = 16 << 10
_ALIGNMENT = 64  # of every range in the staging buffer: enough for any token type


@dataclass(slots=True, eq=False)  # not frozen: one is made for each batch, in a microsecond
class ReadRequest:
    """Samples to read and the arrays they are written to, see `TokenReader.read`."""

    spans: Spans
    out: IntArray
    labels: IntArray | None
    pad_id: int
    num_threads: int

    def rows(self, first: int, stop: int) -> ReadRequest:
        """Return the request for some of the rows."""
        splits = self.spans.row_splits[first : stop + 1]
        source, document, offset, length = (run[splits[0] : splits[-1]] for run in self.spans)
        return replace(
            self,
            spans=Spans(source, document, offset, length, splits - splits[0]),
            out=self.out[first:stop],
            labels=None if self.labels is None else self.labels[first:stop],
        )

    def gather(self, table: Any) -> int:
        """Copy the tokens from a kernels' table; return the first run not in it, or -1."""
        source, document, offset, length = self.spans
        return active().gather(
            table,
            source,
            document,
            offset,
            length,
            self.spans.row_splits,
            self.out,
            self.labels,
            self.pad_id,
            self.num_threads,
        )


class TokenReader(ABC):
    """A reader of the tokens of ``datasets``; safe to share between threads.

    A reader defines `fill`.

    Args:
        datasets: in the order of the index's sources.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        self._datasets = tuple(datasets)

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The sources, in the order of the index."""
        return self._datasets

    def read(
        self,
        spans: Spans,
        out: IntArray,
        labels: IntArray | None = None,
        *,
        pad_id: int,
        num_threads: int = 1,
    ) -> None:
        """Fill row k of ``out`` with the tokens of the k-th sample of ``spans``.

        A row shorter than ``out`` is wide is filled up with ``pad_id``, of a longer one the first
        tokens are taken. ``labels[k, j]`` is the token after ``out[k, j]``, also where that is the
        first one beyond the row; ``pad_id`` after the last token.

        Args:
            spans: of n samples, the sources numbered as the reader's datasets.
            out: int64, int32 or float32 [n, width], the cells of a row side by side.
            labels: None, or another array like ``out``.
            pad_id: a value of ``out``'s dtype.
            num_threads: most threads to copy with; few tokens are copied by one.

        Raises:
            InvalidArgument: ``out`` does not hold every token of the datasets.
            OutOfRange: a run is not one of the datasets'.
            FormatError: a file is damaged.
            StorageError: a file cannot be read.
        """
        self.fill(ReadRequest(spans, out, labels, pad_id, num_threads))

    @abstractmethod
    def fill(self, request: ReadRequest) -> None:
        """Read the samples of a request into its arrays; raises as `read`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._datasets,)


class MappedTokens(TokenReader):
    """The tokens of ``datasets`` through their mappings; safe to share between threads.

    Datasets that are not open yet are opened when a batch first reads them.

    Where the reads are cold, each page waits for the one before it: see `PositionalTokens`.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        super().__init__(datasets)
        self._tables = Tables(
            len(self._datasets),
            lambda number: source_arrays(self._datasets[number]),
            active().token_table,
            ready=all(dataset.is_open for dataset in self._datasets),
        )

    def fill(self, request: ReadRequest) -> None:
        spans = request.spans
        table, source = self._tables.holding(spans.source)
        if source is not None:
            request = replace(request, spans=replace(spans, source=source))
        bad = request.gather(table)
        if bad >= 0:
            refuse_run(self._datasets, spans, bad)


class PrefetchingTokens(MappedTokens):
    """Tokens through mappings, with the pages of a batch requested ahead while they are cold.

    A page fault waits for one read of the device, and the next fault begins after it. With all runs
    of a batch requested first, the kernel reads them at the same time: ten times faster on a disk.
    A request costs a call for each run, too much for pages in memory; so it is made only while
    pages are found missing.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        super().__init__(datasets)
        self._warm_batches = 0  # in a row; reads at once from _WARM_AFTER on

    def fill(self, request: ReadRequest) -> None:
        if self._warm_batches < _WARM_AFTER:
            warm = self.prefetch(request.spans)
            self._warm_batches = self._warm_batches + 1 if warm else 0
        before = major_faults()
        super().fill(request)
        if major_faults() > before and self._warm_batches >= _WARM_AFTER:
            self._warm_batches = 0

    def prefetch(self, spans: Spans) -> bool:
        """Request the pages of these runs; return True if all that were probed are in memory."""
        ranges = merge(locate_bytes(self._datasets, spans), _MERGE_GAP)
        columns = ranges.source.tolist(), ranges.begin.tolist(), ranges.nbytes.tolist()
        places = [
            (_address(self._datasets[source]) + begin, nbytes)
            for source, begin, nbytes in zip(*columns, strict=True)
        ]
        step = -(-len(places) // _PROBES) or 1
        warm = True
        for place in places[::step]:
            there, pages = resident_pages(*place)
            warm &= there == pages
        if not warm:
            for place in places:
                will_need(*place)
        return warm


def _address(dataset: IndexedDataset) -> int:
    return int(dataset.tokens.__array_interface__["data"][0])


def source_arrays(dataset: IndexedDataset) -> tuple[IntArray, IntArray, IntArray]:
    """Return the tokens, pointers and lengths of a dataset, as the kernels take them.

    Raises:
        InvalidArgument: its tokens are of a dtype that no batch holds.
    """
    if dataset.dtype.kind not in "iuf" or not dataset.dtype.isnative:
        raise InvalidArgument(
            f"{dataset.path_prefix}: tokens are {dataset.dtype}; batches are made of integers and "
            "floats of this machine's byte order"
        )
    return dataset.tokens, dataset.sequence_pointers, dataset.sequence_lengths


def refuse_run(datasets: Sequence[IndexedDataset], spans: Spans, run: int) -> None:
    """Raise the error of a run that a kernel refused.

    Raises:
        OutOfRange: the dataset or sequence does not exist, or the run leaves its sequence.
        FormatError: the sequence lies outside the ``.bin``.
    """
    source, document, offset, length = (int(column[run]) for column in spans)
    if not 0 <= source < len(datasets):
        raise OutOfRange(
            f"a sample reads source {source}, and there are {len(datasets)} datasets; give the "
            "datasets that the index was built from, in its order"
        )
    dataset = datasets[source]
    if not 0 <= document < len(dataset):
        raise OutOfRange(
            f"{dataset.path_prefix}: a sample reads sequence {document}, and there are "
            f"{len(dataset)}; give the dataset that the index was built from"
        )
    dataset.get(document, offset, length)
    raise AssertionError("a kernel refused a run that the dataset reads")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunBytes:
    """The bytes of runs of tokens, in the order of the runs."""

    source: I64
    begin: I64
    """First byte, in the .bin of the source."""
    nbytes: I64

    def part(self, begin: int, end: int) -> RunBytes:
        """Return some of the runs."""
        runs = slice(begin, end)
        return RunBytes(source=self.source[runs], begin=self.begin[runs], nbytes=self.nbytes[runs])


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
    """Return the bytes of the runs, each checked against the .idx and the size of the .bin.

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
    """Return ranges that hold all the runs; runs of a file at most ``gap`` bytes apart share one.

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
    """Yield bounds of consecutive rows, at least one, whose runs take at most ``limit`` bytes."""
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
    """Return the first byte of each run; -1 if it is not in the dataset."""
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


def row_tokens(spans: Spans) -> I64:
    """Return how many tokens each row has, int64[rows]."""
    return np.diff(np.concatenate(([0], np.cumsum(spans.length)))[spans.row_splits])
