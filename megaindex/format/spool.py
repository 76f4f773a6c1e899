"""Collect the arrays of an .idx on disk while they grow; assemble the file at the end.

The .idx holds lengths, pointers, bounds and modes one after the other, and none of them can begin
before the one in front is complete. Lengths, bounds and modes wait in nameless files beside the
target (which vanish with the process); pointers follow from the lengths. Memory stays constant.
"""

from __future__ import annotations

import contextlib
import shutil
import struct
import tempfile
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megaindex.format.header import IndexHeader
from megaindex.io.failures import as_storage_error

_CHUNK = 1 << 18  # sequences whose pointers are computed at once
_COPY_BYTES = 1 << 20
_INT32 = struct.Struct("<i")
_INT64 = struct.Struct("<q")


class IndexSpool:
    """The growing .idx of one writer, in files of `directory` that have no name."""

    def __init__(self, directory: str, *, multimodal: bool) -> None:
        self.num_sequences = 0
        self.num_bounds = 1
        self._directory = directory
        self._multimodal = multimodal
        self._files = contextlib.ExitStack()

    def open(self) -> None:
        """Make the files; `close` closes as many of them as there are."""
        with as_storage_error(self._directory, "cannot create a temporary file"):
            self._lengths = self._nameless_file()
            self._bounds = self._nameless_file()
            self._modes = self._nameless_file() if self._multimodal else None
        self._bounds.write(_INT64.pack(0))

    def add_one(self, length: int) -> None:
        """One document of one sequence; the quick way through, for non-multimodal files."""
        self._lengths.write(_INT32.pack(length))
        self.num_sequences += 1
        self._bounds.write(_INT64.pack(self.num_sequences))
        self.num_bounds += 1

    def add_sequences(
        self, lengths: npt.NDArray[np.integer[Any]], modes: npt.NDArray[np.integer[Any]] | None
    ) -> None:
        """Append lengths, each within int32, and for multimodal files modes, each within int8."""
        self._lengths.write(lengths.astype(np.int32).data)
        if self._modes is not None and modes is not None:
            self._modes.write(modes.astype(np.int8).data)
        self.num_sequences += len(lengths)

    def add_bounds(self, bounds: npt.NDArray[np.int64]) -> None:
        """Append document ends, counted in sequences from the beginning of the file."""
        self._bounds.write(bounds.data)
        self.num_bounds += len(bounds)

    def assemble(self, out: BinaryIO, dtype_code: int, itemsize: int) -> None:
        """Write the whole .idx to `out`."""
        header = IndexHeader(
            dtype_code=dtype_code, num_sequences=self.num_sequences, num_bounds=self.num_bounds
        )
        out.write(header.pack())
        _copy_all(self._lengths, out)
        self._write_pointers(out, itemsize)
        _copy_all(self._bounds, out)
        if self._modes is not None:
            _copy_all(self._modes, out)

    def _write_pointers(self, out: BinaryIO, itemsize: int) -> None:
        """Lengths 3, 0, 5 of 4-byte tokens give pointers 0, 12, 12."""
        self._lengths.seek(0)
        begin = 0
        while raw := self._lengths.read(4 * _CHUNK):
            ends = np.cumsum(np.frombuffer(raw, dtype=np.int32), dtype=np.int64) * itemsize + begin
            out.write(_INT64.pack(begin))
            out.write(ends[:-1].data)
            begin = int(ends[-1])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still buffered is not wanted
            self._files.close()

    def _nameless_file(self) -> IO[bytes]:
        return self._files.enter_context(
            tempfile.TemporaryFile(dir=self._directory, buffering=_COPY_BYTES)
        )


def _copy_all(source: IO[bytes], target: BinaryIO) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, _COPY_BYTES)
