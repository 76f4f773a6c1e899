"""Readers of the tokens of located samples: the interface, and readers through mappings."""

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

_PROBES = 8  # ranges of a batch whose residency is probed
_WARM_AFTER = 16  # consecutive batches whose probes were all in memory
_MERGE_GAP = 16 << 10
_ALIGNMENT = 64  # bytes, of ranges in the staging buffer: enough for any token type


@dataclass(slots=True, eq=False)  # not frozen, which costs time for each batch
class ReadRequest:
    """Samples to read and the arrays to fill, see `TokenReader.read`."""

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
        """Copy the tokens from a kernel's table; return the first span not in it, or -1."""
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
    """Reader of the tokens of some datasets; safe to share between threads.

    Subclasses define `fill`.

    Args:
        datasets: the sources, in the order of the index.
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

        A sample shorter than the row is filled up with ``pad_id``; a longer one is cut. Padding
        before a span is ``pad_id`` too.
        ``labels[k, j]`` is the token after ``out[k, j]``, also if that is the first beyond the row;
        after the last token it is ``pad_id``.

        Args:
            spans: spans of n samples, the sources numbered as the reader's datasets.
            out: int64, int32 or float32 [n, width], with contiguous rows.
            labels: None, or another array like ``out``.
            pad_id: a value of ``out``'s dtype.
            num_threads: maximum number of threads; few tokens are copied by one.

        Raises:
            InvalidArgument: the tokens of a dataset do not fit the dtype of ``out``.
            OutOfRange: a span lies outside the datasets.
            FormatError: a file is damaged.
            StorageError: a file cannot be read.
        """
        self.fill(ReadRequest(spans, out, labels, pad_id, num_threads))
        if spans.padding is not None:
            spread(spans, [out] if labels is None else [out, labels], pad_id)

    @abstractmethod
    def fill(self, request: ReadRequest) -> None:
        """Read the samples of a request into its arrays; raises as `read`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._datasets,)


class MappedTokens(TokenReader):
    """Reader through memory mappings; safe to share between threads.

    Lazy datasets are opened when a batch first reads them. Pages that are not in memory are read
    one after the other; `PositionalTokens` reads them concurrently.

    Args:
        datasets: the sources, in the order of the index; on this machine's file systems.
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
    """Reader through mappings that requests the pages of a batch ahead while they are cold.

    A page fault waits for one read of the device, and the next fault starts after it. With all
    spans of a batch requested first, the kernel reads them concurrently: ten times faster on a
    disk. A request costs a system call for each range, so it is made only while pages are missing.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        super().__init__(datasets)
        self._warm_batches = 0  # consecutive

    def fill(self, request: ReadRequest) -> None:
        if self._warm_batches < _WARM_AFTER:
            warm = self.prefetch(request.spans)
            self._warm_batches = self._warm_batches + 1 if warm else 0
        before = major_faults()
        super().fill(request)
        if major_faults() > before and self._warm_batches >= _WARM_AFTER:
            self._warm_batches = 0

    def prefetch(self, spans: Spans) -> bool:
        """Request the pages of these spans; return True if all that were probed are in memory."""
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


def spread(spans: Spans, arrays: Sequence[IntArray], pad_id: int) -> None:
    """Move the tokens of contiguous spans to their places in the rows.

    Args:
        spans: spans of n samples, with ``padding``.
        arrays: int[n, width] each, the tokens of the spans one after another; changed in place.
        pad_id: value of the places that no span covers.
    """
    assert spans.padding is not None, "as the reader checked"
    width = arrays[0].shape[1]
    row = spans.rows
    begins, ends = (np.minimum(each, width) for each in spans.bounds_in_samples())
    rows = spans.row_splits.size - 1
    # at each place the padding before it, or the width + 1 where it is padding itself
    steps = np.zeros((rows, width + 1), np.int64)
    steps[:, 0] = -1
    np.add.at(steps, (row, begins), spans.padding + 1)
    np.add.at(steps, (row, ends), -spans.padding - 1)
    shift = np.cumsum(steps[:, :width], axis=1)
    covered = shift >= 0
    read = np.arange(width) - np.where(covered, shift, 0)
    for array in arrays:
        array[:] = np.where(covered, np.take_along_axis(array, read, axis=1), pad_id)


def _address(dataset: IndexedDataset) -> int:
    return int(dataset.tokens.__array_interface__["data"][0])


def source_arrays(dataset: IndexedDataset) -> tuple[IntArray, IntArray, IntArray]:
    """Return the tokens, pointers and lengths of a dataset, as the kernels take them."""
    if dataset.dtype.kind not in "iuf" or not dataset.dtype.isnative:
        raise InvalidArgument(
            f"{dataset.path_prefix}: tokens must be integers or floats of this machine's byte "
            f"order, got {dataset.dtype}"
        )
    return dataset.tokens, dataset.sequence_pointers, dataset.sequence_lengths


def refuse_run(datasets: Sequence[IndexedDataset], spans: Spans, run: int) -> None:
    """Raise OutOfRange or FormatError for a span that a kernel refused."""
    source, document, offset, length = (int(column[run]) for column in spans)
    if not 0 <= source < len(datasets):
        raise OutOfRange(
            f"a sample reads source {source}, and there are {len(datasets)} datasets; give the "
            "datasets from which the index was built, in the order of the index"
        )
    dataset = datasets[source]
    if not 0 <= document < len(dataset):
        raise OutOfRange(
            f"{dataset.path_prefix}: a sample reads sequence {document}, and there are "
            f"{len(dataset)}; give the dataset from which the index was built"
        )
    dataset.get(document, offset, length)
    raise AssertionError("a kernel refused a span that the dataset reads")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunBytes:
    """Bytes of the spans of a request, one entry for each span."""

    source: I64
    begin: I64
    """First byte, in the .bin of the source."""
    nbytes: I64

    def part(self, begin: int, end: int) -> RunBytes:
        runs = slice(begin, end)
        return RunBytes(source=self.source[runs], begin=self.begin[runs], nbytes=self.nbytes[runs])


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """Ranges to read, sorted by file and position."""

    source: I64
    begin: I64
    nbytes: I64
    at: I64
    """Offset of each range in the staging buffer."""
    run_at: I64
    """int64[spans]: offset of each span there."""
    staging_nbytes: int


def locate_bytes(datasets: Sequence[IndexedDataset], spans: Spans) -> RunBytes:
    """Return the bytes of the spans, each checked against the .idx and the size of the .bin.

    Raises:
        OutOfRange: a source, sequence or range of tokens does not exist.
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
    """Return ranges that cover all spans; those of a file at most ``gap`` bytes apart share one.

    With a gap of 10, bytes 0-9, 50-59 and 15-20 of a file become 0-20 and 50-59. An array holds the
    gap of each source.
    """
    sources, rank = np.unique(runs.source, return_inverse=True)
    end = runs.begin + runs.nbytes
    gaps = np.full(sources.size, gap) if np.isscalar(gap) else np.asarray(gap)[sources]
    # all files on one axis, at distances above their gaps
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
    """Yield bounds of groups of rows that take at most ``limit`` bytes, or hold a single row."""
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
    if (source == source[0]).all():  # the most frequent case
        yield int(source[0]), slice(None)
        return
    order = np.argsort(source, kind="stable")
    numbers, starts = np.unique(source[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)


def _begins(dataset: IndexedDataset, document: I64, offset: I64, length: I64) -> I64:
    """Return the first byte of each span; -1 if it is not in the dataset."""
    known = (document >= 0) & (document < len(dataset))
    if not known.all():
        return np.where(known, 0, -1)
    size = dataset.sequence_lengths[document].astype(np.int64)
    bad = (offset < 0) | (length < 0) | (offset > size) | (length > size - offset)
    itemsize = dataset.dtype.itemsize
    pointer = dataset.sequence_pointers[document].astype(np.int64)
    room = (dataset.nbytes - pointer) // itemsize  # tokens to the end of the file
    bad |= (pointer < 0) | (pointer % itemsize != 0) | (size > room)
    return np.where(bad, -1, pointer + offset * itemsize)
