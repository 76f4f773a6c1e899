"""manifest.json: what a cache entry holds, so that it can be verified before it is used."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megaindex.errors import FormatError
from megaindex.io.json_files import read_object
from megaindex.store.fingerprint import CACHE_FORMAT, canonical_json
from megaindex.store.npy import ARRAY_DTYPES

MANIFEST = "manifest.json"
_LONGEST = 1 << 24  # bytes; a manifest has some hundreds
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """One array file of an entry."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes of the .npy header before the first element."""
    checksum: str
    """XXH3-128 of the elements' bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The parameters an entry was built from, its arrays, and the boot it was written under."""

    key: str
    parameters: dict[str, Any]
    arrays: dict[str, ArrayRecord]
    boot_id: str

    def dumps(self) -> str:
        body = {"cache_format": CACHE_FORMAT, **asdict(self)}
        body = json.loads(canonical_json(body))  # tuples become the lists that a reader sees
        return canonical_json({**body, "checksum": _checksum(body)})


def read_manifest(entry: Path) -> Manifest:
    """The manifest of the entry directory ``entry``.

    Raises:
        FormatError: missing, unreadable, of another format, or not what was written.
    """
    path = entry / MANIFEST
    try:
        body = read_object(path, longest=_LONGEST, follow=False)
        if body.pop("checksum") != _checksum(body):
            raise ValueError("its checksum does not match its content")
        if body.pop("cache_format") != CACHE_FORMAT:
            raise ValueError("it has another cache format")
        arrays = {name: _record(name, fields) for name, fields in body.pop("arrays").items()}
        manifest = Manifest(**body, arrays=arrays)
        if not isinstance(manifest.parameters, dict):
            raise ValueError("its parameters are no object")
        return manifest
    except _UNREADABLE as error:
        raise FormatError(
            f"{path}: the manifest of a cache entry must be as megaindex wrote it, but {error}; "
            "remove the directory, it will be rebuilt"
        ) from error


_UNREADABLE = (
    *(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,  # of the checksum, of what can just be read
)


def _record(name: str, fields: dict[str, Any]) -> ArrayRecord:
    record = ArrayRecord(**{**fields, "shape": tuple(fields["shape"])})
    if not _ARRAY_NAME.fullmatch(name) or record.file != f"{name}.npy":
        raise ValueError(f"array {name!r} names the file {record.file!r}")
    if record.dtype not in ARRAY_DTYPES:
        raise ValueError(f"array {name!r} has dtype {record.dtype!r}")
    sizes = (*record.shape, record.offset)
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError(f"array {name!r} has shape {record.shape!r}, offset {record.offset!r}")
    # NumPy multiplies sizes even where one of them is 0, and reads aligned elements only
    if len(record.shape) > 2 or math.prod(map(_at_least_1, record.shape)) >= 2**59:
        raise ValueError(f"array {name!r} has shape {record.shape!r}")
    if record.offset % 16:
        raise ValueError(f"array {name!r} has offset {record.offset}, no multiple of 16")
    return record


def _at_least_1(size: int) -> int:
    return max(1, size)


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(body).encode())
