"""Read-only mappings of whole files, and the residency of their pages.

Python's mmap keeps a duplicate of the descriptor while the mapping lives: a blend of a thousand
datasets in 16 workers would hold 32,000 of them. The C library's mmap does not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import stat
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import StorageError
from megaindex.io.os_errors import storage_error
from megaindex.io.paths import FileInfo, check_local, open_at_once, plain, version_of

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
    if _libc.mincore(begin, address + nbytes - begin, flags.ctypes.data) != 0:
        return pages, pages
    return int((flags & 1).sum()), pages


def major_faults() -> int:
    """Return the number of page faults of this process that read a device."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
