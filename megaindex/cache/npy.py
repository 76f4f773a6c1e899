"""The .npy files of index arrays: how new ones are made, and those of other programs mapped."""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.cache.fingerprint import array_bytes
from megaindex.errors import FormatError, MissingFile
from megaindex.io.mapping import map_readonly
from megaindex.io.os_errors import as_storage_error

ARRAY_DTYPES = ("int16", "int32", "int64", "uint8", "uint32")
"""Of the arrays that a cache may hold."""
WORTH_MAPPING = 32 << 20  # bytes; page faults of fewer cost more than writing them
_WRITE_BYTES = 8 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_MADVISE = ctypes.CDLL(None, use_errno=True).madvise


def map_new(path: Path, shape: tuple[int, ...], dtype: str) -> IntArray:
    """A new .npy file of that shape, mapped for writing; its room on the disk is reserved."""
    header = npy_header(shape, dtype)
    size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
    with as_storage_error(str(path), f"cannot reserve {size} bytes"):
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


def write_new(path: Path, array: IntArray) -> str:
    """Write a new .npy file from its first byte to its last; returns the elements' checksum."""
    data = array_bytes(array)
    digest = xxhash.xxh3_128()
    with as_storage_error(str(path), "cannot write"), open(path, "xb", buffering=0) as file:
        file.write(npy_header(array.shape, array.dtype.name))
        for begin in range(0, len(data), _WRITE_BYTES):
            part = data[begin : begin + _WRITE_BYTES]
            digest.update(part)
            while part:  # a write may take less than it was given
                part = part[file.write(part) :]
    return digest.hexdigest()


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The .npy header, so that ``numpy.load`` reads the arrays of an entry too."""
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
    """The array in the file, read-only, and the bytes of its header; pickles are never loaded.

    Raises:
        MissingFile: there is no such file.
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
