"""The files of a store: payloads of equal size, then sorted keys of 128 bits with their places.

A header of 128 bytes, the payloads, padding to a multiple of 8 bytes, and three columns of uint64:
first and second word of the keys, in increasing order, and the place of each payload in rows.
docs/reference.md has the fields of the header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from megaindex._types import I64, U8, U64
from megaindex.errors import FormatError
from megaindex.io.mapping import map_readonly

HEADER_BYTES = 128
KEY_BYTES = 24
_CHUNK_BYTES = 1 << 26  # of payloads that are compared, hashed or copied together
_MAGIC = b"MIXKEYS\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sQQQQ16s16s")
_SEAL = struct.Struct("<Q")  # at the end of the header: XXH3-64 of what is before


class Columns(NamedTuple):
    """Sorted keys of rows, and the place of the payload of each."""

    first: U64
    second: U64
    place: U64


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsFile:
    """Mapped, read-only rows of one file."""

    path: str
    columns: Columns
    payload: U8
    """uint8[payloads, bytes of a payload]."""
    digest: bytes
    """Of payloads and columns, from the header."""

    def search(self, first: U64, second: U64) -> I64:
        """Return int64[n]: the place of the payload of each key, -1 for a missing key.

        Raises:
            FormatError: a place lies beyond the payloads.
        """
        rows = _rows_of(self.columns, first, second)
        found = rows >= 0
        places = self.columns.place[rows[found]]
        self._check_places(places)
        rows[found] = places.astype(np.int64)
        return rows

    def check(self) -> None:
        """Read the whole file.

        Raises:
            FormatError: its bytes are not those that were written, keys do not increase, or a
                place lies beyond the payloads.
        """
        digest = xxhash.xxh3_128()
        for part in chunks(*self.payload.shape):
            digest.update(self.payload[part].data)
        for column in self.columns:
            digest.update(column.data)
        if digest.digest() != self.digest:
            raise _damaged(
                self.path,
                f"XXH3-128 of its rows must be {self.digest.hex()}, got {digest.hexdigest()}",
            )
        first, second, places = self.columns
        increase = (first[1:] > first[:-1]) | (np.diff(first) == 0) & (second[1:] > second[:-1])
        if not increase.all():
            raise _damaged(self.path, f"keys must increase, but not at row {increase.argmin() + 1}")
        self._check_places(places)

    def _check_places(self, places: U64) -> None:
        if places.size and places.max() >= len(self.payload):
            raise _damaged(
                self.path, f"a payload must be below {len(self.payload)}, got {places.max()}"
            )


def _damaged(path: str, reason: str) -> FormatError:
    return FormatError(f"{path}: {reason}; remove the file and write its rows again")


def _rows_of(columns: Columns, first: U64, second: U64) -> I64:
    """Return int64[n]: the row of each key, -1 for a missing key.

    Keys with an equal first word are rare in a hash; for them the second word is searched too.
    """
    low = np.searchsorted(columns.first, first, "left")
    high = np.searchsorted(columns.first, first, "right")
    while (wide := np.flatnonzero(high - low > 1)).size:
        middle = (low[wide] + high[wide]) // 2
        above = columns.second[middle] > second[wide]
        high[wide] = np.where(above, middle, high[wide])
        low[wide] = np.where(above, low[wide], middle)
    inside = np.flatnonzero(high > low)
    rows = np.full(first.size, -1, np.int64)
    equal = inside[columns.second[low[inside]] == second[inside]]
    rows[equal] = low[equal]
    return rows


def open_rows(path: str, declaration: bytes, row_bytes: int) -> RowsFile:
    """Map a file of a store and check its header and size.

    Args:
        declaration: 16 bytes that stand for dtype and shape of the store.
        row_bytes: bytes of a payload.

    Raises:
        MissingFile, StorageError: it cannot be read, or is not a regular file.
        FormatError: it is damaged, cut short, of another version or of another store.
    """
    data = map_readonly(path, follow_symlinks=False)
    head = data[:HEADER_BYTES].tobytes()
    if len(head) < HEADER_BYTES:
        raise _damaged(path, f"it must have a header of {HEADER_BYTES} bytes, got {len(head)}")
    magic, version, rows, payloads, width, declared, digest = _FIELDS.unpack_from(head)
    if magic != _MAGIC:
        raise _damaged(path, f"it must begin with {_MAGIC!r}, got {magic!r}")
    if version != _VERSION:
        raise FormatError(
            f"{path}: version must be {_VERSION}, got {version}; use the release that wrote it"
        )
    if head[-_SEAL.size :] != _seal(head[: -_SEAL.size]):
        raise _damaged(path, "its header is damaged")
    if (declared, width) != (declaration, row_bytes):
        raise FormatError(f"{path}: is of a store of another dtype or shape; move it there")
    begin = _columns_begin(payloads, width)
    size = begin + rows * KEY_BYTES
    if data.size != size or rows > payloads:
        raise _damaged(path, f"it must have {size} bytes, got {data.size}")
    columns = data[begin:].view("<u8").reshape(3, rows)
    payload = data[HEADER_BYTES : HEADER_BYTES + payloads * width].reshape(payloads, width)
    return RowsFile(path=path, columns=Columns(*columns), payload=payload, digest=digest)


def begin_rows(stream: BinaryIO) -> None:
    """Leave the place of the header in a new file; payloads follow."""
    stream.write(bytes(HEADER_BYTES))


def finish_rows(
    stream: BinaryIO, columns: Columns, payloads: int, row_bytes: int, declaration: bytes,
    digest: xxhash.xxh3_128,
) -> None:  # fmt: skip
    """Write columns and header of a file whose payloads are written; ``digest`` is of these."""
    written = HEADER_BYTES + payloads * row_bytes
    stream.write(bytes(_columns_begin(payloads, row_bytes) - written))
    for column in columns:
        data = np.ascontiguousarray(column, "<u8")
        digest.update(data.data)
        stream.write(data.data)
    head = _FIELDS.pack(
        _MAGIC, _VERSION, columns.first.size, payloads, row_bytes, declaration, digest.digest()
    )
    head = head.ljust(HEADER_BYTES - _SEAL.size, b"\0")
    stream.seek(0)
    stream.write(head + _seal(head))


def _columns_begin(payloads: int, row_bytes: int) -> int:
    return -(-(HEADER_BYTES + payloads * row_bytes) // 8) * 8


def _seal(head: bytes) -> bytes:
    return _SEAL.pack(xxhash.xxh3_64_intdigest(head))


def distinct(
    first: U64, second: U64, places: I64, payloads: Payloads
) -> tuple[Columns, tuple[U64, I64] | None]:
    """Return the sorted columns of rows, each key once, with the first of its payloads.

    Also the first key that has two payloads, uint64[2], and their places, int64[2]; or None.
    """
    order = np.argsort(first, kind="stable")
    if (np.diff(first[order]) == 0).any():
        order = np.lexsort((second, first))
    columns = Columns(first[order], second[order], places[order].astype(np.uint64))
    repeats = np.zeros(order.size, np.bool_)
    repeats[1:] = (np.diff(columns.first) == 0) & (np.diff(columns.second) == 0)
    if not repeats.any():
        return columns, None
    again = np.flatnonzero(repeats)
    pairs = places[order[again - 1]], places[order[again]]
    unequal = first_unequal(payloads, pairs[0], payloads, pairs[1])
    if unequal is not None:
        key = np.array([column[again[unequal]] for column in columns[:2]])
        return columns, (key, np.array([pair[unequal] for pair in pairs]))
    return Columns(*(column[~repeats] for column in columns)), None


class Payloads:
    """Payloads of several files, counted through all of them."""

    def __init__(self, files: Sequence[U8]) -> None:
        self._files = files
        self._begins = np.cumsum([0, *map(len, files)])
        self.row_bytes = files[0].shape[1]

    def file_of(self, places: I64) -> I64:
        """Return the number of the file of each payload."""
        return np.searchsorted(self._begins, places, "right") - 1

    def take(self, places: I64) -> U8:
        """Return a copy of payloads, uint8[n, bytes of a payload]."""
        if len(self._files) == 1:
            return self._files[0][places]
        taken, of = np.empty((places.size, self.row_bytes), np.uint8), self.file_of(places)
        for number in np.unique(of).tolist():
            here = of == number
            taken[here] = self._files[number][places[here] - self._begins[number]]
        return taken


def chunks(count: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of ``count`` payloads, each of at most 64 MiB or of one payload."""
    step = max(1, _CHUNK_BYTES // row_bytes)
    yield from (slice(begin, min(begin + step, count)) for begin in range(0, count, step))


def first_unequal(payloads: Payloads, places: I64, others: Payloads, of: I64) -> int | None:
    """Return the first k where payload ``places[k]`` is not that at ``of[k]`` of others."""
    for part in chunks(places.size, payloads.row_bytes):
        unequal = (payloads.take(places[part]) != others.take(of[part])).any(axis=1)
        if unequal.any():
            return int(part.start + unequal.argmax())
    return None
