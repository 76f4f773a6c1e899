"""Find and decode the column of tokens in MDS samples."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.imports.flat import token_dtype
from megaindex.errors import FormatError, InvalidArgument

_USUAL = ("tokens", "input_ids")
_DTYPE_BYTES = {
    "uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33,
    "uint64": 64, "int64": 65,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Column:
    """Where the tokens are in a sample, and how they are encoded."""

    name: str
    dtype: np.dtype[Any]
    size: int | None
    """Bytes, if the same in all samples."""
    num_sizes: int
    """uint32 sizes at the front of each sample."""
    sizes_before: int
    """How many of them belong to columns in front of this one."""
    bytes_before: int
    """Bytes of the columns in front of this one that have a fixed size."""
    dtype_in_data: bool = False
    """An ndarray whose type is stored with each sample."""
    shape_in_data: bool = False
    """An ndarray whose shape is stored with each sample."""

    def decode(self, sample: bytes, path: str) -> npt.NDArray[Any]:
        """The tokens of a sample; FormatError if it is damaged."""
        if len(sample) < 4 * self.num_sizes:
            raise self._damaged(path, f"a sample has {len(sample)} bytes")
        sizes = struct.unpack_from(f"<{self.num_sizes}I", sample)
        begin = 4 * self.num_sizes + self.bytes_before + sum(sizes[: self.sizes_before])
        size = sizes[self.sizes_before] if self.size is None else self.size
        data = sample[begin : begin + size]
        if len(data) < size:
            raise self._damaged(path, f"{len(data)} of {size} bytes are there")
        if self.dtype_in_data:
            data = self._without_dtype(data, path)
        if self.shape_in_data:
            data = self._without_shape(data, path)
        if len(data) % self.dtype.itemsize:
            raise self._damaged(
                path,
                f"{len(data)} bytes are not whole tokens of {self.dtype}, {self.dtype.itemsize} "
                f"bytes each",
            )
        return np.frombuffer(data, self.dtype)

    def _without_dtype(self, data: bytes, path: str) -> bytes:
        expected = _DTYPE_BYTES[str(self.dtype)]
        if data[:1] != bytes([expected]):
            raise self._damaged(
                path, f"an array has type code {data[:1].hex()}, and {self.dtype} is {expected:x}"
            )
        return data[1:]

    def _without_shape(self, data: bytes, path: str) -> bytes:
        """A byte says how many axes there are and how wide their lengths; then the lengths."""
        axes, width = (data[0] >> 2, 1 << (data[0] & 3)) if data else (0, 1)
        length = int.from_bytes(data[1 : 1 + width], "little")
        values = data[1 + width :]
        if axes != 1 or length * self.dtype.itemsize != len(values):
            raise self._damaged(
                path,
                f"an array of {axes} axes and {len(values)} bytes says length {length}; token "
                f"arrays have one axis",
            )
        return values

    def _damaged(self, path: str, what: str) -> FormatError:
        return FormatError(
            f"{path}: column {self.name!r}: {what}; check the column and its stored type"
        )


def find_column(
    names: Sequence[str],
    encodings: Sequence[str],
    sizes: Sequence[int | None],
    wanted: str | None,
    stored_dtype: npt.DTypeLike | None,
    folder: str,
) -> Column:
    """The column called `wanted`, or a usual one, or the only one; InvalidArgument if none fits.

    TypeError where names, encodings and sizes are not what the writer of an index writes.
    """
    _check_lists(names, encodings, sizes)
    usual = names if len(names) == 1 else [name for name in _USUAL if name in names]
    name = wanted if wanted is not None else next(iter(usual), None)
    if name is None or name not in names:
        raise InvalidArgument(
            f"{folder}: no column {name or 'of tokens'}; choose one of {', '.join(names)}"
        )
    at = list(names).index(name)
    return Column(
        name=name,
        size=sizes[at],
        num_sizes=sum(size is None for size in sizes),
        sizes_before=sum(size is None for size in sizes[:at]),
        bytes_before=sum(size or 0 for size in sizes[:at]),
        **_encoding(encodings[at], stored_dtype, f"{folder}: column {name!r}"),
    )


def _check_lists(names: Any, encodings: Any, sizes: Any) -> None:
    for name, values, kinds in (
        ("names", names, (str,)),
        ("encodings", encodings, (str,)),
        ("sizes", sizes, (int, type(None))),
    ):
        if not isinstance(values, list) or len(values) != len(names):
            raise TypeError(f"column_{name} must be a list, one of each column, found {values!r}")
        if not all(isinstance(v, kinds) and not (isinstance(v, int) and v < 0) for v in values):
            raise TypeError(f"column_{name} cannot be {values!r}")


def _encoding(encoding: str, stored_dtype: npt.DTypeLike | None, where: str) -> dict[str, Any]:
    """Token type, and what is stored in front of each sample's tokens.

    "bytes"; "ndarray", any array; "ndarray:int32", of any length; "ndarray:int32:2048".
    """
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "bytes":
        return {"dtype": token_dtype("int64" if stored_dtype is None else stored_dtype)}
    if kind == "ndarray" and not dtype:
        if stored_dtype is None:
            raise InvalidArgument(
                f"stored_dtype: {where} may have another type in each sample; give the type "
                f"of all, e.g. int32"
            )
        return {"dtype": token_dtype(stored_dtype), "dtype_in_data": True, "shape_in_data": True}
    if kind == "ndarray" and dtype in _DTYPE_BYTES and "," not in shape:
        if stored_dtype is not None and token_dtype(stored_dtype) != dtype:
            raise InvalidArgument(f"stored_dtype={stored_dtype}: {where} says {dtype} itself")
        return {"dtype": np.dtype(dtype), "shape_in_data": not shape}
    raise InvalidArgument(
        f"{where} is encoded as {encoding!r}; tokens are bytes or arrays with one axis and an "
        f"integer type, such as ndarray:int32"
    )
