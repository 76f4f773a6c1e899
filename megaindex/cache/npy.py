"""The .npy files of index arrays: written, mapped in place while they are filled, and read."""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import math
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from megaindex._types import IntArray
from megaindex.cache.fingerprint import array_bytes, array_checksum
from megaindex.errors import FormatError, MissingFile
from megaindex.io.filesystem import is_local
from megaindex.io.mapping import map_readonly
from megaindex.io.os_errors import as_storage_error, storage_error

ARRAY_DTYPES = ("int16", "int32", "int64", "uint8", "uint32")
"""Of the arrays that a cache may hold."""
WORTH_MAPPING = 32 << 20  # bytes; page faults of fewer cost more than writing them
_WORTH_A_THREAD = 1 << 20  # bytes that are written while the next kernel runs
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_MADVISE = ctypes.CDLL(None, use_errno=True).madvise
_T = TypeVar("_T")


class Written(NamedTuple):
    """An array in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes of the .npy header."""
    checksum: str
    """XXH3-128 of the elements' bytes."""
    status: os.stat_result | None
    """Of the file, taken when it was written; None while an array is mapped."""


class MappedArrays:
    """A sink that writes each array to a new .npy file.

    Large arrays on a local file system are mapped files: what a kernel writes is already in place,
    and their pages are brought in ahead of the kernels. Others are written from memory. Large
    arrays are written, and checksums computed, while the next kernel runs.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, IntArray] = {}
        """Those allocated, until `finish`."""
        self._mapped: set[str] = set()
        self._written: dict[str, Written | Future[Written]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def path_of(self, name: str) -> str:
        """Return the path of the file of an array."""
        raise NotImplementedError

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        """Return an uninitialised array to fill."""
        array: IntArray = np.empty(shape, dtype)  # takes no memory before it is touched
        path = self.path_of(name)
        if array.nbytes >= WORTH_MAPPING and is_local(os.path.dirname(path) or "."):
            array = map_new(path, shape, dtype)
            self._mapped.add(name)
            self._submit(populate, array)
        self.arrays[name] = array
        return array

    def seal(self, name: str) -> None:
        """Write an array that is filled and will not change again."""
        array, path = self.arrays[name], self.path_of(name)
        if name in self._mapped:
            self._written[name] = self._submit(_describe, array)
        elif array.nbytes >= _WORTH_A_THREAD:
            self._written[name] = self._submit(write_new, path, array)
        else:
            self._written[name] = write_new(path, array)

    def write(self, name: str, array: IntArray) -> None:
        """Write an array that was filled elsewhere."""
        if array.nbytes >= WORTH_MAPPING:
            self.allocate(name, array.shape, array.dtype.name)[...] = array
        else:
            self.arrays[name] = array
        self.seal(name)

    def finish(self) -> dict[str, Written]:
        """Wait until every array is sealed, drop the arrays, and describe their files."""
        written = {}
        for name in self.arrays:
            file = self._written[name]
            written[name] = file.result() if isinstance(file, Future) else file
        self.arrays.clear()
        for name in self._mapped:  # only now: touching pages of a mapped file changes its time
            path = self.path_of(name)
            with as_storage_error(path, "cannot look at"):
                written[name] = written[name]._replace(status=os.stat(path))
        return written

    def close(self) -> None:
        """End the thread and drop the arrays."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.arrays.clear()

    def _submit(self, task: Callable[..., _T], *args: object) -> Future[_T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "megaindex-arrays")
        return self._pool.submit(task, *args)


def map_new(path: str, shape: tuple[int, ...], dtype: str) -> IntArray:
    """Map a new .npy file of that shape for writing; its room on the disk is reserved."""
    header = npy_header(shape, dtype)
    size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
    with as_storage_error(path, f"cannot reserve {size} bytes"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # A full disk must be an error here, not a signal in the middle of a kernel.
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, header, 0)
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
    array: IntArray = np.frombuffer(mapping, dtype, offset=len(header)).reshape(shape)
    return array


def write_new(path: str, array: IntArray) -> Written:
    """Write a new .npy file."""
    header = npy_header(array.shape, array.dtype.name)
    status = create_file(path, header, array_bytes(array))
    return _describe(array)._replace(status=status)


def create_file(path: str, header: bytes, data: bytes | memoryview = b"") -> os.stat_result:
    """Write a new file that holds the header, then the data.

    Raises:
        StorageError: there is a file of that name, or it cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(fd, header, data)
            return os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, path, "cannot write") from error


def _write(fd: int, header: bytes, data: bytes | memoryview) -> None:
    written = os.writev(fd, (header, data)) - len(header)
    if written < 0:  # a write may take less than it was given
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def _describe(array: IntArray) -> Written:
    dtype = array.dtype.name
    offset = len(npy_header(array.shape, dtype))
    return Written(dtype, array.shape, offset, array_checksum(array), None)


@functools.lru_cache(maxsize=4096)
def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the .npy header, so that ``numpy.load`` reads the arrays of an entry too."""
    buffer = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def populate(array: IntArray) -> None:
    """Bring the pages of a mapped array in, in one call instead of a page fault for each.

    Only a hint: kernels before Linux 5.14 refuse it, and the faults happen one by one.
    """
    page = mmap.PAGESIZE
    begin = array.ctypes.data // page * page
    size = array.ctypes.data + array.nbytes - begin
    _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))


def map_npy(path: str) -> tuple[IntArray, int]:
    """Return the array in a file, read-only, and the bytes of its header; pickles are not loaded.

    Raises:
        MissingFile: the file does not exist.
        FormatError: it is not one whole array of an integer type that indices have.
    """
    try:
        with open(path, "rb") as file:
            shape, dtype, offset = _npy_shape(file)
    except FileNotFoundError:
        raise MissingFile(f"{path}: was removed while it was looked at; try again") from None
    except ValueError as error:
        raise FormatError(f"{path}: not an array that NumPy saved: {error}") from error
    data = map_readonly(path)[offset:]
    if dtype.name not in ARRAY_DTYPES or data.size != math.prod(shape) * dtype.itemsize:
        raise FormatError(
            f"{path}: its header promises {dtype} of shape {shape}, the file has {data.size} bytes "
            "after it; it may be cut short or still be written; remove the files of that name"
        )
    return data.view(dtype).reshape(shape), offset


def _npy_shape(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("its format version is not 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype.hasobject:
        raise ValueError("it is not C-contiguous or holds objects")
    return shape, dtype, file.tell()
