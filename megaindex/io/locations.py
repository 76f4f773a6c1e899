"""Paths that may be files or objects of a store: whichever, these functions decide.

A ``file:`` URL is another way to write a plain path, and becomes that here.
They import what reads object stores when one is named, and not before.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from megaindex.errors import InvalidArgument
from megaindex.io.descriptors import DescriptorCache
from megaindex.io.facts import Facts, version_of
from megaindex.io.failures import storage_error
from megaindex.io.kinds import open_regular
from megaindex.io.objects.urls import is_remote as is_remote
from megaindex.io.objects.urls import names_folder as names_folder
from megaindex.io.objects.urls import place_of, without_secrets
from megaindex.io.pread import RangeReader
from megaindex.io.workers import map_interruptibly

Result = TypeVar("Result")

_STORE_THREADS = 32
_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_FILE_URL = re.compile(r"file:(//)?(?=/)", re.IGNORECASE)  # pathlib drops two of the slashes


def plain(path: str) -> str:
    """A path without the scheme ``file:``; any other as it is. Nothing is percent-decoded.

    Raises:
        InvalidArgument: the URL names a file of another machine.
    """
    found = _FILE_URL.match(path) if ":" in path else None
    if found is None:
        return path
    local = path[found.end() :]
    if local.startswith("//"):
        raise InvalidArgument(
            f"{without_secrets(path)}: names another machine; write file:///path for a file here"
        )
    return local


def look_at(path: str) -> Facts | None:
    """Size and version of what is at a path; None where nothing is.

    Raises:
        InvalidArgument: a URL that names no object, or a path with a zero byte.
        StorageError: that cannot be told: a folder may not be entered, a disk fails, a name is too
            long, the object store cannot be asked.
    """
    if is_remote(path):
        from megaindex.io.objects import reading

        return reading.look_at(path)
    path = plain(path)
    refuse_zero_byte(path)
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise storage_error(error, path, "cannot look at it") from error
    return Facts(path, status.st_size, version_of(status))


def list_remote(url: str) -> list[str]:
    """URLs of the objects right below a URL, sorted; see `megaindex.io.objects.reading`."""
    from megaindex.io.objects import reading

    return reading.list_folder(url)


def local_copy(facts: Facts) -> str:
    """Path on this machine with the content: of a file its own, of an object that of a copy.

    Raises:
        StorageError: the object cannot be read or was replaced, or the copy cannot be written.
    """
    if is_remote(facts.path):
        from megaindex.io.objects import cache

        return cache.cached_copy(facts)
    return facts.path


def open_binary(facts: Facts) -> io.RawIOBase:
    """The content as an unbuffered file, for whoever reads it from the first byte to the last.

    Raises:
        StorageError: it is no regular file, or cannot be opened; of an object, reading it fails.
    """
    if is_remote(facts.path):
        from megaindex.io.objects.stream import ObjectFile

        return ObjectFile(facts)
    return open(open_regular(facts.path), "rb", buffering=0)


def read_ranges(facts: Facts, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Fill each ``(offset, into)`` of this very file or object; nothing of an object is kept.

    Raises:
        StorageError: it was replaced or cut short, or reading fails in the end.
    """
    if is_remote(facts.path):
        from megaindex.io.objects import reading

        map_interruptibly(lambda each: reading.fill(facts, *each), ranges, _STORE_THREADS)
        return
    descriptors = DescriptorCache(1)
    try:
        for _ in RangeReader(descriptors=descriptors).read_each(facts, ranges):
            pass
    finally:
        descriptors.close()


def stamp(path: str) -> list[int]:
    """What stays the same as long as the content does; empty where nothing is.

    Of a file size, times and inode: what is written or replaced gets another time of change
    (ctime), which no program sets at will. Of an object size and version, as a number.
    """
    if is_remote(path):
        found = look_at(path)
        return [] if found is None else [found.nbytes, xxh3_64_intdigest(found.version.encode())]
    try:
        status = os.stat(plain(path))
    except (OSError, ValueError):
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def each_of(function: Callable[[str], Result], paths: Sequence[str]) -> list[Result]:
    """The results of all paths; those of URLs are waited for together."""
    if not any(map(is_remote, paths)):
        return [function(path) for path in paths]
    return map_interruptibly(function, paths, _STORE_THREADS)


def absolute(path: str) -> str:
    """The same place from any directory."""
    return path if is_remote(path) else os.path.abspath(plain(path))


def inside(folder: Path, path: str) -> str:
    """A path that is written relative to a folder; absolute ones and URLs stay as they are."""
    return path if is_remote(path) else str(folder / plain(path))


def refuse_zero_byte(path: str) -> None:
    """InvalidArgument for what no file system takes as a path."""
    if "\0" in path:
        raise InvalidArgument(f"{path!r}: holds a zero byte, as no path does; check the path")


def check_local(path: str, remedy: str) -> None:
    """InvalidArgument for a URL where only files will do, or for what is no path at all."""
    refuse_zero_byte(path)
    if plain(path) != path:
        raise InvalidArgument(f"{path}: is a URL; write the path alone, {plain(path)}")
    if is_remote(path):
        place_of(path)  # refuses URLs that must not be repeated
        raise InvalidArgument(f"{path}: lies in an object store; {remedy}")
