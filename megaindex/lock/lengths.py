"""Files of the lengths of a lock's sources, from which its samples follow without the pairs.

docs/lock-format.md specifies them. They hold what the fingerprints are computed from, so that the
sources can be checked.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import FormatError, MissingFile
from megaindex.format import IndexedDataset
from megaindex.format.header import code_of_dtype, get_dialect
from megaindex.io.atomic import write_file
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import as_storage_error
from megaindex.lock.lock_file import Lock, LockedSource
from megaindex.lock.pinned_files import Folder, sound_paths
from megaindex.objects.files import local_copy, stat_path

_KIND, VERSION = b"MIDXLEN", 1
MAGIC = _KIND + bytes([VERSION])
_ROW = np.dtype([("fingerprint", "V16"), ("bin_bytes", "<i8"), ("idx_bytes", "<i8"),
                 ("sequences", "<i8"), ("bounds", "<i8")])  # fmt: skip
_AT_ONCE = 1 << 20  # sequences
_AGAIN = "give the file that was published with the lock"


def write_lengths(lock: Lock, path: Folder, *, overwrite: bool = False) -> None:
    """Write the lengths of all sources of a lock as one file.

    Raises:
        MissingFile, FormatError: a source does not exist, or is not what it was.
        StorageError: a source cannot be read, or the file not written.
    """
    dialect = lock.content["dialect"]
    pairs = [IndexedDataset(prefix, dialect=dialect) for prefix in sound_paths(lock)]
    bounds = [_bounds_of(pair) for pair in pairs]
    sizes = [(pair.nbytes, pair.index_nbytes, len(pair)) for pair in pairs]
    rows = [
        (bytes.fromhex(source.fingerprint), *three, each.size)
        for source, three, each in zip(lock.sources, sizes, bounds, strict=True)
    ]
    tables: list[npt.NDArray[Any]] = [*bounds, *(pair.sequence_lengths for pair in pairs)]

    def write(file: BinaryIO) -> None:
        file.write(MAGIC + len(rows).to_bytes(8, "little"))
        file.write(np.array(rows, _ROW).tobytes())
        for piece in itertools.chain.from_iterable(map(_pieces, tables)):
            file.write(piece.tobytes())

    write_file(os.fspath(path), write, overwrite=overwrite)


def _bounds_of(pair: IndexedDataset) -> npt.NDArray[np.int64]:
    """Return the bounds of a pair; none if they are 0, 1, …, n."""
    bounds = pair.document_indices
    is_plain = bounds.size == len(pair) + 1 and bool(np.all(np.diff(bounds) == 1))
    return bounds[:0] if is_plain and not bounds[0] else bounds


@contextlib.contextmanager
def pairs_of_lengths(path: Folder, lock: Lock) -> Iterator[list[str]]:
    """Return the prefixes of pairs with the lengths in a file, in a temporary folder.

    Their .idx have the lengths and bounds of the sources, and their .bin, which take no space, the
    sizes; fingerprints are compared with the lock.

    Raises:
        MissingFile, StorageError: the file cannot be read, or the folder not written.
        FormatError: it is not a file of lengths, or is that of another lock.
    """
    name = os.fspath(path)
    tables = _read(name, lock)
    with tempfile.TemporaryDirectory(prefix="megaindex.tmp.") as folder:
        prefixes = []
        for number, (source, table) in enumerate(zip(lock.sources, tables, strict=True)):
            prefixes.append(os.path.join(folder, str(number)))
            with as_storage_error(prefixes[-1], "cannot write"):
                _write_pair(prefixes[-1], source, lock.content["dialect"], *table)
            found = corpus_fingerprint(
                IndexedDataset(prefixes[-1], dialect=lock.content["dialect"])
            )
            if found != source.fingerprint:
                raise FormatError(
                    f"{name}: the fingerprint of source {number}, {source.path}, must be "
                    f"{source.fingerprint}, as in {lock.path}, got {found}; {_AGAIN}"
                )
        yield prefixes


def _read(name: str, lock: Lock) -> list[tuple[Any, ...]]:
    """Return bytes of the .idx, lengths and bounds of each source in a file of lengths."""
    info = stat_path(name)
    if info is None:
        raise MissingFile(f"{name}: does not exist; {_AGAIN}")
    data = map_readonly(local_copy(info))
    begin = len(MAGIC) + 8
    if data.size >= begin and data[:7].tobytes() == _KIND and data[7] != VERSION:
        raise FormatError(
            f"{name}: has version {data[7]} of the format, and this megaindex reads {VERSION}; use "
            "the release that wrote it"
        )
    if data[: len(MAGIC)].tobytes() != MAGIC or data.size < begin:
        raise FormatError(f"{name}: is not a file of lengths of `megaindex lock`; {_AGAIN}")
    count, sources = int.from_bytes(data[len(MAGIC) : begin].tobytes(), "little"), lock.sources
    if count != len(sources):
        raise FormatError(f"{name}: has {count} sources, and {lock.path} {len(sources)}; {_AGAIN}")
    end = begin + count * _ROW.itemsize
    rows = data[begin:end].view(_ROW).tolist() if end <= data.size else []
    stated = [(bytes.fromhex(s.fingerprint), s.bin_bytes, s.sequences) for s in sources]
    if [(row[0], row[1], row[3]) for row in rows] != stated or any(row[4] < 0 for row in rows):
        raise FormatError(f"{name}: its sources are not those of {lock.path}; {_AGAIN}")
    sizes = [8 * row[4] for row in rows] + [4 * row[3] for row in rows]
    places = np.cumsum([end, *sizes], dtype=object).tolist()
    if places[-1] != data.size:
        raise FormatError(f"{name}: must have {places[-1]} bytes, got {data.size}; {_AGAIN}")
    parts = [data[a:b] for a, b in pairwise(places)]
    return [
        (row[2], parts[count + k].view("<i4"), parts[k].view("<i8")) for k, row in enumerate(rows)
    ]


def _write_pair(
    prefix: str,
    source: LockedSource,
    dialect: str,
    idx_bytes: int,
    lengths: npt.NDArray[np.int32],
    bounds: npt.NDArray[np.int64],
) -> None:
    """Write a pair of a source's lengths, bounds and sizes; the .bin is a hole."""
    code = code_of_dtype(source.token_type, get_dialect(dialect), "token_type")
    dtype = np.dtype(source.token_type)
    n, plain = lengths.size, not bounds.size
    count = n + 1 if plain else bounds.size
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, n, count))
        for piece in _pieces(lengths):
            file.write(piece.tobytes())
        before = 0
        for piece in _pieces(lengths):
            ends = before + np.cumsum(piece, dtype=np.int64)
            begins = (ends - piece) * dtype.itemsize
            # of a .bin in which sequences share bytes, which do not follow from the lengths
            most = source.bin_bytes - piece.astype(np.int64) * dtype.itemsize
            file.write(np.minimum(begins, most).clip(0).astype("<i8").tobytes())
            before = int(ends[-1])
        for first in range(0, count, _AT_ONCE):
            end = min(first + _AT_ONCE, count)
            piece = np.arange(first, end) if plain else bounds[first:end]
            file.write(piece.astype("<i8").tobytes())
        modes = idx_bytes - file.tell()
        if modes not in (0, n):
            raise FormatError(
                f"{source.path}.idx: must have {file.tell()} bytes, and {n} more with modes, got "
                f"{idx_bytes}; {_AGAIN}"
            )
        file.truncate(idx_bytes)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(source.bin_bytes)


def _pieces(table: npt.NDArray[Any]) -> Sequence[npt.NDArray[Any]]:
    return [table[first : first + _AT_ONCE] for first in range(0, table.size, _AT_ONCE)]
