"""Map an .npy file that another program wrote."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import numpy as np

from megaindex.errors import FormatError, MissingFile
from megaindex.io.mapping import map_readonly
from megaindex.kernels.types import IntArray
from megaindex.store.manifest import ARRAY_DTYPES


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
