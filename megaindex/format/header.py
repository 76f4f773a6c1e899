"""The .idx file, byte by byte.

    offset       bytes  what
    0                9  magic b"MMIDIDX\\0\\0"
    9                8  version, uint64: 1
    17               1  dtype code of the tokens in the .bin (see dtypes.py)
    18               8  n, the number of sequences, uint64
    26               8  m, the number of document bounds (documents + 1), uint64
    34              4n  length of each sequence in tokens, int32
    34 + 4n         8n  where each sequence begins in the .bin, in bytes, int64
    34 + 12n        8m  document bounds: document d is sequences bounds[d] : bounds[d + 1], int64
    34 + 12n + 8m    n  mode of each sequence, int8: multimodal files only

All little-endian and unpadded, so the arrays are not aligned in memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from megaindex.errors import FormatError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_REMEDY = "restore the file or write the pair again"


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """What the first 34 bytes say, and where the arrays lie that follow from it."""

    dtype_code: int
    num_sequences: int
    num_bounds: int

    @property
    def lengths_offset(self) -> int:
        return HEADER_BYTES

    @property
    def pointers_offset(self) -> int:
        return self.lengths_offset + 4 * self.num_sequences

    @property
    def bounds_offset(self) -> int:
        return self.pointers_offset + 8 * self.num_sequences

    @property
    def modes_offset(self) -> int:
        """Also the size of the file when it has no modes."""
        return self.bounds_offset + 8 * self.num_bounds

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.dtype_code, self.num_sequences, self.num_bounds)


def parse_header(raw: bytes, idx_path: str) -> IndexHeader:
    """Read a header from the beginning of `raw`; FormatError if it is none."""
    if raw.startswith(_OLD_MAGIC):
        raise FormatError(
            f"{idx_path}: begins with {_OLD_MAGIC!r}, the old 'lazy'/'cached' format, and must "
            f"begin with {MAGIC!r}; tokenize again with --dataset-impl mmap"
        )
    if len(raw) < HEADER_BYTES:
        raise FormatError(
            f"{idx_path}: has {len(raw)} bytes, its header alone takes {HEADER_BYTES}; {_REMEDY}"
        )
    magic, version, dtype_code, num_sequences, num_bounds = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise FormatError(
            f"{idx_path}: begins with {magic!r} and must begin with {MAGIC!r}: not a "
            f"Megatron index; check the path"
        )
    if version != VERSION:
        raise FormatError(
            f"{idx_path}: has format version {version}, and only version {VERSION} is known; "
            f"{_REMEDY}"
        )
    return IndexHeader(dtype_code=dtype_code, num_sequences=num_sequences, num_bounds=num_bounds)


def has_modes(header: IndexHeader, file_size: int, idx_path: str) -> bool:
    """Account for every byte of the file: whether modes follow the arrays the header promises.

    Python integers cannot overflow, so no pair of counts slips through. A file without sequences
    has, trivially, the mode of each.
    """
    n, m = header.num_sequences, header.num_bounds
    without_modes = header.modes_offset
    if file_size in (without_modes, without_modes + n):
        return file_size == without_modes + n
    raise FormatError(
        f"{idx_path}: header promises {n} sequences and {m} document bounds "
        f"({HEADER_BYTES} + 12·{n} + 8·{m} = {without_modes} bytes, or {without_modes + n} with "
        f"modes), file has {file_size}; {_REMEDY}"
    )
