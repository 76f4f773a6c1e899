"""Read-only mappings of whole files, the residency of their pages, and positional reads.

Python's mmap keeps a duplicate of the descriptor while the mapping lives: a blend of a thousand
datasets in 16 workers would hold 32,000 of them. The C library's mmap does not. Positional reads
use a bounded number of descriptors, of the files read last: the default limit is 1024 a process. A
file that is opened again must be the same as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import stat
import threading
import time
import tokenize
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument, StorageError
from megaindex.io.paths import (
    FileInfo,
    as_storage_error,
    check_file,
    check_local,
    open_at_once,
    plain,
    storage_error,
    version_of,
)

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
for _call, _third in ((_libc.madvise, ctypes.c_int), (_libc.mincore, ctypes.c_void_p)):
    _call.restype = ctypes.c_int
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, _third]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,  # address: anywhere
    ctypes.c_size_t,
    ctypes.c_int,  # protection
    ctypes.c_int,  # flags
    ctypes.c_int,  # descriptor
    ctypes.c_long,  # offset
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
# address 0 would be valid, so the C library returns -1
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_readonly(path: str, *, follow_symlinks: bool = True) -> npt.NDArray[np.uint8]:
    """Return the bytes of a regular file as a read-only uint8 array that owns its mapping.

    The array and every view of it stay valid after the file is renamed, replaced or unlinked. If it
    is truncated, reading past its new end kills the process (SIGBUS).

    Raises:
        MissingFile: `path` does not exist.
        InvalidArgument: `path` is a URL.
        StorageError: it is not a regular file, is a link that may not be followed, or cannot be
            opened or mapped.
    """
    return map_file(path, follow_symlinks=follow_symlinks)[0]


def map_file(path: str, *, follow_symlinks: bool = True) -> tuple[npt.NDArray[np.uint8], FileInfo]:
    """Return as `map_readonly`, with the `FileInfo` of the mapped file."""
    path = plain(path)
    data, status = map_with_status(path, follow_symlinks=follow_symlinks)
    return data, FileInfo(path, status.st_size, version_of(status))


def map_with_status(
    path: str, *, follow_symlinks: bool = True
) -> tuple[npt.NDArray[np.uint8], os.stat_result]:
    """Return as `map_readonly`, with the status of the mapped file."""
    if ":" in path or "\0" in path:  # possibly a URL or invalid; checking each path takes time
        path = plain(path)
        check_local(path, "copy it to a disk")
    action = "cannot open"
    try:
        descriptor = open_at_once(path, follow=follow_symlinks)
        action = "cannot map"
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{path}: cannot map: not a regular file; check the path")
            return _map_descriptor(descriptor, status.st_size), status
        finally:
            os.close(descriptor)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path, action) from error


def _map_descriptor(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    if size == 0:  # the kernel refuses empty mappings
        empty = np.empty(0, dtype=np.uint8)
        empty.flags.writeable = False
        return empty
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Pages(address, size))


BAD_NPY = (ValueError, EOFError, SyntaxError, tokenize.TokenError, OverflowError, RecursionError)
"""Errors of NumPy for a file that is not a sound ``.npy``."""


def map_npy_file(path: str) -> npt.NDArray[Any]:
    """Return the array of a ``.npy`` file of any dtype without objects, mapped and read-only.

    Raises:
        MissingFile, StorageError: the file cannot be read, or is not a regular file.
        ValueError: it is not a complete array in this format.
    """
    check_file(path, "cannot read")
    try:
        with as_storage_error(path, "cannot read"):
            return np.lib.format.open_memmap(path, mode="r")
    except BAD_NPY as error:
        raise ValueError(str(error)) from error


class _Pages:
    """Mapped pages of one file, unmapped when the last array made from them is freed."""

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        read_only = True
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self._size,),
            "data": (self._address, read_only),
        }

    # The default argument keeps munmap alive while the interpreter tears its modules down.
    def __del__(self, munmap: Any = _libc.munmap) -> None:
        munmap(self._address, self._size)


def will_need(address: int, nbytes: int) -> None:
    """Request that the kernel reads the pages of a mapping ahead; returns at once."""
    begin = address - address % _PAGE
    _libc.madvise(begin, address + nbytes - begin, mmap.MADV_WILLNEED)


def resident_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Return the number of pages of a mapped range that are in memory, and of all its pages.

    All count as in memory if the kernel refuses, as for files that the user may not write.
    """
    begin = address - address % _PAGE
    pages = -(-(address + nbytes - begin) // _PAGE)
    flags = np.zeros(pages, np.uint8)
    # it takes whole pages only
    if _libc.mincore(begin, address + nbytes - begin, flags.ctypes.data) != 0:
        return pages, pages
    return int((flags & 1).sum()), pages


def major_faults() -> int:
    """Return the number of page faults of this process that read a device."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_Identity = tuple[int, int, int, int]  # st_dev, st_ino, st_size, st_mtime_ns
# Errors that are retried: on network file systems and failing links they may pass.
_TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY}

MOST_AT_ONCE = 1 << 30
"""Bytes of one system call: macOS refuses vectored reads and writes of 2 GiB or more."""

Pread = Callable[[int, list[memoryview], int], int]
"""As os.preadv: (descriptor, buffers, offset) -> bytes read, 0 at the end of the file."""


def _copying_pread(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """Read as os.preadv does, which macOS before version 11 lacks."""
    (into,) = buffers
    data = os.pread(descriptor, len(into), offset)
    into[: len(data)] = data
    return len(data)


_PREAD: Pread = os.preadv if hasattr(os, "preadv") else _copying_pread


@dataclass(frozen=True, kw_only=True)
class RangeReader:
    """Reader of byte ranges of files that must not change."""

    descriptors: DescriptorCache
    retries: int = 4
    """Retries after a transient error, for each range."""
    first_pause: float = 0.05
    """Seconds before the first retry; each further pause is twice as long."""
    pread: Pread = _PREAD

    def read_each(self, info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[None]:
        """Fill each ``(offset, into)`` of the file, and yield after each.

        All ranges are announced to the kernel first, which reads them ahead, so that one thread
        keeps many reads of the device in flight.

        Raises:
            MissingFile: the file does not exist any more.
            StorageError: the file ends before a range does, was replaced, or reading failed after
                the retries; the message names file and offset.
        """
        if len(ranges) > 1:
            self._hint(info, ranges)
        for offset, into in ranges:
            self.read(info, offset, into)
            yield

    def read(self, info: FileInfo, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes at ``offset``, as `read_each` does."""
        done, failures = 0, 0
        while done < len(into):
            try:
                done += self._attempt(info, offset + done, into[done:])
            except StorageError as error:  # noqa: PERF203  (negligible beside a read)
                if error.errno not in _TRANSIENT:
                    raise
                failures += 1
                if failures > self.retries:
                    raise _gave_up(error, failures) from error
                if error.errno == errno.ESTALE:  # the file must be opened again
                    self.descriptors.forget(info.path)
                time.sleep(self.first_pause * 2 ** (failures - 1))

    def _hint(self, info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        # errors are raised by the read itself
        with contextlib.suppress(OSError), self.descriptors.lease(*info) as descriptor:
            for offset, into in ranges:
                os.posix_fadvise(descriptor, offset, len(into), os.POSIX_FADV_WILLNEED)

    def _attempt(self, info: FileInfo, offset: int, into: memoryview) -> int:
        """Return the number of bytes read, at least 1 and possibly fewer than wanted."""
        path, size, _ = info
        with self.descriptors.lease(*info) as descriptor:
            try:
                count = self.pread(descriptor, [into[:MOST_AT_ONCE]], offset)
            except OSError as error:
                action = f"cannot read {len(into)} bytes at {offset}"
                raise storage_error(error, path, action) from error
            if count:
                return count
            # 0 bytes are the end of the file, or a file system that lost them
            found = os.fstat(descriptor).st_size
        if found < offset + len(into):
            raise StorageError(
                f"{path}: must hold bytes {offset} to {offset + len(into)}, but ends at byte "
                f"{found}: it had {size} bytes and was cut short; restore the file"
            )
        nothing = StorageError(f"{path}: a read at {offset} returned nothing; it has {found} bytes")
        nothing.errno = errno.EIO
        raise nothing


class DescriptorCache:
    """Cache of read-only descriptors by path that closes the least recently used first.

    Safe to share between threads, and across fork, as positional reads share no file position. At
    most ``capacity`` files are open, plus those in use.

    Raises:
        InvalidArgument: ``capacity`` is below 1.
    """

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 1:
            raise InvalidArgument(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._identities: dict[str, _Identity] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def lease(self, path: str, size: int | None = None, version: str = "") -> Lease:
        """Return a context manager of a descriptor, open at least until the ``with`` block ends.

        Args:
            size: required size of the file in bytes, checked when it is opened.
            version: required `FileInfo.version`, checked likewise; empty for any.

        Raises:
            MissingFile: the file does not exist.
            StorageError: it cannot be opened, or is not the file that was opened before.
        """
        return Lease(self, path, size, version)

    def forget(self, path: str) -> None:
        """Open the file again at its next use."""
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is not None:
                self._drop(entry)

    def close(self) -> None:
        """Close every file, those in use when their last lease ends."""
        with self._lock:
            while self._open:
                self._drop(self._open.popitem()[1])

    def __len__(self) -> int:
        return len(self._open)

    # The default argument keeps close alive while the interpreter tears its modules down.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for entry in getattr(self, "_open", {}).values():  # not set if __init__ raised
            close(entry.descriptor)

    def _take(self, path: str, size: int | None, version: str) -> _Open:
        if self._pid != os.getpid():  # the parent may have held the lock when it forked
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            entry = self._open.get(path)
            if entry is not None:
                self._open.move_to_end(path)
                entry.users += 1
                return entry
        opened = self._checked_open(path, size, version)  # may take long, so without the lock
        with self._lock:
            entry = self._open.setdefault(path, opened)
            if entry is not opened:  # another thread has opened it meanwhile
                os.close(opened.descriptor)
            entry.users += 1
            self._open.move_to_end(path)
            while len(self._open) > self._capacity:
                self._drop(self._open.popitem(last=False)[1])
            return entry

    def _give_back(self, entry: _Open) -> None:
        with self._lock:
            entry.users -= 1
            if entry.stale and entry.users == 0:
                os.close(entry.descriptor)

    def _drop(self, entry: _Open) -> None:
        entry.stale = True
        if entry.users == 0:
            os.close(entry.descriptor)

    def _checked_open(self, path: str, size: int | None, version: str) -> _Open:
        again = path in self._identities
        with as_storage_error(path, "cannot open again" if again else "cannot open"):
            descriptor = os.open(path, _FLAGS)
        try:
            with as_storage_error(path, "cannot read its status"):
                status = os.fstat(descriptor)
            found = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            before = self._identities.setdefault(path, found)
            as_asked = size in (None, status.st_size) and version in ("", version_of(status))
            if found != before or not as_asked:
                raise StorageError(_changed(path, before, found, size))
        except BaseException:
            os.close(descriptor)
            raise
        return _Open(descriptor)


class Lease:
    """Context manager of one open file."""

    __slots__ = ("_cache", "_entry", "_path", "_size", "_version")

    def __init__(self, cache: DescriptorCache, path: str, size: int | None, version: str) -> None:
        self._cache, self._path, self._size, self._version = cache, path, size, version

    def __enter__(self) -> int:
        self._entry = self._cache._take(self._path, self._size, self._version)
        return self._entry.descriptor

    def __exit__(self, *exc: object) -> None:
        self._cache._give_back(self._entry)


@dataclass(eq=False)
class _Open:
    descriptor: int
    users: int = 0
    stale: bool = False
    """Dropped from the cache while in use; the last lease closes it."""


def _changed(path: str, before: _Identity, found: _Identity, size: int | None) -> str:
    expected = before[2] if size is None else size
    detail = (
        f"it had {expected} bytes and now has {found[2]}"
        if expected != found[2]
        else "another file has its name, or it was written to"
    )
    return f"{path}: changed since it was opened: {detail}; restore the file or open it again"


def _gave_up(last: StorageError, attempts: int) -> StorageError:
    error = StorageError(f"{last}; gave up after {attempts} attempts")
    error.errno = last.errno
    return error
