"""Requests for the index arrays of one dataset, kept in files of a framework's own names."""

from __future__ import annotations

import abc
import logging
import os

import numpy as np

from megaindex._types import IntArray
from megaindex.cache.claim import build_once
from megaindex.cache.framework_files.array_files import ArrayFiles, Arrays, Identity, Sidecar
from megaindex.cache.framework_files.group import Fetched
from megaindex.cache.framework_files.sidecar import find_arrays, map_arrays
from megaindex.cache.framework_files.writer import ArrayWriter
from megaindex.errors import FormatError, MissingFile
from megaindex.index.orders.framework import Sink
from megaindex.kernels import num_threads

logger = logging.getLogger("megaindex")

_COUNTING = np.arange(1 << 15, dtype=np.int32)


class FrameworkArrayRequest(abc.ABC):
    """A request for one set of arrays, which can be looked up, built and mapped."""

    __slots__ = ()

    files: ArrayFiles | None
    """None where the framework keeps the arrays in memory."""
    description: str
    """Text of the file by which the framework marks the arrays as complete."""

    @property
    @abc.abstractmethod
    def identity(self) -> Identity:
        """The settings and the corpora that the arrays depend on."""

    @property
    @abc.abstractmethod
    def corpus_nbytes(self) -> int:
        """Bytes of the .idx files that are read to build the arrays."""

    @property
    def content(self) -> object:
        """Equal for requests of equal arrays; None where that is not known."""
        return None

    @abc.abstractmethod
    def fill(self, sink: Sink, threads: int) -> None:
        """Build the arrays with so many threads."""

    @abc.abstractmethod
    def check(self, arrays: Arrays) -> None:
        """Raise FormatError if these, which the framework wrote, are not the arrays."""

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return os.path.dirname(str(self.files)) or "."

    def fetch(self) -> Fetched:
        """Look the arrays up, or let one process build them.

        Raises:
            FormatError: files that the framework wrote are not the arrays of this request.
            StorageError: the directory cannot be written, or another builder takes too long.
        """
        name = os.path.basename(str(self.files))
        return build_once(self.directory, name, self._find, self._build)

    def _find(self) -> Fetched | None:
        assert self.files is not None
        sidecar = find_arrays(self.files, self.identity, self.check)
        return None if sidecar is None else Fetched(sidecar, was_built=False)

    def _build(self) -> Fetched:
        assert self.files is not None
        with ArrayWriter(self.files) as writer:
            self.fill(writer, num_threads())
            return Fetched(writer.publish(self.identity, self.description), was_built=True)

    def open(self, sidecar: Sidecar) -> Arrays:
        """Map the arrays that ``sidecar`` describes; build them again if they were damaged."""
        assert self.files is not None
        try:
            return map_arrays(self.files, sidecar)
        except (FormatError, MissingFile) as error:
            logger.warning("%s", error)
            again = self.fetch().sidecar
            if (again.corpus, again.arrays) != (sidecar.corpus, sidecar.arrays):
                raise
            return map_arrays(self.files, again)


def as_range(ids: IntArray) -> range | IntArray:
    """Return consecutive ids as a range, which takes no memory, and others as they are."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        return ids
    first = int(ids[0])
    if int(ids[-1]) - first != ids.size - 1:
        return ids
    for begin in range(0, ids.size, _COUNTING.size):
        part = ids[begin : begin + _COUNTING.size]
        if (part - _COUNTING[: part.size] != first + begin).any():
            return ids
    return range(first, first + ids.size)
