"""The cache of index arrays: look up, verify, or build and publish."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.io.failures import as_storage_error
from megaindex.io.mapping import map_readonly
from megaindex.kernels.types import IntArray
from megaindex.store.durable import DURABLE, make_durable_later
from megaindex.store.entry import EntryWriter, boot_id, set_aside
from megaindex.store.fingerprint import array_bytes, entry_key
from megaindex.store.manifest import ArrayRecord, Manifest, read_manifest

logger = logging.getLogger("megaindex")


def fetch(
    cache_dir: str | os.PathLike[str],
    parameters: Mapping[str, Any],
    build: Callable[[EntryWriter], None],
) -> dict[str, IntArray]:
    """The arrays that ``parameters`` describe, read-only, from the cache or built into it.

    An entry that fails verification is set aside, logged and built anew; it is never served.

    Raises:
        StorageError: the cache cannot be read or written.
    """
    if not os.fspath(cache_dir):
        raise InvalidArgument("cache_dir must name a directory, got ''; None keeps it in memory")
    parameters = dict(parameters)
    key = entry_key(parameters)
    entry = Path(cache_dir) / key
    for _ in range(_ATTEMPTS):
        arrays = _load_or_set_aside(entry, key)
        if arrays is None:
            with EntryWriter(cache_dir, key) as writer:
                build(writer)
                writer.publish(parameters)
            arrays = _load_or_set_aside(entry, key)
        if arrays is not None:
            return arrays
    raise StorageError(
        f"{entry}: was removed {_ATTEMPTS} times while it was read; keep others off the cache_dir"
    )


# Processes that find one damaged entry may remove what another has just put in its place.
_ATTEMPTS = 5


def _load_or_set_aside(entry: Path, key: str) -> dict[str, IntArray] | None:
    """The arrays of an entry; None where there is none, or one that is damaged."""
    try:
        return _load(entry, key)
    except MissingFile:  # another process set it aside meanwhile
        return None
    except FormatError as error:
        logger.warning("%s; it is rebuilt", error)
        set_aside(entry)
        return None


def _load(entry: Path, key: str) -> dict[str, IntArray] | None:
    """The arrays of an entry, None where there is no entry."""
    with as_storage_error(str(entry), "cannot read the cache entry"):
        if not entry.exists():
            return None
        manifest = read_manifest(entry)
        if manifest.key != key:
            raise FormatError(f"{entry}: the manifest is that of entry {manifest.key}")
        arrays = {name: _map(entry, record) for name, record in manifest.arrays.items()}
        if not _still_in_memory(entry, manifest):
            _verify(entry, manifest, arrays)
            make_durable_later(entry)
    return arrays


def _still_in_memory(entry: Path, manifest: Manifest) -> bool:
    """Whether the bytes cannot have been lost since they were written."""
    return (entry / DURABLE).exists() or (
        manifest.boot_id == boot_id() and manifest.boot_id != "unknown"
    )


def _map(entry: Path, record: ArrayRecord) -> IntArray:
    path = entry / record.file
    size = path.stat().st_size if path.is_file() else 0
    if size != record.offset + record.nbytes:
        raise FormatError(
            f"{path}: the manifest promises {record.offset} + {record.nbytes} bytes, the file has "
            f"{size}"
        )
    data = map_readonly(str(path))[record.offset :]
    return data.view(record.dtype).reshape(record.shape)


def _verify(entry: Path, manifest: Manifest, arrays: dict[str, IntArray]) -> None:
    for name, record in manifest.arrays.items():
        found = xxhash.xxh3_128_hexdigest(array_bytes(arrays[name]))
        if found != record.checksum:
            raise FormatError(
                f"{entry / record.file}: the manifest promises checksum {record.checksum}, the "
                f"file has {found}"
            )
