"""Copies of whole objects on this machine, for the .idx files, which are mapped.

A copy has a name made of URL, size and version, so that a changed object has another one, and a
record beside it with the checksum of what was downloaded. It is used only if both are as recorded.
Anything in the directory may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import xxhash

from megaindex.errors import StorageError
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
    copy, record = (os.path.join(folder, name + suffix) for suffix in (".object", ".json"))
    if _is_sound(facts, copy, record):
        return copy
    with as_storage_error(folder, f"cannot make the cache; set {VARIABLE} to another directory"):
        os.makedirs(folder, exist_ok=True)
    try:
        _download(facts, copy, record)
    except StorageError:
        if not _is_sound(facts, copy, record):  # unless another process published it meanwhile
            raise
    return copy


def _is_sound(facts: Facts, copy: str, record: str) -> bool:
    try:
        with open(record, encoding="utf-8") as file:
            recorded = json.load(file)
        found = _record(facts, _checksum(copy))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        logger.warning("%s: cannot be used: %s; %s is read again", copy, error, facts.path)
        return False
    if recorded != found:
        logger.warning("%s: is damaged; %s is read again", copy, facts.path)
    return bool(recorded == found)


def _download(facts: Facts, copy: str, record: str) -> None:
    files = AtomicFiles((copy, record), overwrite=True)
    digest = xxhash.xxh3_128()
    block = bytearray(min(_BLOCK, facts.nbytes))
    try:
        with as_storage_error(copy, "cannot write"):
            out = files.open(copy)
            for begin in range(0, facts.nbytes, _BLOCK):
                part = memoryview(block)[: min(_BLOCK, facts.nbytes - begin)]
                fill(facts, begin, part)
                digest.update(part)
                out.write(part)
            text = json.dumps(_record(facts, digest.hexdigest()))
            files.open(record).write(text.encode())
        files.publish()
    finally:
        files.discard()
    logger.info("%s: %d bytes copied to %s", facts.path, facts.nbytes, copy)


def _record(facts: Facts, checksum: str) -> dict[str, Any]:
    return {**facts._asdict(), "xxh3_128": checksum}


def _checksum(path: str) -> str:
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
