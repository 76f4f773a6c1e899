"""Choice of a reader: through the mapping or by positional reads, the only way for objects."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.io.filesystem import file_system_type, is_local
from megaindex.io.paths import check_local, is_remote
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.loader.token_readers import (
    MappedTokens,
    PrefetchingTokens,
    ReadRequest,
    TokenReader,
)
from megaindex.validation import shown

logger = logging.getLogger(__name__)

READERS = ("auto", "mapped", "positional")
_BATCHES = 8  # read each way before the choice


@dataclass(frozen=True)
class Choice:
    """The reader that was chosen, and the reason."""

    reader: Literal["mapped", "positional"]
    reason: str


def make_reader(datasets: Sequence[IndexedDataset], reader: str) -> TokenReader:
    """Return a reader of the named kind, ``auto``, ``mapped`` or ``positional``.

    Raises:
        InvalidArgument: the kind is unknown, or a dataset in an object store is to be mapped.
    """
    if reader == "mapped":
        for dataset in datasets:
            check_local(dataset.path_prefix, "read it with reader='positional' or 'auto'")
        return PrefetchingTokens(datasets)
    if reader == "positional":
        return PositionalTokens(datasets)
    if reader == "auto":
        return PositionalTokens(datasets) if any_remote(datasets) else AutoTokens(datasets)
    raise InvalidArgument(f"reader={reader!r}: must be one of {', '.join(READERS)}")


def plain_reader(datasets: Sequence[IndexedDataset]) -> TokenReader:
    """Return the default reader: through mappings, or by position where objects are read."""
    return PositionalTokens(datasets) if any_remote(datasets) else MappedTokens(datasets)


def reader_of(datasets: IndexedDataset | Sequence[IndexedDataset] | TokenReader) -> TokenReader:
    """Return the plain reader of one or more datasets, or the reader that was given.

    Raises:
        InvalidArgument: something else was given, such as a path.
    """
    return datasets if is_reader(datasets) else plain_reader(as_datasets(datasets))


def is_reader(given: object) -> TypeGuard[TokenReader]:
    """Return True for an object that reads tokens, False for datasets."""
    return hasattr(given, "read") and hasattr(given, "datasets")


def as_datasets(datasets: object) -> list[IndexedDataset]:
    """Return a list of the datasets of an index's sources; one may be given by itself.

    Raises:
        InvalidArgument: something else was given, such as a path.
    """
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
    """Return True if one of them lies in an object store."""
    return any(is_remote(dataset.path_prefix) for dataset in datasets)


class AutoTokens(TokenReader):
    """Reads the first batches both ways in turn, then with the faster; logs the choice once.

    Away from local disks it reads by position from the start, unmeasured: only there does a file
    server that stalls, or a file that shrinks, end in an error instead of a hang or a signal.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        super().__init__(datasets)
        self._lock = threading.Lock()
        self._mapped = make_reader(datasets, "mapped")
        self._positional = make_reader(datasets, "positional")
        self._begun = 0
        self._seconds: dict[str, list[float]] = {"mapped": [], "positional": []}
        self.choice: Choice | None = None
        """None until it is made."""
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
            # the first batches open files and start threads: the median leaves them out
            medians = {k: statistics.median(times) for k, times in self._seconds.items()}
            detail = ", ".join(f"{k} {1e9 * each:.3g} ns a token" for k, each in medians.items())
            faster = medians["mapped"] <= medians["positional"]
            self._choose(Choice("mapped" if faster else "positional", detail))

    def _choose(self, choice: Choice) -> None:
        self.choice = choice
        logger.info("tokens are read %s: %s", choice.reader, choice.reason)


def _remote_file_systems(datasets: Sequence[IndexedDataset]) -> list[str]:
    """Return the names of the file systems that are not local disks."""
    directories: dict[int, str] = {}  # one for each device
    for directory in {os.path.dirname(d.path_prefix) or "." for d in datasets}:
        directories.setdefault(os.stat(directory).st_dev, directory)
    return sorted(
        file_system_type(directory) or "a file system of unknown type"
        for directory in directories.values()
        if not is_local(directory)
    )
