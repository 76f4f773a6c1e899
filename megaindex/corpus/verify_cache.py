"""The rules of a cache and its entries, each broken one a finding."""

from __future__ import annotations

import os
from pathlib import Path

from megaindex.corpus.findings import Collector, Report
from megaindex.corpus.subjects import entries
from megaindex.errors import FormatError
from megaindex.format.faults import Fault
from megaindex.io.progress import Bar
from megaindex.store.check import array_fault, checksum_fault, key_fault, stray_files
from megaindex.store.manifest import MANIFEST, Manifest, read_manifest

_REBUILT = "remove the directory, it will be rebuilt"


def verify_cache(cache: str, *, full: bool, bar: Bar) -> Report:
    """Check every entry of a cache, and name what an interrupted build left behind."""
    found = Collector()
    counted = {"entries": 0, "arrays": 0, "bytes": 0}
    for entry in entries(cache):
        _check_entry(entry, full, found, counted, bar)
    return Report(path=cache, kind="cache", full=full, findings=found.findings(), counted=counted)


def verify_entry(entry: str, *, full: bool, bar: Bar) -> Report:
    """Check one entry; with `full` read its arrays and compare checksums."""
    found = Collector()
    counted = {"entries": 0, "arrays": 0, "bytes": 0}
    _check_entry(Path(entry), full, found, counted, bar)
    return Report(
        path=entry, kind="cache entry", full=full, findings=found.findings(), counted=counted
    )


def _check_entry(
    entry: Path, full: bool, found: Collector, counted: dict[str, int], bar: Bar
) -> None:
    counted["entries"] += 1
    try:
        manifest = read_manifest(entry)
    except FormatError as error:
        found.add(str(entry / MANIFEST), _unreadable(error))
        return
    fault = key_fault(entry, manifest)
    if fault is not None:
        found.add(str(entry / MANIFEST), fault)
    for name in stray_files(entry, manifest):
        found.add(str(entry / name), _stray(), severity="warning")
    _check_arrays(entry, manifest, full, found, counted, bar)


def _check_arrays(
    entry: Path, manifest: Manifest, full: bool, found: Collector, counted: dict[str, int], bar: Bar
) -> None:
    progress = bar(sum(record.nbytes for record in manifest.arrays.values()) if full else 0)
    for record in manifest.arrays.values():
        counted["arrays"] += 1
        counted["bytes"] += record.nbytes
        fault = array_fault(entry, record)
        if fault is None and full:
            fault = checksum_fault(entry, record)
            progress(record.nbytes)
        if fault is not None:
            found.add(os.fspath(entry / record.file), fault)


def _unreadable(error: FormatError) -> Fault:
    return Fault(
        rule="manifest",
        where="the file",
        found=str(error).partition(" but ")[2].rpartition(";")[0],
        expected="a manifest as megaindex writes it",
        text="is no manifest",
        remedy=_REBUILT,
    )


def _stray() -> Fault:
    return Fault(
        rule="stray-file",
        where="the file",
        found="a file the manifest does not name",
        expected="none",
        text="belongs to no array",
        remedy="nothing reads it; remove it",
    )
