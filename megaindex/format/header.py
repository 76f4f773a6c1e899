"""The header of an .idx file and the dtype codes of each framework.

The frameworks agree on 1–5 and 8. GPT-NeoX exchanges 6 and 7, and PaddleNLP adds 9 and 10. A file
does not record the framework that wrote it, so the caller names the dialect.

    offset       bytes  content
    0                9  magic b"MMIDIDX\\0\\0"
    9                8  version, uint64: 1
    17               1  dtype code of the tokens in the .bin (see DIALECTS)
    18               8  n, the number of sequences, uint64
    26               8  m, the number of document bounds (documents + 1), uint64
    34              4n  length of each sequence in tokens, int32
    34 + 4n         8n  offset of each sequence in the .bin, in bytes, int64
    34 + 12n        8m  document bounds: document d is sequences bounds[d] : bounds[d + 1], int64
    34 + 12n + 8m    n  mode of each sequence, int8: multimodal files only

All little-endian and unpadded, so the arrays are not aligned in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument

RESTORE = "restore the file or write the pair again"
_SHARED = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One breach of a rule of a format."""

    rule: str
    """Short name of the rule, such as "header-size"."""
    where: str = "the file"
    """Such as "byte 0", "sequence 3", "document bound 7"."""
    found: str
    expected: str
    text: str = ""
    """Message, for rules that readers enforce."""
    remedy: str = RESTORE

    def error(self, path: str) -> FormatError:
        """Return the exception for a file."""
        return FormatError(f"{path}: {self.text}; {self.remedy}")


@dataclass(frozen=True, kw_only=True)
class DtypeTable:
    """Dtype codes of one family of frameworks, and its rule for document bounds."""

    name: str
    dtypes: Mapping[int, np.dtype[Any]]
    """Token dtype of each code."""
    bounds_may_stop_short: bool = False
    """True if document bounds may end before the last sequence: GPT-NeoX's merge tool copies
    sequences but not document bounds, and its training reads only sequences."""


def _dialect(
    name: str, own: Mapping[int, str], *, bounds_may_stop_short: bool = False
) -> DtypeTable:
    names = {**_SHARED, **own}
    dtypes = {code: np.dtype(names[code]) for code in sorted(names)}
    return DtypeTable(name=name, dtypes=dtypes, bounds_may_stop_short=bounds_may_stop_short)


DIALECTS: Mapping[str, DtypeTable] = {
    dialect.name: dialect
    for dialect in (
        _dialect("megatron", {6: "float64", 7: "float32"}),
        _dialect("neox", {6: "float32", 7: "float64"}, bounds_may_stop_short=True),
        _dialect("paddlenlp", {6: "float64", 7: "float32", 9: "uint32", 10: "uint64"}),
    )
}


def get_dialect(name: str) -> DtypeTable:
    """Return the dialect called `name`; InvalidArgument if it is unknown."""
    if name not in DIALECTS:
        raise InvalidArgument(f"dialect must be one of {', '.join(DIALECTS)}, got {name!r}")
    return DIALECTS[name]


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """First 34 bytes of an .idx, and the offsets of its arrays."""

    dtype_code: int
    num_sequences: int
    num_bounds: int

    @property
    def lengths_offset(self) -> int:
        return HEADER_BYTES

    @property
    def pointers_offset(self) -> int:
        return HEADER_BYTES + 4 * self.num_sequences

    @property
    def bounds_offset(self) -> int:
        return HEADER_BYTES + 12 * self.num_sequences

    @property
    def modes_offset(self) -> int:
        """Offset of the modes: the size of a file without them."""
        return HEADER_BYTES + 12 * self.num_sequences + 8 * self.num_bounds

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.dtype_code, self.num_sequences, self.num_bounds)


def parse_header(raw: bytes, idx_path: str) -> IndexHeader:
    """Return the header at the beginning of `raw`; FormatError if it breaks a rule."""
    fault = header_fault(raw)
    if fault is not None:
        raise fault.error(idx_path)
    *_, dtype_code, num_sequences, num_bounds = _HEADER.unpack_from(raw)
    return IndexHeader(dtype_code=dtype_code, num_sequences=num_sequences, num_bounds=num_bounds)


def header_fault(raw: bytes) -> Fault | None:
    """Return the first breach of a rule in the header at the beginning of `raw`."""
    if raw.startswith(_OLD_MAGIC):
        return Fault(
            rule="old-format",
            where="byte 0",
            found=repr(_OLD_MAGIC),
            expected=repr(MAGIC),
            text=f"must begin with {MAGIC!r}, got {_OLD_MAGIC!r}, the old 'lazy'/'cached' format",
            remedy="tokenize again with --dataset-impl mmap, or use megaindex import",
        )
    if len(raw) < HEADER_BYTES:
        return Fault(
            rule="header-size",
            where=f"byte {len(raw)}",
            found=f"{len(raw)} bytes",
            expected=f"{HEADER_BYTES} bytes or more",
            text=f"must have a header of {HEADER_BYTES} bytes, got {len(raw)} bytes",
        )
    magic, version, *_ = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        return Fault(
            rule="magic",
            where="byte 0",
            found=repr(magic),
            expected=repr(MAGIC),
            text=f"must begin with {MAGIC!r}, as a Megatron index does, got {magic!r}",
            remedy="check the path",
        )
    if version != VERSION:
        return Fault(
            rule="version",
            where="byte 9",
            found=str(version),
            expected=str(VERSION),
            text=f"must have format version {VERSION}, got {version}",
        )
    return None


def has_modes(header: IndexHeader, file_size: int, idx_path: str) -> bool:
    """Return True if the file holds modes; FormatError if its size does not fit its header.

    A file without sequences holds the mode of each.
    """
    fault = size_fault(header, file_size)
    if fault is not None:
        raise fault.error(idx_path)
    return file_size == header.modes_offset + header.num_sequences


def size_fault(header: IndexHeader, file_size: int) -> Fault | None:
    """Return a fault unless the file holds exactly the arrays that its header declares."""
    n, m = header.num_sequences, header.num_bounds
    without_modes = header.modes_offset
    if file_size in (without_modes, without_modes + n):
        return None
    sizes = f"{without_modes} bytes, or {without_modes + n} with modes"
    return Fault(
        rule="file-size",
        where=f"byte {min(file_size, without_modes)}",
        found=f"{file_size} bytes",
        expected=sizes,
        text=f"header declares {n} sequences and {m} document bounds "
        f"({HEADER_BYTES} + 12·{n} + 8·{m} = {sizes}), file has {file_size}",
        remedy=f"{RESTORE}; megaindex verify --repair lists what can be rebuilt",
    )


def dtype_of_code(code: int, dialect: DtypeTable, idx_path: str) -> np.dtype[Any]:
    """Return the token dtype of `code` in `dialect`; FormatError for `idx_path` if unknown."""
    fault = code_fault(code, dialect)
    if fault is not None:
        raise fault.error(idx_path)
    return dialect.dtypes[code]


def code_fault(code: int, dialect: DtypeTable) -> Fault | None:
    if code in dialect.dtypes:
        return None
    others = [other.name for other in DIALECTS.values() if code in other.dtypes]
    remedy = (
        f"open it with dialect={others[0]!r} if that framework wrote it"
        if others
        else "the header is damaged; restore the file or write it again"
    )
    return Fault(
        rule="dtype-code",
        where="byte 17",
        found=str(code),
        expected=f"one of {_listing(dialect)}",
        text=f"dtype code must be one of the {dialect.name} dialect ({_listing(dialect)}), got "
        f"{code}",
        remedy=remedy,
    )


def code_of_dtype(dtype: npt.DTypeLike, dialect: DtypeTable, name: str = "dtype") -> int:
    """Return the code of `dtype` in `dialect`; InvalidArgument with its name if it has none."""
    try:
        wanted = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise InvalidArgument(
            f"{name} must be a NumPy dtype such as int32, got {dtype!r}"
        ) from None
    for code, known in dialect.dtypes.items():
        if known == wanted:
            return code
    raise InvalidArgument(
        f"{name} {wanted} has no code in the {dialect.name} dialect; choose one of "
        f"{_listing(dialect)}"
    )


def _listing(dialect: DtypeTable) -> str:
    return ", ".join(f"{code} {dtype}" for code, dtype in dialect.dtypes.items())
