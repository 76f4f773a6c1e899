"""What a file is: the figures of a pair, or of a cache entry, read without trusting either."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaindex.corpus.inspect_pair import PairDescription, describe_pair
from megaindex.corpus.subjects import Subject, entries, subjects
from megaindex.errors import FormatError
from megaindex.store.durable import DURABLE
from megaindex.store.manifest import read_manifest


@dataclass(frozen=True, kw_only=True)
class EntryDescription:
    """A cache entry, as its manifest has it."""

    path: str
    parameters: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dtype, shape and bytes of each."""
    nbytes: int = 0
    boot_id: str = ""
    durable: bool = False
    """Synced to disk, so that no later boot has to verify it."""
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": "cache entry", **asdict(self)}


def inspect(path: str | os.PathLike[str]) -> list[PairDescription | EntryDescription]:
    """Describe what lies at `path`: a pair, a cache entry, or each of those in a folder.

    Raises:
        MissingFile: nothing is there.
        StorageError: a file cannot be read.
        InvalidArgument: `path` is nothing that can be described.
    """
    return [each for subject in subjects(path) for each in _described(subject)]


def _described(subject: Subject) -> list[PairDescription | EntryDescription]:
    if subject.kind == "pair":
        return [describe_pair(subject.path)]
    if subject.kind == "cache entry":
        return [describe_entry(Path(subject.path))]
    return [describe_entry(entry) for entry in entries(subject.path)]


def describe_entry(entry: Path) -> EntryDescription:
    """What the manifest of a cache entry says."""
    try:
        manifest = read_manifest(entry)
    except FormatError as error:
        return EntryDescription(path=str(entry), faults=(str(error),))
    arrays = {
        name: {"dtype": record.dtype, "shape": record.shape, "bytes": record.nbytes}
        for name, record in manifest.arrays.items()
    }
    return EntryDescription(
        path=str(entry),
        parameters=manifest.parameters,
        arrays=arrays,
        nbytes=sum(record.nbytes for record in manifest.arrays.values()),
        boot_id=manifest.boot_id,
        durable=(entry / DURABLE).exists(),
    )
