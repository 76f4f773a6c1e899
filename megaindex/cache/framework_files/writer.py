"""Writes index arrays under a framework's own file names."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.cache.fingerprint import array_bytes, array_checksum
from megaindex.cache.framework_files.array_files import (
    ArrayFiles,
    ArrayRecord,
    Arrays,
    FileState,
    Identity,
    Listing,
    Sidecar,
    state_of,
    states_of,
)
from megaindex.cache.framework_files.sidecar import make_sets_durable_later, remove, write_sidecars
from megaindex.cache.npy import WORTH_MAPPING, map_new, npy_header, populate
from megaindex.io.filesystem import is_local
from megaindex.io.os_errors import storage_error

_header = functools.lru_cache(maxsize=4096)(npy_header)


class ArrayWriter:
    """A sink for the arrays of one set of files.

    A framework takes a set as present when all its files are. So the last one is removed first,
    and gets its name when everything else is complete, the sidecar too: a crash leaves the set
    whole or absent. No file has its name before it is complete: a builder that was frozen, and
    replaced, may wake up and go on beside readers of what the other one built. Large arrays on a
    local file system are mapped files, so that what a kernel writes is already in place; their
    checksums are computed while the next kernel runs. Others are written when they are done.
    """

    def __init__(self, files: ArrayFiles, listing: Listing | None = None) -> None:
        """``listing``: of their directory, taken by who holds the claim on it."""
        self.files = files
        self._listing = listing
        self._last = files.paths[-1]
        self._suffix = f".tmp.{secrets.token_hex(8)}"
        self._headers: dict[str, bytes] = {}
        self._records: dict[str, ArrayRecord] = {}
        self._checksums: dict[str, str | Future[str]] = {}
        self._states: dict[str, FileState] = {}
        self._arrays: Arrays = {}
        self._mapped: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._unnamed = self.files.paths

    def __enter__(self) -> ArrayWriter:
        return self.begin()

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for path in self._unnamed:
            with contextlib.suppress(OSError):  # what stays is removed by the next builder
                remove(path + self._suffix)

    def begin(self) -> ArrayWriter:
        """Make the set absent."""
        try:
            for path in (self._last, self.files.sidecar):
                if self._listing is None or path in self._listing:
                    remove(path)
        except OSError as error:
            raise storage_error(error, str(self.files), "cannot replace") from error
        return self

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        array: IntArray = np.empty(shape, dtype)  # takes no memory before it is touched
        self._describe(name, shape, dtype)
        if array.nbytes >= WORTH_MAPPING:
            array = self._map(name, array)
        self._arrays[name] = array
        return array

    def _describe(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self._headers[name] = header = _header(shape, dtype)
        self._records[name] = (dtype, shape, len(header))

    def done(self, name: str) -> None:
        array = self._arrays[name]
        if self._pool is not None and name in self._mapped:
            self._checksums[name] = self._pool.submit(array_checksum, array)
        else:
            data = array_bytes(array)
            self._states[name] = _create(self._temporary(name), self._headers[name], data)
            self._checksums[name] = xxhash.xxh3_128_hexdigest(data)

    @property
    def arrays(self) -> Mapping[str, IntArray]:
        """What was allocated, until it is recorded."""
        return self._arrays

    def copy(self, arrays: Mapping[str, IntArray]) -> None:
        """Fill the set with arrays that another one holds too."""
        for name, array in arrays.items():
            if array.nbytes >= WORTH_MAPPING:
                self.allocate(name, array.shape, array.dtype.name)[...] = array
            else:
                self._describe(name, array.shape, array.dtype.name)
                self._arrays[name] = array
            self.done(name)

    def sidecar(self, identity: Identity) -> Sidecar:
        """What to record of the arrays, all of which are done."""
        # waits for what touches pages of a mapped file too, which changes its time
        checksums = {
            name: checksum if isinstance(checksum, str) else checksum.result()
            for name, checksum in self._checksums.items()
        }
        self._arrays.clear()
        mapped = {name: self._temporary(name) for name in self._records if name in self._mapped}
        files = {**self._states, **states_of(mapped)}
        return identity.sidecar("built", self._records, files, checksums)

    def reveal(self, text: str = "") -> None:
        """Give all files their names; ``text`` is what the marker holds, where there is one."""
        if self.files.marker:
            _create(self.files.marker + self._suffix, text.encode())
        while self._unnamed:
            path = self._unnamed[0]
            try:
                os.rename(path + self._suffix, path)
            except OSError as error:
                raise storage_error(error, path, "cannot publish") from error
            del self._unnamed[0]

    def publish(self, identity: Identity, text: str = "") -> Sidecar:
        """Record the set and make it visible."""
        sidecar = self.sidecar(identity)
        write_sidecars([(self.files, sidecar)])
        self.reveal(text)
        make_sets_durable_later([(self.files, sidecar)])
        return sidecar

    def _temporary(self, name: str) -> str:
        return self.files.arrays[name] + self._suffix

    def _map(self, name: str, array: IntArray) -> IntArray:
        path = Path(self._temporary(name))
        os.makedirs(path.parent, exist_ok=True)
        if not is_local(path.parent):
            return array
        array = map_new(path, array.shape, array.dtype.name)
        self._mapped.add(name)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "megaindex-arrays")
        self._pool.submit(populate, array)
        return array


def write_together(
    writers: Sequence[tuple[ArrayWriter, Identity, str]], fill: Callable[[int, ArrayWriter], None]
) -> list[Sidecar]:
    """Publish sets of one directory, recorded in one sidecar file.

    Args:
        writers: each with the identity of its set and the text of its marker.
        fill: ``fill(k, writer)`` fills the arrays of the k-th.
    """
    try:
        sidecars = []
        for k, (writer, identity, _) in enumerate(writers):
            fill(k, writer.begin())
            sidecars.append(writer.sidecar(identity))
        sets = [(w.files, s) for (w, *_), s in zip(writers, sidecars, strict=True)]
        write_sidecars(sets)
        for writer, _, text in writers:
            writer.reveal(text)
    finally:
        for writer, *_ in writers:
            writer.__exit__()
    make_sets_durable_later(sets)
    return sidecars


def _create(path: str, header: bytes, data: bytes | memoryview = b"") -> FileState:
    """Make a new file that holds the header, then the data."""
    try:
        descriptor = _open_new(path)
        try:
            _write(descriptor, header, data)
            return state_of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, path, "cannot write") from error


def _open_new(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    return os.open(path, flags, 0o666)


def _write(descriptor: int, header: bytes, data: bytes | memoryview) -> None:
    written = os.writev(descriptor, (header, data)) - len(header)
    if written < 0:  # a write may take less than it was given
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])
