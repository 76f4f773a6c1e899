"""Reader of tokens by positional reads, of files and of objects in a store; choice of a reader.

Through a mapping the process waits in page faults, one page at a time on a network file system, and
a failing read kills it by a signal. Positional reads fetch exactly the bytes needed, many at the
same time, and fail with an error that names file and offset. Objects require them.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeGuard

import numpy as np

from megaindex._types import U8
from megaindex.errors import InvalidArgument, StorageError
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index, check_index, datasets_of
from megaindex.io.mapping import DescriptorCache, RangeReader
from megaindex.io.paths import check_local, file_system_type, is_local, is_remote
from megaindex.io.threads import Workers
from megaindex.kernels import active
from megaindex.loader.token_readers import (
    MappedTokens,
    PrefetchingTokens,
    Ranges,
    ReadRequest,
    RunBytes,
    TokenReader,
    locate_bytes,
    merge,
    row_groups,
)
from megaindex.objects.store import MERGE_GAP, PIECE, read_each
from megaindex.validation import check_choice, check_number, make_plain, shown

Piece = tuple[int, memoryview]
"""Offset in a file or object, and the memory to fill."""
ReadEach = Callable[[Sequence[Piece]], Iterable[None]]
"""Fills the pieces of one file or object in turn, yielding after each."""


@dataclass(eq=False)
class ReadTask:
    """Pieces of one file that one thread reads in turn."""

    path: str
    read_each: ReadEach
    pieces: list[Piece]
    done: int = 0
    """Number of pieces read."""

    @property
    def offset(self) -> int:
        """Offset of the current read."""
        return self.pieces[min(self.done, len(self.pieces) - 1)][0]


class Fetch:
    """Reads of a batch; each thread calls `run`, the reader calls `wait`."""

    def __init__(self, tasks: list[ReadTask]) -> None:
        self.tasks = tasks
        self._changed = threading.Condition()
        self._next = 0
        self._finished = 0
        self._running: list[ReadTask] = []
        self._error: BaseException | None = None
        self.hanging: list[ReadTask] = []

    def run(self) -> bool:
        """Run tasks until all are started; return False if the batch was abandoned during one."""
        while (task := self._begin()) is not None:
            error: BaseException | None = None
            try:
                for _ in task.read_each(task.pieces):
                    task.done += 1
            except BaseException as caught:  # raised where the batch is waited for
                error = caught
            with self._changed:
                if self.hanging:
                    return False
                self._running.remove(task)
                self._finished += 1
                self._error = self._error or error
                self._changed.notify()
        return True

    def wait(self, timeout: float) -> None:
        """Wait until all tasks are done; start no more after a failure.

        Raises:
            StorageError: a read failed, or no read finished for ``timeout`` seconds; `hanging` then
                holds the tasks whose threads do not return.
        """
        with self._changed:
            try:
                while self._finished < len(self.tasks) and self._error is None:
                    if not self._progresses(timeout):
                        self.hanging = self._running
                        raise self._stalled(timeout)
            finally:  # also after an interrupt
                self._next = len(self.tasks)
            if self._error is not None:
                raise self._error

    def _stalled(self, timeout: float) -> StorageError:
        # without running tasks, all threads hang in other batches
        task = (self._running or self.tasks)[0]
        return StorageError(
            f"{task.path}: a read at byte {task.offset} has not returned for {timeout:g} s "
            f"({len(self._running)} such reads); check the device or the file server, then "
            "continue from the last checkpoint"
        )

    def _begin(self) -> ReadTask | None:
        with self._changed:
            if self._next >= len(self.tasks):
                return None
            task = self.tasks[self._next]
            self._next += 1
            self._running.append(task)
            return task

    def _progresses(self, timeout: float) -> bool:
        """Wait for a task to finish; return False if not even a read finished in time."""
        finished, read = self._finished, sum(task.done for task in self._running)
        deadline = time.monotonic() + timeout
        while self._finished == finished and self._error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return sum(task.done for task in self._running) > read
            self._changed.wait(left)
        return True


@dataclass(frozen=True, kw_only=True)
class Medium:
    """Read parameters for files or for objects."""

    threads: int
    """Concurrent reads that use the full bandwidth."""
    merge_gap: int
    """Bytes that take less time than the start of another read."""
    piece: int
    """Bytes; longer ranges are read in pieces, by several threads."""
    pieces_per_task: int
    """Pieces that one thread reads in turn, which for files are announced to the kernel."""


FILES = Medium(threads=16, merge_gap=16 << 10, piece=1 << 20, pieces_per_task=8)
# a request takes some 30 ms to start, and then transfers some 50 MB/s
OBJECTS = Medium(threads=64, merge_gap=MERGE_GAP, piece=PIECE, pieces_per_task=1)


@dataclass(frozen=True, kw_only=True)
class PositionalOptions:
    """Options of `PositionalTokens`; the defaults suit disks, network file systems and objects.

    Attributes:
        threads: maximum number of concurrent reads. Default: 16, or 64 with an object store.
        merge_gap: bytes; ranges of a file at most this far apart are read as one. Default: 16
            KiB in files, 256 KiB in objects.
        bytes_in_flight: maximum bytes of the staging buffer of a batch: further rows are read
            after the first ones, and fewer ranges are merged. A single row may exceed it.
        timeout: seconds without a finished read of a batch after which StorageError is raised.

    Raises:
        InvalidArgument: a value is out of range.
    """

    threads: int | None = None
    merge_gap: int | None = None
    bytes_in_flight: int = 64 << 20
    timeout: float = 120.0

    def __post_init__(self) -> None:
        make_plain(self, "bytes_in_flight", optional=["threads", "merge_gap"])
        object.__setattr__(self, "timeout", check_number("timeout", self.timeout))
        threads = 1 if self.threads is None else self.threads
        gap = self.merge_gap or 0
        if threads < 1 or gap < 0 or self.bytes_in_flight < 1 or self.timeout <= 0:
            raise InvalidArgument(
                "threads, bytes_in_flight and timeout must be positive, and merge_gap at least 0, "
                f"got {self}"
            )


class PositionalTokens(TokenReader):
    """Reader by positional reads of files and objects; safe to share between threads.

    The number of open files is bounded, whatever the number of datasets. A file that is truncated,
    replaced or removed while it is in use raises StorageError, and so does an object of another
    version than was opened. After unpickling and in forked children, files are opened and
    connections made again.

    Args:
        datasets: the sources, in the order of the index.
        options: concurrency, merging and timeout.
        reader: reader of files, with its descriptors and retries. Default: a new one.
    """

    def __init__(
        self,
        datasets: Sequence[IndexedDataset],
        options: PositionalOptions | None = None,
        *,
        reader: RangeReader | None = None,
    ) -> None:
        super().__init__(datasets)
        self._options = options or PositionalOptions()
        self._reader = reader or RangeReader(descriptors=DescriptorCache())
        self._files = tuple(dataset.bin_info for dataset in self._datasets)
        self._media = tuple(OBJECTS if is_remote(f.path) else FILES for f in self._files)
        read_file = self._reader.read_each
        self._reads: tuple[ReadEach, ...] = tuple(
            partial(read_each if is_remote(f.path) else read_file, f) for f in self._files
        )
        gap = self._options.merge_gap
        gaps = [medium.merge_gap if gap is None else gap for medium in self._media]
        self._gaps = np.array(gaps, np.int64)
        self._threads = self._options.threads or max(
            (medium.threads for medium in self._media), default=FILES.threads
        )
        self._workers = Workers(self._threads)
        self._staging: list[U8] = []  # buffers not in use, at most one for each concurrent read
        kinds = sorted({dataset.dtype for dataset in self._datasets}, key=str)
        self._kinds = kinds
        self._kind = np.array([kinds.index(d.dtype) for d in self._datasets], np.int32)

    def fill(self, request: ReadRequest) -> None:
        """Read the samples of a request into its arrays.

        Raises:
            OutOfRange, FormatError: the files do not hold a span; nothing is read.
            StorageError: a read failed or stalled, or a file has changed. Rows may have been
                written.
        """
        spans = request.spans
        runs = locate_bytes(self._datasets, spans)
        for first, stop in row_groups(spans, runs.nbytes, self._options.bytes_in_flight):
            part = runs.part(spans.row_splits[first], spans.row_splits[stop])
            ranges = self._merged(part)
            staging = self._take_staging(ranges.staging_nbytes)
            self._fetch(ranges, staging)
            self._gather(request.rows(first, stop), part, ranges, staging)
            self._staging.append(staging)

    def close(self) -> None:
        """End the threads and close the files."""
        self._workers.close()
        self._reader.descriptors.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PositionalTokens, (self._datasets, self._options)

    def _merged(self, part: RunBytes) -> Ranges:
        """Return merged ranges, with smaller gaps as long as they exceed the staging buffer."""
        gaps = self._gaps
        while True:
            ranges = merge(part, gaps)
            if ranges.staging_nbytes <= self._options.bytes_in_flight or not gaps.any():
                return ranges
            gaps = gaps // 4

    def _take_staging(self, nbytes: int) -> U8:
        """Return a reused buffer: fresh memory costs more in page faults than the copying."""
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = np.empty(0, np.uint8)
        return staging if staging.size >= nbytes else np.empty(-(-nbytes // 4096) * 4096, np.uint8)

    def _fetch(self, ranges: Ranges, staging: U8) -> None:
        fetch = Fetch(self._tasks(ranges, staging))
        for _ in range(min(self._threads, len(fetch.tasks))):
            self._workers.submit(fetch.run)
        try:
            fetch.wait(self._options.timeout)
        finally:
            self._workers.abandon(len(fetch.hanging))

    def _tasks(self, ranges: Ranges, staging: U8) -> list[ReadTask]:
        memory = staging.data
        tasks: list[ReadTask] = []
        columns = (ranges.source, ranges.begin, ranges.nbytes, ranges.at)
        for source, begin, nbytes, at in zip(*(c.tolist() for c in columns), strict=True):
            path, medium = self._files[source].path, self._media[source]
            for done in range(0, nbytes, medium.piece):
                piece = begin + done, memory[at + done : at + min(done + medium.piece, nbytes)]
                same = tasks and tasks[-1].path == path
                if not same or len(tasks[-1].pieces) == medium.pieces_per_task:
                    tasks.append(ReadTask(path, self._reads[source], []))
                tasks[-1].pieces.append(piece)
        return tasks

    def _gather(self, request: ReadRequest, runs: RunBytes, ranges: Ranges, staging: U8) -> None:
        """Copy from the staging buffer, taken as a dataset whose sequence k is span k."""
        lengths = request.spans.length.astype(np.int32)
        words = staging[: staging.size // 64 * 64]
        table = active().token_table(
            [(words.view(kind), ranges.run_at, lengths) for kind in self._kinds]
        )
        number = np.arange(lengths.size)
        source, offset = self._kind[runs.source], np.zeros_like(number)
        staged = replace(request.spans, source=source, document=number, offset=offset)
        bad = replace(request, spans=staged).gather(table)
        assert bad == -1, "the spans were checked before they were read"


logger = logging.getLogger("megaindex")

_BATCHES = 8  # timed with each reader before the choice


@dataclass(frozen=True)
class Choice:
    """Reader that was chosen, and the reason."""

    reader: Literal["mapped", "positional"]
    reason: str


def make_reader(datasets: Sequence[IndexedDataset], reader: str) -> TokenReader:
    """Return a reader of kind ``auto``, ``mapped`` or ``positional``.

    Raises:
        InvalidArgument: the kind is unknown, or ``mapped`` with a dataset in an object store.
    """
    check_choice("reader", reader, ("auto", "mapped", "positional"))
    if reader == "mapped":
        for dataset in datasets:
            check_local(dataset.path_prefix, "read it with reader='positional' or 'auto'")
        return PrefetchingTokens(datasets)
    if reader == "positional":
        return PositionalTokens(datasets)
    return PositionalTokens(datasets) if any_remote(datasets) else AutoTokens(datasets)


def plain_reader(datasets: Sequence[IndexedDataset]) -> TokenReader:
    """Return the default reader: through mappings, or by position if any is in an object store."""
    return PositionalTokens(datasets) if any_remote(datasets) else MappedTokens(datasets)


def reader_of(
    index: Index, datasets: IndexedDataset | Sequence[IndexedDataset] | TokenReader | None
) -> TokenReader:
    """Return ``datasets`` if it is a reader, else the default reader of the sources of an index."""
    return datasets if _is_reader(datasets) else plain_reader(sources_of(index, datasets))


def sources_of(index: Index, datasets: object | None) -> list[IndexedDataset]:
    """Return the given datasets, or those of the index.

    Raises:
        InvalidArgument: no datasets are given and the index does not hold them, they are not
            datasets, or it is not an index.
    """
    check_index(index)
    if datasets is not None:
        return as_datasets(datasets)
    found = list(datasets_of(index))
    if not found:
        raise InvalidArgument(
            f"the datasets of {shown(index)} are missing, because it was built from arrays or "
            "lengths; give the IndexedDataset of each of its sources as datasets"
        )
    return found


def _is_reader(argument: object) -> TypeGuard[TokenReader]:
    return hasattr(argument, "read") and hasattr(argument, "datasets")


def as_datasets(datasets: object) -> list[IndexedDataset]:
    """Return a list of one or more datasets; raise InvalidArgument for others, such as a path."""
    given = [datasets] if isinstance(datasets, IndexedDataset) else datasets
    others = [given]
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        others = [each for each in given if not isinstance(each, IndexedDataset)]
        if not others:
            return list(given)
    raise InvalidArgument(
        f"datasets must be IndexedDatasets, one for each source of the index, got "
        f"{shown(others[0])}; open a path with megaindex.IndexedDataset(path_prefix)"
    )


def any_remote(datasets: Sequence[IndexedDataset]) -> bool:
    """Return True if a dataset lies in an object store."""
    return any(is_remote(dataset.path_prefix) for dataset in datasets)


class AutoTokens(TokenReader):
    """Reader that times mapped and positional reads on the first batches, and keeps the faster.

    Outside local file systems it reads by position without timing: with a mapping, a stalled file
    server or a truncated file would hang or kill the process instead of raising an error.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        super().__init__(datasets)
        self._lock = threading.Lock()
        self._mapped = make_reader(datasets, "mapped")
        self._positional = make_reader(datasets, "positional")
        self._begun = 0
        self._seconds: dict[str, list[float]] = {"mapped": [], "positional": []}
        self.choice: Choice | None = None
        remote = _remote_file_systems(datasets)
        if remote:
            self._choose(Choice("positional", f"files are on {', '.join(remote)}"))

    def fill(self, request: ReadRequest) -> None:
        kind = self.choice.reader if self.choice else self._next()
        reader = self._mapped if kind == "mapped" else self._positional
        start = time.perf_counter()
        reader.fill(request)
        if self.choice is None:
            self._note(kind, time.perf_counter() - start, request.out.size)

    def _next(self) -> str:
        with self._lock:
            self._begun += 1
            return "mapped" if self._begun % 2 else "positional"

    def _note(self, kind: str, seconds: float, tokens: int) -> None:
        with self._lock:
            self._seconds[kind].append(seconds / tokens)
            if self.choice or min(map(len, self._seconds.values())) < _BATCHES:
                return
            # the median excludes the first batches, which open files and start threads
            medians = {k: statistics.median(times) for k, times in self._seconds.items()}
            detail = ", ".join(f"{k} {1e9 * each:.3g} ns a token" for k, each in medians.items())
            faster = medians["mapped"] <= medians["positional"]
            self._choose(Choice("mapped" if faster else "positional", detail))

    def _choose(self, choice: Choice) -> None:
        self.choice = choice
        logger.info("tokens are read %s: %s", choice.reader, choice.reason)


def _remote_file_systems(datasets: Sequence[IndexedDataset]) -> list[str]:
    """Return the names of the file systems that are not local disks."""
    directories: dict[int, str] = {}  # by device number
    for directory in {os.path.dirname(d.bin_info.path) for d in datasets}:
        directories.setdefault(os.stat(directory).st_dev, directory)
    return sorted(
        file_system_type(directory) or "a file system of unknown type"
        for directory in directories.values()
        if not is_local(directory)
    )
