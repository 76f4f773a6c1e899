"""Choice of a reader: through mappings, or by positional reads, required for objects."""

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
from megaindex.index.spans import Index, datasets_of
from megaindex.io.filesystem import file_system_type, is_local
from megaindex.io.paths import check_local, is_remote
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.loader.token_readers import (
    MappedTokens,
    PrefetchingTokens,
    ReadRequest,
    TokenReader,
)
from megaindex.validation import check_choice, shown

logger = logging.getLogger(__name__)

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
        InvalidArgument: no datasets are given and the index does not hold them, or they are not
            datasets.
    """
    if datasets is not None:
        return as_datasets(datasets)
    found = list(datasets_of(index))
    if not found and hasattr(index, "locate"):  # others are refused with the type of the index
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
    for directory in {os.path.dirname(d.path_prefix) or "." for d in datasets}:
        directories.setdefault(os.stat(directory).st_dev, directory)
    return sorted(
        file_system_type(directory) or "a file system of unknown type"
        for directory in directories.values()
        if not is_local(directory)
    )
