"""What a file is: the figures of a pair, of a cache entry, or of arrays under a framework's names,
read without trusting any."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaindex.corpus.inspect_pair import PairDescription, describe_pair
from megaindex.corpus.subjects import Subject, entries, subjects
from megaindex.corpus.verify_arrays import own_sets
from megaindex.corpus.verify_recipe import pairs_of_recipe
from megaindex.errors import FormatError
from megaindex.recipe.recipe_file import read_recipe
from megaindex.store.array_set import ArrayFiles
from megaindex.store.durable import DURABLE
from megaindex.store.manifest import read_manifest
from megaindex.store.sidecar_file import UNREADABLE, SidecarFile, load_sidecar


@dataclass(frozen=True, kw_only=True)
class EntryDescription:
    """A cache entry, as its manifest has it, or a set of arrays, as its sidecar has it."""

    path: str
    kind: str = "cache entry"
    parameters: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dtype, shape and bytes of each."""
    nbytes: int = 0
    boot_id: str = ""
    durable: bool = False
    """Synced to disk, so that no later boot has to verify it."""
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str | os.PathLike[str]) -> list[PairDescription | EntryDescription]:
    """Describe what lies at `path`: a pair, a cache entry, a set of arrays, or each in a folder;
    of a recipe the pairs that it names.

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
    if subject.kind == "framework arrays":
        return [*describe_sets(subject.path)]
    if subject.kind == "recipe":
        read_recipe(subject.path)  # raises what is wrong with it
        return [describe_pair(each) for pairs in pairs_of_recipe(subject.path) for each in pairs]
    return [describe_entry(entry) for entry in entries(subject.path)]


def describe_sets(sidecar: str) -> list[EntryDescription]:
    """What a sidecar says of each set whose it is."""
    try:
        file = load_sidecar(sidecar)
        return [_describe_set(files, file, name) for name, files in own_sets(sidecar, file)]
    except UNREADABLE as error:
        return [EntryDescription(path=sidecar, kind="framework arrays", faults=(str(error),))]


def _describe_set(files: ArrayFiles, file: SidecarFile, name: str) -> EntryDescription:
    recorded = file.sets[name]
    arrays: dict[str, dict[str, Any]] = {
        array: {"dtype": dtype, "shape": shape, "bytes": recorded.files[array][0] - offset}
        for array, (dtype, shape, offset) in recorded.arrays.items()
    }
    return EntryDescription(
        path=str(files),
        kind="framework arrays",
        parameters={**recorded.settings, "corpus": recorded.corpus, "origin": recorded.origin},
        arrays=arrays,
        nbytes=sum(int(array["bytes"]) for array in arrays.values()),
        boot_id=file.boot,
        durable=file.is_durable(name),
    )


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
