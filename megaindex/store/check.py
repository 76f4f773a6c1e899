"""The rules of a cache entry: what a load refuses, and what `megaindex verify` lists.

A cache directory may be shared with people whose files are not to be trusted: nothing in an entry
is followed out of it, waited for, or read before its size is known.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megaindex.format.faults import Fault
from megaindex.io.mapping import map_readonly
from megaindex.kernels.types import IntArray
from megaindex.store.durable import DURABLE
from megaindex.store.fingerprint import array_checksum, entry_key
from megaindex.store.manifest import MANIFEST, ArrayRecord, Manifest

_REBUILT = "remove the directory, it will be rebuilt"


def key_fault(entry: Path, manifest: Manifest) -> Fault | None:
    """Whether the entry bears the name of what it was built from."""
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
    """Whether the file of an array is a file of the entry's own, of the size it must have."""
    try:
        status = os.lstat(entry / record.file)
    except FileNotFoundError:
        return _fault("file-size", record, "no file", _promised(record))
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        return _fault("file-kind", record, kind, "a regular file")
    if status.st_size != record.offset + record.nbytes:
        return _fault("file-size", record, f"{status.st_size} bytes", _promised(record))
    return None


def checksum_fault(entry: Path, record: ArrayRecord) -> Fault | None:
    """Whether an array that `array_fault` finds nothing wrong with holds what was written."""
    found = array_checksum(map_array(entry, record))
    if found == record.checksum:
        return None
    return _fault("checksum", record, f"checksum {found}", f"checksum {record.checksum}")


def map_array(entry: Path, record: ArrayRecord) -> IntArray:
    """The array of a record, read-only; FormatError if its file is not as `array_fault` has it."""
    fault = array_fault(entry, record)
    if fault is not None:
        raise fault.error(str(entry / record.file))
    data = map_readonly(str(entry / record.file), follow_symlinks=False)[record.offset :]
    return data.view(record.dtype).reshape(record.shape)


def stray_files(entry: Path, manifest: Manifest) -> list[str]:
    """Files of the entry that its manifest does not account for."""
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
