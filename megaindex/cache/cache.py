"""Cache of index arrays: look up, verify, build and publish.

Entries may come from untrusted users of a shared directory: symbolic links are not followed, pipes
are not waited for, and no file is read before its size is checked.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megaindex._types import IntArray
from megaindex.cache.claim import build_once
from megaindex.cache.entry import (
    DURABLE,
    MANIFEST,
    ArrayRecord,
    EntryWriter,
    Manifest,
    boot_id,
    make_durable_later,
    quarantine,
    read_manifest,
)
from megaindex.cache.fingerprint import array_checksum, entry_key
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.header import Fault, check_fault
from megaindex.index.orders.framework import Memory, Sink
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import as_storage_error, check_local, look_again

logger = logging.getLogger("megaindex")

Shapes = Mapping[str, tuple[tuple[int | None, ...], str]]
"""Shape and dtype of arrays by name; None for a size that is not known in advance."""


def fetch(
    cache_dir: str | os.PathLike[str] | None,
    parameters: Callable[[], Mapping[str, Any]],
    build: Callable[[Sink], None],
    expected: Shapes,
) -> tuple[Mapping[str, IntArray], str]:
    """Return arrays from the cache, built into it if necessary, and the directory of their entry.

    An entry that fails verification is removed, logged and built again. Of several processes that
    need an entry, one builds it and the others wait.

    Args:
        cache_dir: None: build in memory; the directory returned is "".
        parameters: function that returns everything that decides the arrays; called with a cache.
        build: function that fills the arrays in a sink.
        expected: shape and dtype of each array.

    Raises:
        StorageError: the cache cannot be read or written.
    """
    if cache_dir is None:
        memory = Memory()
        build(memory)
        return memory.arrays, ""
    if not os.fspath(cache_dir):
        raise InvalidArgument("cache_dir must be a directory or None for memory, got ''")
    check_local(os.fspath(cache_dir), "give a directory as cache_dir")
    described = dict(parameters())
    key = entry_key(described)
    entry = Path(cache_dir) / key

    def find() -> dict[str, IntArray] | None:
        return load_entry(entry, expected)

    def build_and_publish() -> dict[str, IntArray]:
        for _ in range(_ATTEMPTS):
            with EntryWriter(cache_dir, key) as writer:
                build(writer)
                is_ours = writer.publish(described)
            arrays = find() if is_ours else _wait_for(find, cache_dir)
            if arrays is not None:
                return arrays
        raise StorageError(
            f"{entry}: was removed {_ATTEMPTS} times while being read; stop the processes that "
            "remove entries of this cache_dir"
        )

    return build_once(cache_dir, key, find, build_and_publish), os.path.abspath(entry)


def cache_at(cache_dir: str | os.PathLike[str] | None) -> partial[Any] | None:
    """Return `fetch` of a cache; None without one, for arrays that are built in memory."""
    return None if cache_dir is None else partial(fetch, cache_dir)


# A process that found a damaged entry may remove the one that another has just published.
_ATTEMPTS = 5
_VISIBLE_WITHIN = 60.0  # seconds; longest caching of directories by network file systems


def _wait_for(
    find: Callable[[], dict[str, IntArray] | None], cache_dir: str | os.PathLike[str]
) -> dict[str, IntArray] | None:
    """Return the arrays that another process published, once they are visible here."""
    deadline, pause = time.monotonic() + _VISIBLE_WITHIN, 0.01
    while (arrays := find()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        look_again(cache_dir)
    return arrays


def load_entry(entry: Path, expected: Shapes | None = None) -> dict[str, IntArray] | None:
    """Return the arrays of an entry, or None if it is missing or damaged and removed."""
    try:
        arrays = _load(entry)
        if arrays is not None and expected is not None:
            _check_shapes(entry, arrays, expected)
        return arrays
    except MissingFile:  # removed by another process
        return None
    except FormatError as error:
        logger.warning("%s; it is rebuilt", str(error))  # the error has the arrays in its frames
    arrays = None  # not mapped: NFS keeps the directory of a file that is open
    quarantine(entry)
    return None


def _load(entry: Path) -> dict[str, IntArray] | None:
    with as_storage_error(str(entry), "cannot read the cache entry"):
        if not os.path.lexists(entry):
            return None
        manifest = read_manifest(entry)
        check_fault(key_fault(entry, manifest), str(entry))
        arrays = {name: map_array(entry, record) for name, record in manifest.arrays.items()}
        if not _still_in_memory(entry, manifest):
            for record in manifest.arrays.values():
                check_fault(checksum_fault(entry, record), str(entry / record.file))
            make_durable_later(entry)
    return arrays


def _still_in_memory(entry: Path, manifest: Manifest) -> bool:
    """Return True if a crash of the machine cannot have lost the bytes since they were written."""
    return (entry / DURABLE).exists() or (
        manifest.boot_id == boot_id() and manifest.boot_id != "unknown"
    )


def _check_shapes(entry: Path, arrays: Mapping[str, IntArray], expected: Shapes) -> None:
    """Raise FormatError unless the arrays fit the request, since a manifest may be forged."""
    held = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
    fits = held.keys() == expected.keys() and all(
        held[name][1] == dtype and _matches(held[name][0], shape)
        for name, (shape, dtype) in expected.items()
    )
    if not fits:
        raise FormatError(f"{entry}: must contain the arrays {dict(expected)}, got {held}")


def _matches(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        wanted in (None, size) for size, wanted in zip(shape, expected, strict=True)
    )


_REBUILT = "remove the directory, it will be rebuilt"


def key_fault(entry: Path, manifest: Manifest) -> Fault | None:
    """Return the fault of an entry whose name is not the key of its parameters, or None."""
    for rule, key in (("key", manifest.key), ("parameters", entry_key(manifest.parameters))):
        if key != entry.name:
            return Fault(
                rule=rule,
                where=MANIFEST,
                found=key,
                expected=entry.name,
                text=f"the manifest is that of entry {key}",
                remedy=_REBUILT,
            )
    return None


def array_fault(entry: Path, record: ArrayRecord) -> Fault | None:
    """Return the fault of a file that is not a regular file of the recorded size, or None."""
    try:
        status = os.lstat(entry / record.file)
    except FileNotFoundError:
        return _fault("file-size", record, "no file", _promised(record))
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        return _fault("file-kind", record, kind, "a regular file")
    if status.st_size != record.offset + record.nbytes:
        return _fault("file-size", record, f"{status.st_size} bytes", _promised(record))
    return None


def checksum_fault(entry: Path, record: ArrayRecord) -> Fault | None:
    """Return the fault of an array whose checksum differs, or None."""
    found = array_checksum(map_array(entry, record))
    if found == record.checksum:
        return None
    return _fault("checksum", record, f"checksum {found}", f"checksum {record.checksum}")


def map_array(entry: Path, record: ArrayRecord) -> IntArray:
    """Return the mapped, read-only array of a record.

    Raises:
        FormatError: the file has an `array_fault`.
        MissingFile: it was removed or replaced meanwhile.
    """
    path = str(entry / record.file)
    try:
        data = map_readonly(path, follow_symlinks=False)
    except StorageError:
        check_fault(array_fault(entry, record), path)
        raise
    if data.size != record.offset + record.nbytes:
        check_fault(array_fault(entry, record), path)
        raise MissingFile(f"{path}: was replaced while it was read; try again")
    return data[record.offset :].view(record.dtype).reshape(record.shape)


def stray_files(entry: Path, manifest: Manifest) -> list[str]:
    """Return the files of an entry that its manifest does not name."""
    known = {MANIFEST, DURABLE, *(record.file for record in manifest.arrays.values())}
    return sorted(set(os.listdir(entry)) - known)


def _promised(record: ArrayRecord) -> str:
    return f"{record.offset} + {record.nbytes} bytes"


def _fault(rule: str, record: ArrayRecord, found: str, expected: str) -> Fault:
    return Fault(
        rule=rule,
        where=record.file,
        found=found,
        expected=expected,
        text=f"the manifest promises {expected}, the file has {found}",
        remedy=_REBUILT,
    )
