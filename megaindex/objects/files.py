"""One interface to local files and objects of a store, and the cache of local copies.

The cache has a record for each (URL, size, version) of an object, with the name and the checksum of
a copy. A copy is used if its stamp (inode, size, times) is the one recorded when its checksum was
verified; otherwise it is verified again. Copies have unique names and records are replaced
atomically, so that without working file locks several processes each download a copy and the last
record is used. All files of the directory may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import xxhash
from xxhash import xxh3_64_intdigest

from megaindex.io.atomic import AtomicFiles, read_object
from megaindex.io.mapping import DescriptorCache, RangeReader
from megaindex.io.paths import (
    FileInfo,
    as_storage_error,
    check_local,
    file_stamp,
    is_remote,
    open_regular,
    plain,
    refuse_zero_byte,
    storage_error,
    version_of,
)
from megaindex.io.threads import map_interruptibly
from megaindex.objects import store
from megaindex.progress import copying

logger = logging.getLogger("megaindex")

VARIABLE = "MEGAINDEX_OBJECT_CACHE"
_DEFAULT = "~/.cache/megaindex/objects"
_BLOCK = 32 << 20  # bytes in memory at once
_SETTLED = 2 * 10**9  # ns after a change, after which the next change has another time stamp
Result = TypeVar("Result")

_STORE_THREADS = 32
_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def stat_path(path: str) -> FileInfo | None:
    """Return the size and version of a file or object, or None if it does not exist.

    Raises:
        InvalidArgument: the URL is not that of an object, or the path has a zero byte.
        StorageError: the file system or the object store reports an error.
    """
    if is_remote(path):
        return store.stat_object(path)
    path = plain(path)
    refuse_zero_byte(path)
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise storage_error(error, path, "cannot read its status") from error
    return FileInfo(path, status.st_size, version_of(status))


def list_remote(url: str) -> list[str]:
    """Return the sorted URLs of the objects directly below a URL, see `store.list_folder`."""
    return store.list_folder(url)


def local_copy(info: FileInfo) -> str:
    """Return the path of a local file, or of the `cached_copy` of an object."""
    return cached_copy(info) if is_remote(info.path) else info.path


def open_binary(info: FileInfo) -> io.RawIOBase:
    """Return an unbuffered file for sequential reading; StorageError if it is not a regular one."""
    if is_remote(info.path):
        return ObjectFile(info)
    return open(open_regular(info.path), "rb", buffering=0)


def read_ranges(info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Fill the buffer of each ``(offset, into)`` from a file or, without a copy, an object."""
    if is_remote(info.path):
        map_interruptibly(lambda each: store.fill(info, *each), ranges, _STORE_THREADS)
        return
    descriptors = DescriptorCache(1)
    try:
        for _ in RangeReader(descriptors=descriptors).read_each(info, ranges):
            pass
    finally:
        descriptors.close()


def stamp(path: str) -> list[int]:
    """Return numbers that change with the content; [] if it does not exist.

    For a file see `file_stamp`; for an object its size and a hash of its version.
    """
    if is_remote(path):
        found = stat_path(path)
        return [] if found is None else [found.nbytes, xxh3_64_intdigest(found.version.encode())]
    return file_stamp(path)


def each_of(function: Callable[[str], Result], paths: Sequence[str]) -> list[Result]:
    """Return the results for all paths; URLs are processed in parallel."""
    if not any(map(is_remote, paths)):
        return [function(path) for path in paths]
    return map_interruptibly(function, paths, _STORE_THREADS)


class ObjectFile(io.RawIOBase):
    """Unbuffered file of an object; each read is made of parallel requests."""

    def __init__(self, info: FileInfo) -> None:
        self._info = info
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._info.nbytes}
        self._at = origin[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        view = view[: max(0, self._info.nbytes - self._at)]
        store.fill(self._info, self._at, view)
        self._at += len(view)
        return len(view)


def cached_copy(info: FileInfo) -> str:
    """Return the path of a local copy of an object, downloaded if necessary.

    Raises:
        StorageError: the object cannot be read or was replaced, or the copy cannot be written.
        InvalidArgument: MEGAINDEX_OBJECT_CACHE is a URL.
    """
    folder = os.environ.get(VARIABLE) or _DEFAULT
    check_local(folder, f"give {VARIABLE} a directory")
    folder = os.path.abspath(os.path.expanduser(folder))
    name = xxhash.xxh3_128_hexdigest("\n".join(map(str, info)).encode())
    record = os.path.join(folder, f"{name}.json")
    copy = _sound_copy(info, record)
    if copy is not None:
        return copy
    with as_storage_error(folder, f"cannot write the cache of {VARIABLE}"):
        os.makedirs(folder, exist_ok=True)
        with _one_at_a_time(os.path.join(folder, f"{name}.lock")) as alone:
            copy = _sound_copy(info, record)
            if copy is None:
                if alone:
                    _remove(glob.glob(f"{glob.escape(os.path.join(folder, name))}.*.object*"))
                copy = _download(info, record)
            return copy


def _sound_copy(info: FileInfo, record: str) -> str | None:
    """Return the path of the copy in the record, or None if either is missing or damaged."""
    try:
        recorded = read_object(record)
        checked = recorded.pop("checked", None)
        name = str(recorded["copy"])
        copy = os.path.join(os.path.dirname(record), os.path.basename(name))
        now = file_stamp(copy)
        if recorded == _record(info, name, str(recorded["xxh3_128"])):
            if now and now == checked:
                return copy
            if recorded["xxh3_128"] == _checksum(copy):
                _remember(record, recorded, copy, now)
                return copy
        reason = "is damaged"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = f"cannot be used: {error!r}"
    logger.warning("%s: the copy %s; downloading %s again", record, reason, info.path)
    return None


def _download(info: FileInfo, record: str) -> str:
    copy = f"{record.removesuffix('.json')}.{secrets.token_hex(8)}.object"
    logger.info("%s: downloading %d bytes to %s", info.path, info.nbytes, copy)
    try:
        checksum = _copied(info, copy)
        _write(_record(info, os.path.basename(copy), checksum), record, copy)
    except BaseException:
        _remove([copy])
        raise
    return copy


def _copied(info: FileInfo, copy: str) -> str:
    """Download the object to ``copy`` and return its checksum."""
    files = AtomicFiles((copy,))
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(_BLOCK, info.nbytes)))
    try:
        with copying(f"downloading {info.path.rpartition('/')[2]}") as bar:
            advance = bar(info.nbytes)
            out = files.open(copy)
            for begin in range(0, info.nbytes, _BLOCK):
                part = block[: info.nbytes - begin]
                store.fill(info, begin, part)
                digest.update(part)
                out.write(part)
                advance(len(part))
        files.publish()
    finally:
        files.discard()
    return digest.hexdigest()


def _remember(record: str, recorded: dict[str, Any], copy: str, now: list[int]) -> None:
    """Record the stamp of a verified copy unless it changed, or only a moment ago."""
    changed = os.stat(copy).st_ctime_ns
    if now == file_stamp(copy) and changed <= time.time_ns() - _SETTLED:
        with contextlib.suppress(OSError):  # a read-only cache
            _write({**recorded, "checked": now}, record, copy)


def _write(recorded: dict[str, Any], record: str, copy: str) -> None:
    aside = f"{copy}.{secrets.token_hex(8)}.json"
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(recorded, file)
        os.replace(aside, record)
    except BaseException:
        _remove([aside])
        raise


def _remove(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _record(info: FileInfo, name: str, checksum: str) -> dict[str, str | int]:
    return {**info._asdict(), "copy": name, "xxh3_128": checksum}


def _checksum(path: str) -> str:
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def _one_at_a_time(path: str) -> Iterator[bool]:
    """Hold a lock, so that one process of a node downloads; yield True if locks work."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        alone = False
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        with contextlib.suppress(OSError):  # explicitly: a forked child holds the lock too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
