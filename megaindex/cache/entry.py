"""A cache entry and its manifest."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import secrets
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.cache.durable import make_durable_later
from megaindex.cache.fingerprint import CACHE_FORMAT, array_checksum, canonical_json
from megaindex.cache.npy import (
    ARRAY_DTYPES,
    WORTH_MAPPING,
    map_new,
    npy_header,
    populate,
    write_new,
)
from megaindex.errors import FormatError
from megaindex.io.filesystem import is_local
from megaindex.io.json_files import read_object
from megaindex.io.os_errors import as_storage_error

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


logger = logging.getLogger("megaindex")


class EntryWriter:
    """A sink for index arrays that publishes them as ``<cache_dir>/<key>/`` or not at all.

    Large arrays on a local file system are mapped files: what a kernel writes is already in place,
    and their pages are brought in ahead of the kernels. Others are written from memory. Either way,
    and for the checksums, this happens while the next kernel runs. `publish` writes the manifest
    last and renames the directory. Whoever comes second drops its copy: both are equal.
    """

    def __init__(self, cache_dir: str | os.PathLike[str], key: str) -> None:
        self._root = Path(cache_dir)
        self._key = key
        self._tmp = self._root / f"tmp.{key}.{secrets.token_hex(8)}"
        self._local = True
        self._arrays: dict[str, IntArray] = {}
        self._checksums: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(1, "megaindex-publish")

    def __enter__(self) -> EntryWriter:
        try:
            with as_storage_error(str(self._root), "cannot create a cache entry in it"):
                self._root.mkdir(parents=True, exist_ok=True)
                self._tmp.mkdir()
            self._local = is_local(self._tmp)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._arrays.clear()
        finally:
            _remove_tree(self._tmp)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        array: IntArray = np.empty(shape, dtype)  # takes no memory before it is touched
        if self._is_mapped(array):
            array = map_new(self._file(name), shape, dtype)
            self._pool.submit(populate, array)
        self._arrays[name] = array
        return array

    def done(self, name: str) -> None:
        array = self._arrays[name]
        if self._is_mapped(array):
            task = self._pool.submit(array_checksum, array)
        else:
            task = self._pool.submit(write_new, self._file(name), array)
        self._checksums[name] = task

    def publish(self, parameters: dict[str, Any]) -> bool:
        """Make the entry visible under its key; False if another process did so before."""
        manifest = Manifest(
            key=self._key,
            parameters=parameters,
            arrays={name: self._record(name) for name in self._arrays},
            boot_id=boot_id(),
        )
        path = self._tmp / MANIFEST
        with as_storage_error(str(path), "cannot write"):
            path.write_text(manifest.dumps())
        target = self._root / self._key
        with as_storage_error(str(target), "cannot publish the cache entry"):
            try:
                os.rename(self._tmp, target)
            except OSError as error:
                # A network file system may refuse the name, and not show the entry that has it yet.
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                if not taken and not (target / MANIFEST).exists():
                    raise
                logger.info("%s: another process published it first, using that one", target)
                return False
        make_durable_later(target)
        return True

    def _is_mapped(self, array: IntArray) -> bool:
        return self._local and array.nbytes >= WORTH_MAPPING

    def _file(self, name: str) -> Path:
        return self._tmp / f"{name}.npy"

    def _record(self, name: str) -> ArrayRecord:
        array = self._arrays[name]
        return ArrayRecord(
            file=f"{name}.npy",
            dtype=array.dtype.name,
            shape=array.shape,
            offset=len(npy_header(array.shape, array.dtype.name)),
            checksum=self._checksums[name].result(),
        )


@functools.cache  # no process outlives it
def boot_id() -> str:
    """Identifies this boot of this machine: pages written under it are still in its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def quarantine(entry: Path) -> None:
    """Remove an entry at once for everybody, then its files."""
    aside = entry.with_name(f"tmp.{entry.name}.{secrets.token_hex(8)}")
    with as_storage_error(str(entry), "cannot remove the damaged entry"):
        try:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(entry, aside)
        finally:
            if aside.is_symlink() or aside.is_file():  # someone put it there; what it names is left
                aside.unlink(missing_ok=True)
            else:
                _remove_tree(aside)


def _remove_tree(path: Path) -> None:
    """Best effort, but for a Ctrl-C: that is let through, and then nothing is left either."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
