"""Entries of the cache: manifests, writing, and syncing to disk.

Published entries are synced in the background, then marked by an empty file (docs/scale.md).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaindex.cache.fingerprint import CACHE_FORMAT, canonical_json, json_digest
from megaindex.cache.npy import ARRAY_DTYPES, MappedArrays
from megaindex.errors import FormatError
from megaindex.io.atomic import read_object
from megaindex.io.paths import as_storage_error

logger = logging.getLogger("megaindex")

MANIFEST = "manifest.json"
DURABLE = "durable"
_LONGEST = 1 << 24  # bytes; a manifest has some hundreds
_DELAY_SECONDS = 2.0  # before an entry is synced, so that the end of the build does not wait for it
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """Array file of an entry."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes of the .npy header before the first element."""
    checksum: str
    """XXH3-128 of the elements' bytes."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Parameters that an entry was built from, its arrays, and the boot that it was written in."""

    key: str
    parameters: dict[str, Any]
    arrays: dict[str, ArrayRecord]
    boot_id: str

    def dumps(self) -> str:
        body = {"cache_format": CACHE_FORMAT, **asdict(self)}
        body = json.loads(canonical_json(body))  # converts tuples to lists, as a reader gets
        return canonical_json({**body, "checksum": json_digest(body)})


def read_manifest(entry: Path) -> Manifest:
    """Return the manifest of an entry; FormatError if it is missing, damaged or outdated."""
    path = entry / MANIFEST
    try:
        body = read_object(path, longest=_LONGEST, follow=False)
        if body.pop("checksum") != json_digest(body):
            raise ValueError("its checksum does not match its content")
        if body.pop("cache_format") != CACHE_FORMAT:
            raise ValueError("it has another cache format")
        arrays = {name: _record(name, fields) for name, fields in body.pop("arrays").items()}
        manifest = Manifest(**body, arrays=arrays)
        if not isinstance(manifest.parameters, dict):
            raise ValueError("its parameters must be an object")
        return manifest
    except _UNREADABLE as error:
        raise FormatError(
            f"{path}: the manifest of the entry is damaged: {error}; remove the directory, it "
            "will be rebuilt"
        ) from error


_UNREADABLE = (
    *(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,  # of the checksum of deeply nested values
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
    # NumPy multiplies sizes even if one of them is 0, and needs aligned elements
    if len(record.shape) > 2 or math.prod(max(1, size) for size in record.shape) >= 2**59:
        raise ValueError(f"array {name!r} has shape {record.shape!r}")
    if record.offset % 16:
        raise ValueError(f"array {name!r} has offset {record.offset}, not a multiple of 16")
    return record


class EntryWriter(MappedArrays):
    """Sink for index arrays that are published as ``<cache_dir>/<key>/`` by a rename."""

    def __init__(self, cache_dir: str | os.PathLike[str], key: str) -> None:
        super().__init__()
        self._root = Path(cache_dir)
        self._key = key
        self._tmp = self._root / f"tmp.{key}.{secrets.token_hex(8)}"

    def __enter__(self) -> EntryWriter:
        try:
            with as_storage_error(str(self._root), "cannot create a cache entry in it"):
                self._root.mkdir(parents=True, exist_ok=True)
                self._tmp.mkdir()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        finally:
            remove_entry(self._tmp)

    def path_of(self, name: str) -> str:
        return f"{self._tmp}/{name}.npy"

    def publish(self, parameters: dict[str, Any]) -> bool:
        """Publish the entry under its key; False if another process has published it before."""
        records = {
            name: ArrayRecord(
                file=f"{name}.npy",
                dtype=file.dtype,
                shape=file.shape,
                offset=file.offset,
                checksum=file.checksum,
            )
            for name, file in self.finish().items()
        }
        manifest = Manifest(key=self._key, parameters=parameters, arrays=records, boot_id=boot_id())
        path = self._tmp / MANIFEST
        with as_storage_error(str(path), "cannot write"):
            path.write_text(manifest.dumps())
        target = self._root / self._key
        with as_storage_error(str(target), "cannot publish the cache entry"):
            try:
                os.rename(self._tmp, target)
            except OSError as error:
                # A network file system may refuse the name before it shows the existing entry.
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                if not taken and not (target / MANIFEST).exists():
                    raise
                logger.info("%s: another process published it first, using that one", target)
                return False
        # a sync takes seconds, and readers of this boot need none
        make_durable_later(target)
        return True


@functools.cache
def boot_id() -> str:
    """Return an identifier of this boot: pages written in it are on disk or still in memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def quarantine(entry: Path) -> None:
    """Rename an entry, so that no process finds it, then remove its files."""
    aside = entry.with_name(f"tmp.{entry.name}.{secrets.token_hex(8)}")
    with as_storage_error(str(entry), "cannot remove the damaged entry"):
        try:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(entry, aside)
        finally:
            remove_entry(aside)


def remove_entry(path: Path) -> None:
    """Remove what is at a path, ignoring errors; a Ctrl-C is raised after a second attempt.

    Only a directory is entered: ``rmtree`` would open anything else, and wait for a pipe.
    """
    if os.path.islink(path) or not os.path.isdir(path):  # False where they cannot be asked
        with contextlib.suppress(OSError):
            path.unlink()
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def make_durable_later(entry: Path) -> None:
    """Sync and mark an entry in the background; marked ones are not verified after a reboot."""
    sync_later(functools.partial(make_durable, entry))


def sync_later(sync: Callable[[], None]) -> None:
    """Call ``sync``, which must handle its errors, in the background after a delay."""
    _worker.schedule(sync)


def make_durable(entry: Path) -> None:
    """Sync an entry now and mark it."""
    with contextlib.suppress(OSError), opened(entry) as directory:
        # By descriptor: the name may refer to another entry by now.
        for name in os.listdir(directory):
            with opened(name, directory) as file:
                os.fsync(file)
        os.fsync(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(DURABLE, flags, 0o666, dir_fd=directory))


class _SyncThread:
    """Thread that syncs the entries of a process, started with the first."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def schedule(self, sync: Callable[[], None]) -> None:
        # later than the first steps, whose reads would compete with the writes
        self._tasks.put((time.monotonic() + _DELAY_SECONDS, sync))
        with self._lock:
            # a process that builds nothing has no thread
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="megaindex-durable", daemon=True).start()

    def _run(self) -> None:
        while True:
            due, sync = self._tasks.get()
            time.sleep(max(0.0, due - time.monotonic()))
            sync()


_worker = _SyncThread()


def _after_fork() -> None:
    """Replace the worker, whose thread does not exist in a forked process."""
    global _worker  # noqa: PLW0603
    _worker = _SyncThread()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def opened(
    path: str | Path, directory: int | None = None, mode: int = os.O_RDONLY
) -> Iterator[int]:
    """Open a descriptor without following a symbolic link or waiting for a pipe."""
    flags = mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
