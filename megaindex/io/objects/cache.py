"""Copies of whole objects on this machine, for the .idx files, which are mapped.

A record has a name made of URL, size and version, so that a changed object has another one; it
names the copy and its checksum. A copy is used only if it is as recorded: what was checked once is
known by inode, size and times from then on, and checked again where one of them differs. Copies
have names of their own and records are replaced in one step: where locks do not work, processes
that start together each download one, and the last record counts. Anything in the directory may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

import xxhash

from megaindex.io.atomic import AtomicFiles
from megaindex.io.facts import Facts
from megaindex.io.failures import as_storage_error
from megaindex.io.json_files import read_object
from megaindex.io.locations import check_local, file_stamp
from megaindex.io.objects.reading import fill
from megaindex.io.progress import copying

logger = logging.getLogger(__name__)

VARIABLE = "MEGAINDEX_OBJECT_CACHE"
_DEFAULT = "~/.cache/megaindex/objects"
_BLOCK = 32 << 20  # bytes in memory at once
_SETTLED = 2 * 10**9  # ns since the last change, after which the next one has another time


def cached_copy(facts: Facts) -> str:
    """Path of a copy of this object, downloaded unless it is there.

    Raises:
        StorageError: the object cannot be read or was replaced, or the copy cannot be written.
        InvalidArgument: the cache's variable holds a URL.
    """
    folder = os.environ.get(VARIABLE) or _DEFAULT
    check_local(folder, f"give {VARIABLE} a directory")
    folder = os.path.abspath(os.path.expanduser(folder))
    name = xxhash.xxh3_128_hexdigest("\n".join(map(str, facts)).encode())
    record = os.path.join(folder, f"{name}.json")
    copy = _sound_copy(facts, record)
    if copy is not None:
        return copy
    with as_storage_error(folder, f"cannot write the cache, which {VARIABLE} names"):
        os.makedirs(folder, exist_ok=True)
        with _one_at_a_time(os.path.join(folder, f"{name}.lock")) as alone:
            copy = _sound_copy(facts, record)
            if copy is None:
                if alone:
                    _remove(glob.glob(f"{glob.escape(os.path.join(folder, name))}.*.object*"))
                copy = _download(facts, record)
            return copy


def _sound_copy(facts: Facts, record: str) -> str | None:
    """The copy that the record names, if both are what they must be."""
    try:
        recorded = read_object(record)
        checked = recorded.pop("checked", None)
        name = str(recorded["copy"])
        copy = os.path.join(os.path.dirname(record), os.path.basename(name))
        now = file_stamp(copy)
        if recorded == _record(facts, name, str(recorded["xxh3_128"])):
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
    logger.warning("%s: the copy %s; %s is read again", record, reason, facts.path)
    return None


def _download(facts: Facts, record: str) -> str:
    copy = f"{record.removesuffix('.json')}.{secrets.token_hex(8)}.object"
    logger.info("%s: its %d bytes are copied to %s", facts.path, facts.nbytes, copy)
    try:
        checksum = _copied(facts, copy)
        _write(_record(facts, os.path.basename(copy), checksum), record, copy)
    except BaseException:
        _remove([copy])
        raise
    return copy


def _copied(facts: Facts, copy: str) -> str:
    """Write the copy; its checksum."""
    files = AtomicFiles((copy,))
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(_BLOCK, facts.nbytes)))
    try:
        with copying(f"downloading {facts.path.rpartition('/')[2]}") as bar:
            told = bar(facts.nbytes)
            out = files.open(copy)
            for begin in range(0, facts.nbytes, _BLOCK):
                part = block[: facts.nbytes - begin]
                fill(facts, begin, part)
                digest.update(part)
                out.write(part)
                told(len(part))
        files.publish()
    finally:
        files.discard()
    return digest.hexdigest()


def _remember(record: str, recorded: dict[str, Any], copy: str, now: list[int]) -> None:
    """Spare the next opening the checksum, if the copy is what it was before it was read."""
    changed = os.stat(copy).st_ctime_ns
    if now == file_stamp(copy) and changed <= time.time_ns() - _SETTLED:
        with contextlib.suppress(OSError):  # a cache that is only read
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


def _record(facts: Facts, name: str, checksum: str) -> dict[str, str | int]:
    return {**facts._asdict(), "copy": name, "xxh3_128": checksum}


def _checksum(path: str) -> str:
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def _one_at_a_time(path: str) -> Iterator[bool]:
    """The ranks of a node start together, and one of them downloads for all. Whether it works."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        alone = False
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        with contextlib.suppress(OSError):  # a child that was forked meanwhile holds it too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
