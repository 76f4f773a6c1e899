"""The .npy files of index arrays: mapped or written while they are filled, and read."""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import math
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.cache.fingerprint import array_bytes
from megaindex.errors import FormatError, MissingFile
from megaindex.io.mapping import BAD_NPY, MOST_AT_ONCE, map_readonly
from megaindex.io.paths import as_storage_error, is_local, storage_error

ARRAY_DTYPES = ("int16", "int32", "int64", "uint8", "uint32")
"""Dtypes of arrays in a cache."""
WORTH_MAPPING = 64 << 20  # bytes; below, page faults cost more than writing
_WORTH_A_THREAD = 1 << 20  # bytes; above, written while the next kernel runs
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_POPULATED_AT_ONCE = 4 << 20  # bytes; meanwhile other threads cannot map memory, nor start threads
_LONGEST_HEADER = 10 + (1 << 16)  # bytes of a .npy, version 1.0, before its elements
_MADVISE = ctypes.CDLL(None, use_errno=True).madvise


class Written(NamedTuple):
    """Array in a .npy file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes of the .npy header."""
    checksum: str
    """XXH3-128 of the bytes of the elements."""
    status: os.stat_result | None
    """Status of the file after writing; None while the array is mapped."""


class MappedArrays:
    """Sink that writes each array to a new .npy file.

    Large arrays on a local file system are mapped files, populated ahead of the kernels; others are
    written from memory. Large arrays are written and hashed while the next kernel runs.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, IntArray] = {}
        """Allocated arrays by name, until `finish`."""
        self._mapped: set[str] = set()
        self._populated: list[Future[None]] = []
        self._written: dict[str, Written | Future[Written]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def path_of(self, name: str) -> str:
        """Return the path of the file for an array."""
        raise NotImplementedError

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        path = self.path_of(name)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        can_reserve = hasattr(os, "posix_fallocate") and size >= WORTH_MAPPING
        if can_reserve and is_local(os.path.dirname(path) or "."):
            array = map_new(path, shape, dtype)
            self._mapped.add(name)
            # page faults of a new file would stop the kernel that fills it, one page at a time
            self._populated.append(self._threads().submit(populate, array))
        else:
            array = np.empty(shape, dtype)
        self.arrays[name] = array
        return array

    def seal(self, name: str) -> None:
        """Write an array that is complete."""
        if name in self._mapped or self.arrays[name].nbytes >= _WORTH_A_THREAD:
            self._written[name] = self._threads().submit(self._write_array, name)
        else:
            self._written[name] = self._write_array(name)

    def _write_array(self, name: str) -> Written:
        array = self.arrays[name]
        if name in self._mapped:
            return _describe(array, array_bytes(array))
        return write_new(self.path_of(name), array)

    def write(self, name: str, array: IntArray) -> None:
        """Write an array of the caller."""
        if array.nbytes >= WORTH_MAPPING:
            self.allocate(name, array.shape, array.dtype.name)[...] = array
        else:
            self.arrays[name] = array
        self.seal(name)

    def finish(self) -> dict[str, Written]:
        """Wait until every array is written, and describe their files; the arrays are dropped."""
        for populated in self._populated:
            # pages that nobody has touched yet are written by the kernels already
            if not populated.cancel():
                populated.result()
        # the last ones have not begun, so this thread writes them while the other one goes on
        last_first = {name: self._result(name) for name in reversed(self.arrays)}
        written = {name: last_first[name] for name in self.arrays}
        arrays, self.arrays = self.arrays, {}
        if self._pool is not None:  # unmapping takes a tenth of a second a GB
            self._pool.submit(arrays.clear)
            self._pool.shutdown(wait=False)
            self._pool = None
        for name in self._mapped:  # after all writes: touching mapped pages changes the file time
            path = self.path_of(name)
            with as_storage_error(path, "cannot read its status"):
                written[name] = written[name]._replace(status=os.stat(path))
        return written

    def close(self) -> None:
        """End the thread and drop the arrays; after `finish` the thread does both by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.arrays.clear()

    def _result(self, name: str) -> Written:
        file = self._written[name]
        if not isinstance(file, Future):
            return file
        return self._write_array(name) if file.cancel() else file.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "megaindex-arrays")
        return self._pool


def map_new(path: str, shape: tuple[int, ...], dtype: str) -> IntArray:
    """Return the mapped array of a new .npy file, whose disk space is reserved."""
    header = npy_header(shape, dtype)
    size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
    with as_storage_error(path, f"cannot reserve {size} bytes"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # a full disk is an error here, and would be a signal in a kernel
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, header, 0)
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
    array: IntArray = np.frombuffer(mapping, dtype, offset=len(header)).reshape(shape)
    return array


def write_new(path: str, array: IntArray) -> Written:
    """Write a new .npy file."""
    data = array_bytes(array)
    header = npy_header(array.shape, _name_of(array.dtype))
    status = create_file(path, header, data)
    return _describe(array, data, status)


def create_file(path: str, header: bytes, data: bytes | memoryview = b"") -> os.stat_result:
    """Write a new file of header and data; StorageError if it exists or cannot be written."""
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
    written = os.writev(fd, (header, memoryview(data)[:MOST_AT_ONCE])) - len(header)
    if written < 0:  # a short write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def _describe(array: IntArray, data: memoryview, status: os.stat_result | None = None) -> Written:
    """Describe the file of an array, whose bytes are ``data``."""
    dtype = _name_of(array.dtype)
    offset = len(npy_header(array.shape, dtype))
    return Written(dtype, array.shape, offset, xxhash.xxh3_128_hexdigest(data), status)


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # composed in Python at each access


@functools.lru_cache(maxsize=4096)
def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the header of a .npy file."""
    buffer = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def populate(array: IntArray) -> None:
    """Populate the pages of a mapped array (Linux 5.14 or later; otherwise ignored)."""
    end = array.ctypes.data + array.nbytes
    for begin in range(array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE, end, _POPULATED_AT_ONCE):
        size = min(_POPULATED_AT_ONCE, end - begin)
        _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))


def map_npy(path: str) -> tuple[IntArray, int]:
    """Return the mapped, read-only array of a file and the size of its header.

    Raises:
        MissingFile: the file does not exist.
        FormatError: it is not a complete array with one of `ARRAY_DTYPES`.
        StorageError: it cannot be read.
    """
    try:
        data = map_readonly(path)
        shape, dtype, offset = _npy_shape(io.BytesIO(data[:_LONGEST_HEADER].tobytes()))
    except MissingFile:
        raise MissingFile(f"{path}: was removed while being read; try again") from None
    except BAD_NPY as error:
        raise FormatError(f"{path}: not an array that NumPy saved: {error}") from error
    # mapped, not read: NumPy's own loader would copy it
    data = data[offset:]
    if dtype.name not in ARRAY_DTYPES or data.size != math.prod(shape) * dtype.itemsize:
        raise FormatError(
            f"{path}: the file must have the {dtype} elements of shape {shape} of its header, got "
            f"{data.size} bytes; it may be truncated or incomplete; remove the files of that name"
        )
    return data.view(dtype).reshape(shape), offset


def _npy_shape(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    # all arrays here have short headers, so another version was not written by these programs
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("its format version must be 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype.hasobject:
        raise ValueError("it must be C-contiguous and without objects")
    return shape, dtype, file.tell()
