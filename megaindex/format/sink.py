"""The sink of a writer of pairs.

The .idx holds lengths, pointers, bounds and modes one after the other. So that memory stays
constant, a writer collects lengths, bounds and modes in unnamed temporary files beside the target;
pointers follow from the lengths.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from functools import partial
from types import TracebackType
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex.errors import StorageError
from megaindex.format.header import CHUNK, IndexHeader
from megaindex.format.pair import pair_paths, provenance_path
from megaindex.format.provenance import ProvenanceSpool, nameless_file
from megaindex.io.atomic import AtomicFiles
from megaindex.io.paths import Progress, as_storage_error, copy_range, open_regular, storage_error

_CHUNK = 1 << 18  # sequences whose pointers are computed at once
_COPY_BYTES = 1 << 20
_INT32 = struct.Struct("<i")
_INT64 = struct.Struct("<q")


def written_paths(path_prefix: str) -> tuple[str, str, str]:
    """Return the paths of all files that belong to a pair, in order of publication."""
    bin_path, idx_path = pair_paths(path_prefix)
    return bin_path, provenance_path(path_prefix), idx_path


class PairSink:
    """Pair that is being written, published by `publish` or removed by `discard`.

    Call `open` inside a `try` that ends with `discard`: the constructor makes no files, so that an
    interrupt before the `try` leaves none. Append inside `with sink:`; after an error there, which
    may leave half of an entry, the sink refuses to publish.

    With ``provenance`` the origin of every document is written too, to the attribute of that name;
    without, a provenance beside a replaced pair is removed."""

    def __init__(
        self,
        bin_path: str,
        idx_path: str,
        dtype: np.dtype[Any],
        *,
        multimodal: bool,
        overwrite: bool,
        provenance: bool = False,
    ) -> None:
        self._idx_path = idx_path
        self._bin_path = bin_path
        self._provenance_path = provenance_path(idx_path.removesuffix(".idx"))
        self.dtype = dtype
        self._broken = False
        self._overwrite = overwrite
        paths = (bin_path, *[self._provenance_path] * provenance, idx_path)
        self._files = AtomicFiles(paths, overwrite=overwrite)
        AtomicFiles((self._provenance_path,), overwrite=overwrite)  # raises if one is there
        directory = os.path.dirname(bin_path) or "."
        self.index = IndexSpool(directory, multimodal=multimodal)
        self.provenance = ProvenanceSpool(directory) if provenance else None

    def open(self) -> None:
        """Make the temporary files."""
        self._bin = self._files.open(self._bin_path)
        self._open_spools()

    def open_linked(self, path: str) -> str:
        """Make the .bin a link to the file at `path`; return "hard link" or "symbolic link"."""
        is_hard = self._files.link(path, self._bin_path)
        self._open_spools()
        return "hard link" if is_hard else "symbolic link"

    def _open_spools(self) -> None:
        self.index.open()
        if self.provenance is not None:
            self.provenance.open()

    def write_tokens(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens of any dtype and layout, without a check that they fit."""
        for start in range(0, tokens.size, CHUNK):
            chunk = tokens[start : start + CHUNK]
            self._bin.write(np.ascontiguousarray(chunk, dtype=self.dtype).data)

    def copy_bytes(
        self, path: str, size: int, offset: int, nbytes: int, progress: Progress
    ) -> None:
        """Append `nbytes` bytes at `offset` of the file at `path`, which must have `size` bytes."""
        descriptor = open_regular(path)
        try:
            self._bin.flush()  # the copy bypasses Python's buffer
            found = os.fstat(descriptor).st_size
            copied = copy_range(descriptor, self._bin.fileno(), offset, nbytes, progress)
        finally:
            os.close(descriptor)
        if found != size or copied < nbytes:
            raise StorageError(
                f"{path}: changed while it was copied: it had {size} bytes, has {found}, and "
                f"{copied} of {nbytes} bytes at {offset} could be read; start again with the "
                "complete file"
            )

    def publish(self, dtype_code: int) -> None:
        """Write the .idx, sync both files and rename them to their final names."""
        if self._broken:
            raise StorageError(
                f"{self._bin_path}: cannot publish: an earlier write failed and left it "
                "incomplete; write the pair again"
            )
        with self:
            out = _HashedFile(self._files.open(self._idx_path))
            self.index.assemble(out, dtype_code, self.dtype.itemsize)
            if self.provenance is not None:
                documents = self.index.num_bounds - 1
                assert self.provenance.num_documents == documents, "an origin for each document"
                self.provenance.assemble(self._files.open(self._provenance_path), out.digest())
        self._files.publish()
        if self.provenance is None and self._overwrite:
            with contextlib.suppress(OSError):  # it names the .idx that was replaced
                os.unlink(self._provenance_path)

    def discard(self) -> None:
        """Remove temporary files; no effect after `publish`."""
        try:
            self._files.discard()
        finally:
            self.index.close()
            if self.provenance is not None:
                self.provenance.close()

    def take_back(self) -> None:
        """Remove the pair that `publish` made, unless it has been replaced."""
        self._files.take_back()

    def __enter__(self) -> PairSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._broken = True
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise storage_error(error, self._bin_path, "cannot write the pair") from error


class _HashedFile:
    """A file that is written, with the XXH3-128 of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.digest = self._hash.digest

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        return self._file.write(data)


class IndexSpool:
    """Arrays of the .idx of one writer, in unnamed files of `directory`."""

    def __init__(self, directory: str, *, multimodal: bool) -> None:
        self.num_sequences = 0
        self.num_bounds = 1
        self._directory = directory
        self._multimodal = multimodal
        self._files = contextlib.ExitStack()

    def open(self) -> None:
        with as_storage_error(self._directory, "cannot create a temporary file"):
            make = partial(nameless_file, self._files, self._directory, _COPY_BYTES)
            self._lengths, self._bounds = make(), make()
            self._modes = make() if self._multimodal else None
        self._bounds.write(_INT64.pack(0))

    def add_one(self, length: int) -> None:
        """Append a document of one sequence to a file without modes."""
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

    def assemble(self, out: _HashedFile, dtype_code: int, itemsize: int) -> None:
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

    def _write_pointers(self, out: _HashedFile, itemsize: int) -> None:
        # lengths 3, 0, 5 of 4-byte tokens give pointers 0, 12, 12
        self._lengths.seek(0)
        begin = 0
        while raw := self._lengths.read(4 * _CHUNK):
            ends = np.cumsum(np.frombuffer(raw, dtype=np.int32), dtype=np.int64) * itemsize + begin
            out.write(_INT64.pack(begin))
            out.write(ends[:-1].data)
            begin = int(ends[-1])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # buffered data is discarded
            self._files.close()


def _copy_all(source: IO[bytes], target: _HashedFile) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, _COPY_BYTES)
