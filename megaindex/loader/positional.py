"""Reads the tokens of a batch by positional reads instead of through the mapping.

Through a mapping the process waits in a page fault: one page at a time on a network file system,
with no error to handle but a signal that kills it. A positional read asks for exactly the bytes
that are needed, many at once, and fails with an error that names file and offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex import kernels
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.format.paths import pair_paths
from megaindex.index.spans import Spans
from megaindex.io.descriptors import DescriptorCache
from megaindex.io.pread import RangeReader
from megaindex.io.workers import Workers
from megaindex.kernels.types import I64, U8
from megaindex.loader.byte_ranges import Ranges, RunBytes, locate_bytes, merge, row_groups
from megaindex.loader.fetch import Errand, Fetch

_PIECE = 1 << 20  # a longer range is read in pieces, by several threads
_ERRAND = 8  # pieces of a file that one thread reads in turn


@dataclass(frozen=True, kw_only=True)
class PositionalOptions:
    """How files are read; the defaults suit disks and network file systems alike."""

    threads: int = 16
    """Reads in flight for all batches together."""
    merge_gap: int = 16 << 10
    """Ranges of a file at most this many bytes apart are read as one."""
    bytes_in_flight: int = 64 << 20
    """Bound of the staging buffer of a batch; rows beyond it are read after the first. A single
    row may exceed it."""
    timeout: float = 120.0
    """Seconds without a single finished read of the batch after which it counts as stalled."""

    def __post_init__(self) -> None:
        if self.threads < 1 or self.merge_gap < 0 or self.bytes_in_flight < 1 or self.timeout <= 0:
            raise InvalidArgument(f"{self}: sizes, threads and times must be positive")


class PositionalTokens:
    """The tokens of ``datasets`` as a `TokenReader`. Safe to share between threads.

    The number of open files is bounded whatever the number of datasets. A file that is truncated,
    replaced or removed under a running job raises StorageError; it never kills the process.

    Pickles and forks: a child opens the files anew.

    Args:
        datasets: in the order of the index's sources.
        options: how to read.
        reader: descriptors and retries.
    """

    def __init__(
        self,
        datasets: Sequence[IndexedDataset],
        options: PositionalOptions | None = None,
        *,
        reader: RangeReader | None = None,
    ) -> None:
        self._datasets = tuple(datasets)
        self._paths = tuple(pair_paths(dataset.path_prefix)[0] for dataset in self._datasets)
        self._options = options or PositionalOptions()
        self._reader = reader or RangeReader(descriptors=DescriptorCache())
        self._workers = Workers(self._options.threads)
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
            ranges = merge(part, self._options.merge_gap)
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

    def _take_staging(self, nbytes: int) -> U8:
        """A reused buffer: fresh memory costs more in page faults than the copying."""
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = np.empty(0, np.uint8)
        return staging if staging.size >= nbytes else np.empty(-(-nbytes // 4096) * 4096, np.uint8)

    def _fetch(self, ranges: Ranges, staging: U8) -> None:
        fetch = Fetch(self._reader, self._errands(ranges, staging))
        for _ in range(min(self._options.threads, len(fetch.errands))):
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
            path = self._paths[source]
            for done in range(0, nbytes, _PIECE):
                piece = begin + done, memory[at + done : at + min(done + _PIECE, nbytes)]
                if not errands or errands[-1].path != path or len(errands[-1].pieces) == _ERRAND:
                    errands.append(Errand(path, self._datasets[source].nbytes, []))
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
