"""Reader of the .idx of --dataset-impl lazy and cached, the format before mmap.

    offset         bytes  content
    0                  8  magic b"TNTIDX\\0\\0"
    8                  8  version: 1
    16                 8  dtype code of the tokens in the .bin
    24                 8  bytes per token
    32                 8  n, the number of sequences
    40                 8  s, the number of sizes: n, for sequences with one dimension
    48                 8  m, the number of document bounds (documents + 1)
    56           8(n + 1)  offset of the sizes of each sequence: 0, 1, 2, …
    …            8(n + 1)  offset of each sequence in the .bin, in tokens, and the end of the last
    …                 8s  sizes
    …                 8m  document bounds, in sequences

All are little-endian 64-bit integers. The .bin is plain tokens, as in the mmap format.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError
from megaindex.format.header import check_bounds, dtype_of_code, get_dialect
from megaindex.format.pair import check_not_a_half, pair_paths
from megaindex.io.mapping import map_readonly

MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<8sQQQQQQ")
_CHUNK = 1 << 17  # entries checked at once
_REMEDY = "restore the file or tokenize again with --dataset-impl mmap"


@dataclass(frozen=True, kw_only=True, eq=False)
class LegacyPair:
    """A .bin and its old .idx as read-only arrays that own their mapping, with checked entries."""

    bin_path: str
    idx_path: str
    dtype: np.dtype[Any]
    sizes: npt.NDArray[np.int64]
    """Number of tokens of each sequence, int64[n]."""
    token_offsets: npt.NDArray[np.int64]
    """Offset of each sequence in the .bin, in tokens, and the end of the last, int64[n + 1]."""
    bounds: npt.NDArray[np.int64]
    """Document d is sequences bounds[d] : bounds[d + 1]; int64[m]. GPT-NeoX's merge tool writes
    bounds that end before the last sequence."""
    tokens: npt.NDArray[Any]
    """The whole .bin, as `dtype`."""

    @property
    def byte_offsets(self) -> npt.NDArray[np.int64]:
        """Offset of each sequence in the .bin, in bytes, int64[n]; a new array."""
        return self.token_offsets[:-1] * self.dtype.itemsize


def open_legacy(path_prefix: str, *, dialect: str = "neox") -> LegacyPair:
    """Map a pair of the old format and check every entry.

    Raises:
        MissingFile, StorageError: a file is missing or cannot be read.
        FormatError: a rule of the format is broken, or sequences have more than one dimension.
    """
    check_not_a_half(path_prefix)
    bin_path, idx_path = pair_paths(path_prefix)
    raw = map_readonly(idx_path)
    dtype, n, m = _parse_header(raw[: _HEADER.size].tobytes(), raw.size, dialect, idx_path)
    numbers = raw[_HEADER.size :].view(np.int64)
    dimensions, offsets, sizes, bounds = np.split(numbers, np.cumsum([n + 1, n + 1, n]))
    data = map_readonly(bin_path)
    tokens = data[: data.size - data.size % dtype.itemsize].view(dtype)
    _check_sequences(dimensions, offsets, sizes, tokens.size, idx_path)
    if m == 0 or bounds[0] != 0:
        raise FormatError(f"{idx_path}: document bound 0 must be 0; {_REMEDY}")
    check_bounds(bounds, n, idx_path)
    return LegacyPair(
        bin_path=bin_path,
        idx_path=idx_path,
        dtype=dtype,
        sizes=sizes,
        token_offsets=offsets,
        bounds=bounds,
        tokens=tokens,
    )


def _parse_header(
    raw: bytes, file_size: int, dialect: str, idx_path: str
) -> tuple[np.dtype[Any], int, int]:
    """Return token dtype, sequences and document bounds, after a check of the size of the file."""
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        raise FormatError(
            f"{idx_path}: must begin with {MAGIC!r} and a header of {_HEADER.size} bytes, as an "
            f"index of the old format does, got {raw[:8]!r}; check the path"
        )
    _, version, code, element_size, n, s, m = _HEADER.unpack(raw)
    if version != 1:
        raise FormatError(f"{idx_path}: must have version 1, got {version}; {_REMEDY}")
    dtype = dtype_of_code(code, get_dialect(dialect), idx_path)
    if element_size != dtype.itemsize:
        raise FormatError(
            f"{idx_path}: must have {dtype.itemsize} bytes per token, since dtype code {code} is "
            f"{dtype} in the {dialect} dialect, got {element_size}; {_REMEDY}"
        )
    if s != n:
        raise FormatError(
            f"{idx_path}: must have one size for each of its {n} sequences, as token sequences "
            f"have one dimension, got {s}; {_REMEDY}"
        )
    promised = _HEADER.size + 8 * (2 * (n + 1) + s + m)
    if file_size != promised:
        raise FormatError(
            f"{idx_path}: header declares {n} sequences and {m} document bounds "
            f"({promised} bytes), file has {file_size}; {_REMEDY}"
        )
    return dtype, n, m


def _check_sequences(
    dimensions: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    num_tokens: int,
    idx_path: str,
) -> None:
    """Check that sequences lie in the .bin one after the other, each of its size."""
    if offsets[0] != 0 or offsets[-1] > num_tokens:
        raise FormatError(
            f"{idx_path}: sequences must begin at token 0 and end within the {num_tokens} tokens "
            f"of the .bin, got {offsets[0]} to {offsets[-1]}; the .bin is cut short or belongs to "
            f"another .idx; {_REMEDY}"
        )
    for start in range(0, len(sizes), _CHUNK):
        chunk = sizes[start : start + _CHUNK]
        number = np.arange(start + 1, start + 1 + len(chunk))
        bad = (chunk < 0) | (dimensions[start + 1 : start + 1 + len(chunk)] != number)
        bad |= np.diff(offsets[start : start + 1 + len(chunk)]) != chunk
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"{idx_path}: sequence {start + i} must have one dimension and as many tokens as "
                f"its size, got size {chunk[i]} and tokens {offsets[start + i]} to "
                f"{offsets[start + i + 1]}; {_REMEDY}"
            )
