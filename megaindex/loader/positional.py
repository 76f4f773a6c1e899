"""Reads the tokens of a batch by positional reads instead of through the mapping.

Through a mapping the process waits in a page fault: one page at a time on a network file system,
with no error to handle but a signal that kills it. A positional read asks for exactly the bytes
that are needed, many at once, and fails with an error that names file and offset.

Files and objects of a store are read alike, and may be mixed: what differs is how much a read
costs, and who makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megaindex import kernels
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.plain import check_number, make_plain
from megaindex.index.spans import Spans
from megaindex.io.descriptors import DescriptorCache
from megaindex.io.facts import Facts
from megaindex.io.locations import is_remote
from megaindex.io.objects.reading import MERGE_GAP, PIECE, read_each
from megaindex.io.pread import RangeReader
from megaindex.io.workers import Workers
from megaindex.kernels.types import I64, U8
from megaindex.loader.byte_ranges import Ranges, RunBytes, locate_bytes, merge, row_groups
from megaindex.loader.fetch import Errand, Fetch, ReadEach


@dataclass(frozen=True, kw_only=True)
class Medium:
    """What reads cost where the tokens are."""

    threads: int
    """Reads in flight that keep it busy."""
    merge_gap: int
    """Bytes that are read in less time than another read takes to begin."""
    piece: int
    """A longer range is read in pieces, by several threads."""
    errand: int
    """Pieces that one thread reads in turn: of a file the kernel knows them all ahead."""


FILES = Medium(threads=16, merge_gap=16 << 10, piece=1 << 20, errand=8)
OBJECTS = Medium(threads=64, merge_gap=MERGE_GAP, piece=PIECE, errand=1)
"""A request takes some 30 ms to begin, and then gets some 50 MB a second."""


@dataclass(frozen=True, kw_only=True)
class PositionalOptions:
    """How files and objects are read; the defaults suit disks and network file systems alike, and
    object stores."""

    threads: int | None = None
    """Reads in flight for all batches together. Default: 16, or 64 if an object store is read."""
    merge_gap: int | None = None
    """Ranges of a file at most this many bytes apart are read as one. Default: 16 KiB in files,
    256 KiB in objects."""
    bytes_in_flight: int = 64 << 20
    """Bound of the staging buffer of a batch; rows beyond it are read after the first, and less is
    merged. A single row may exceed it."""
    timeout: float = 120.0
    """Seconds without a single finished read of the batch after which it counts as stalled."""

    def __post_init__(self) -> None:
        make_plain(self, "bytes_in_flight", optional=["threads", "merge_gap"])
        object.__setattr__(self, "timeout", check_number("timeout", self.timeout))
        threads = 1 if self.threads is None else self.threads
        gap = self.merge_gap or 0
        if threads < 1 or gap < 0 or self.bytes_in_flight < 1 or self.timeout <= 0:
            raise InvalidArgument(f"{self}: sizes, threads and times must be positive")


class PositionalTokens:
    """The tokens of ``datasets`` as a `TokenReader`. Safe to share between threads.

    The number of open files is bounded whatever the number of datasets. A file that is truncated,
    replaced or removed under a running job raises StorageError; it never kills the process.

    Of an object store it asks for the version that was opened, and gets it or StorageError.

    Pickles and forks: a child opens the files anew, and makes its own connections.

    Args:
        datasets: in the order of the index's sources.
        options: how to read.
        reader: descriptors and retries, for files.
    """

    def __init__(
        self,
        datasets: Sequence[IndexedDataset],
        options: PositionalOptions | None = None,
        *,
        reader: RangeReader | None = None,
    ) -> None:
        self._datasets = tuple(datasets)
        self._options = options or PositionalOptions()
        self._reader = reader or RangeReader(descriptors=DescriptorCache())
        self._files = tuple(dataset.bin_facts for dataset in self._datasets)
        self._media = tuple(OBJECTS if is_remote(f.path) else FILES for f in self._files)
        self._reads = tuple(self._reads_of(facts) for facts in self._files)
        gap = self._options.merge_gap
        gaps = [medium.merge_gap if gap is None else gap for medium in self._media]
        self._gaps = np.array(gaps, np.int64)
        self._threads = self._options.threads or max(
            (medium.threads for medium in self._media), default=FILES.threads
        )
        self._workers = Workers(self._threads)
        self._staging: list[U8] = []  # those not in use, at most one for each concurrent read
        kinds = sorted({dataset.dtype for dataset in self._datasets}, key=str)
        self._kinds = kinds
        self._kind = np.array([kinds.index(d.dtype) for d in self._datasets], np.int32)

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        return self._datasets

    def read(
        self,
        spans: Spans,
        out: np.ndarray[Any, Any],
        labels: np.ndarray[Any, Any] | None = None,
        *,
        pad_id: int,
        num_threads: int = 1,
    ) -> None:
        """Row k of ``out`` gets the tokens of the k-th sample, of ``labels`` those one ahead.

        Raises:
            OutOfRange, FormatError: a run that the files do not hold; nothing is read.
            StorageError: a read failed, stalled, or met another file than before. Rows may have
                been written.
        """
        runs = locate_bytes(self._datasets, spans)
        for first, stop in row_groups(spans, runs.nbytes, self._options.bytes_in_flight):
            begin, end = int(spans.row_splits[first]), int(spans.row_splits[stop])
            part = RunBytes(
                source=runs.source[begin:end],
                begin=runs.begin[begin:end],
                nbytes=runs.nbytes[begin:end],
            )
            ranges = self._merged(part)
            staging = self._take_staging(ranges.staging_nbytes)
            self._fetch(ranges, staging)
            self._gather(
                part, ranges, staging,
                spans.length[begin:end], spans.row_splits[first : stop + 1] - begin,
                out[first:stop], None if labels is None else labels[first:stop],
                pad_id, num_threads,
            )  # fmt: skip
            self._staging.append(staging)

    def close(self) -> None:
        """End the threads and close the files."""
        self._workers.close()
        self._reader.descriptors.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PositionalTokens, (self._datasets, self._options)

    def _reads_of(self, facts: Facts) -> ReadEach:
        if is_remote(facts.path):
            return partial(read_each, facts)
        return partial(self._reader.read_each, facts)

    def _merged(self, part: RunBytes) -> Ranges:
        """As far apart as the gaps allow, and what lies between still fits the staging buffer."""
        gaps = self._gaps
        while True:
            ranges = merge(part, gaps)
            if ranges.staging_nbytes <= self._options.bytes_in_flight or not gaps.any():
                return ranges
            gaps = gaps // 4

    def _take_staging(self, nbytes: int) -> U8:
        """A reused buffer: fresh memory costs more in page faults than the copying."""
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = np.empty(0, np.uint8)
        return staging if staging.size >= nbytes else np.empty(-(-nbytes // 4096) * 4096, np.uint8)

    def _fetch(self, ranges: Ranges, staging: U8) -> None:
        fetch = Fetch(self._errands(ranges, staging))
        for _ in range(min(self._threads, len(fetch.errands))):
            self._workers.submit(fetch.run)
        try:
            fetch.wait(self._options.timeout)
        finally:
            self._workers.write_off(len(fetch.hanging))

    def _errands(self, ranges: Ranges, staging: U8) -> list[Errand]:
        memory = staging.data
        errands: list[Errand] = []
        columns = (ranges.source, ranges.begin, ranges.nbytes, ranges.at)
        for source, begin, nbytes, at in zip(*(c.tolist() for c in columns), strict=True):
            path, medium = self._files[source].path, self._media[source]
            for done in range(0, nbytes, medium.piece):
                piece = begin + done, memory[at + done : at + min(done + medium.piece, nbytes)]
                same = errands and errands[-1].path == path
                if not same or len(errands[-1].pieces) == medium.errand:
                    errands.append(Errand(path, self._reads[source], []))
                errands[-1].pieces.append(piece)
        return errands

    def _gather(
        self,
        runs: RunBytes,
        ranges: Ranges,
        staging: U8,
        length: I64,
        row_splits: I64,
        out: np.ndarray[Any, Any],
        labels: np.ndarray[Any, Any] | None,
        pad_id: int,
        num_threads: int,
    ) -> None:
        """The staging buffer is a small dataset: run k of the batch is its sequence k."""
        backend = kernels.active()
        lengths = length.astype(np.int32)
        table = backend.token_table(
            [(staging[: staging.size // 64 * 64].view(kind), ranges.run_at, lengths)
             for kind in self._kinds]
        )  # fmt: skip
        number = np.arange(length.size)
        bad = backend.gather(
            table, self._kind[runs.source], number, np.zeros_like(number), length, row_splits,
            out, labels, pad_id, num_threads,
        )  # fmt: skip
        assert bad == -1, "the runs were checked before they were read"
