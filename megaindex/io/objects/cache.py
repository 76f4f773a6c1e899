"""Copies of whole objects on this machine, for the .idx files, which are mapped.

A record has a name made of URL, size and version, so that a changed object has another one; it
names the copy and its checksum. A copy is used only if it is as recorded. Copies have names of
their own and records are replaced in one step: where locks do not work, processes that start
together each download one, and the last record counts. Anything in the directory may be deleted at
any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator

import xxhash

from megaindex.io.atomic import AtomicFiles
from megaindex.io.facts import Facts
from megaindex.io.failures import as_storage_error
from megaindex.io.objects.reading import fill

logger = logging.getLogger(__name__)

VARIABLE = "MEGAINDEX_OBJECT_CACHE"
_DEFAULT = "~/.cache/megaindex/objects"
_BLOCK = 32 << 20  # bytes in memory at once


def cached_copy(facts: Facts) -> str:
    """Path of a copy of this object, downloaded unless it is there.

    Raises:
        StorageError: the object cannot be read or was replaced, or the copy cannot be written.
    """
    folder = os.path.expanduser(os.environ.get(VARIABLE) or _DEFAULT)
    name = xxhash.xxh3_128_hexdigest("\n".join(map(str, facts)).encode())
    record = os.path.join(folder, f"{name}.json")
    copy = _sound_copy(facts, record)
    if copy is not None:
        return copy
    with as_storage_error(folder, f"cannot write the cache, which {VARIABLE} names"):
        os.makedirs(folder, exist_ok=True)
        with _one_at_a_time(os.path.join(folder, f"{name}.lock")):
            return _sound_copy(facts, record) or _download(facts, record)


def _sound_copy(facts: Facts, record: str) -> str | None:
    """The copy that the record names, if both are what they must be."""
    try:
        with open(record, encoding="utf-8") as file:
            recorded = json.load(file)
        name = str(recorded["copy"])
        copy = os.path.join(os.path.dirname(record), os.path.basename(name))
        if recorded == _record(facts, name, _checksum(copy)):
            return copy
        reason = "is damaged"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"cannot be used: {error!r}"
    logger.warning("%s: the copy %s; %s is read again", record, reason, facts.path)
    return None


def _download(facts: Facts, record: str) -> str:
    copy = f"{record.removesuffix('.json')}.{secrets.token_hex(8)}.object"
    logger.info("%s: its %d bytes are copied to %s", facts.path, facts.nbytes, copy)
    files = AtomicFiles((copy,))
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(_BLOCK, facts.nbytes)))
    try:
        out = files.open(copy)
        for begin in range(0, facts.nbytes, _BLOCK):
            part = block[: facts.nbytes - begin]
            fill(facts, begin, part)
            digest.update(part)
            out.write(part)
        files.publish()
    finally:
        files.discard()
    aside = f"{copy}.json"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(_record(facts, os.path.basename(copy), digest.hexdigest()), file)
    os.replace(aside, record)
    return copy


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
def _one_at_a_time(path: str) -> Iterator[None]:
    """The ranks of a node start together, and one of them downloads for all."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):  # a child that was forked meanwhile holds it too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
