"""Everything in megaindex that publishes files, small enough to be interrupted at every call."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from robustness.faults.pairs import (
    Pair,
    Parts,
    TracedPair,
    by_merge,
    by_split,
    by_split_in_two,
    by_writer,
    unknown_names,
)

import megaindex
from megaindex import IndexedDatasetWriter
from megaindex.cache import array_group as group
from megaindex.cache import claim as leftovers
from megaindex.cache import entry, npy
from megaindex.cache.array_files import ArrayFiles, Identity, Sidecar
from megaindex.cache.array_group import ArrayWriter, write_together
from megaindex.cache.claim import build_once
from megaindex.cache.entry import make_durable
from megaindex.cache.sidecar import (
    find_arrays,
    make_sets_durable,
    parse_sidecar,
    read_sidecar,
)
from megaindex.errors import MegaIndexError
from megaindex.keys import Store


@dataclass(frozen=True)
class Cache:
    """An index built into a cache that holds another one already."""

    name: str
    mapped: bool = False
    """Arrays are written through mappings, as large ones are."""
    damaged: bool = False
    """There is an entry, which has to be replaced."""

    def prepare(self, folder: Path) -> None:
        entry.make_durable_later = lambda path: None  # by a thread, and 2 s later: see Durable
        npy.WORTH_MAPPING = 0 if self.mapped else 1 << 25
        if not (folder.parent / "corpus.idx").exists():
            with IndexedDatasetWriter(folder.parent / "corpus", np.uint16) as writer:
                for length in (7, 0, 31, 8, 12):
                    writer.add_document(np.arange(length))
        self._build(folder, seed=1)
        if self.damaged:
            before = set(folder.iterdir())
            self._build(folder, seed=2)
            (path,) = set(folder.iterdir()) - before
            os.truncate(path / "shuffle_index.npy", 10)

    def act(self, folder: Path) -> None:
        self._build(folder, seed=2)

    def state(self, folder: Path) -> str:
        entries = [p for p in folder.iterdir() if re.fullmatch("[0-9a-f]{32}", p.name)]
        states = [self._entry_state(path) for path in entries]
        assert "other" in states
        assert len(states) <= 2
        return next((state for state in states if state != "other"), "none")

    def _entry_state(self, path: Path) -> str:
        manifest = (path / "manifest.json").read_text()
        seed = 1 if '"seed":1' in manifest else 2
        expected = megaindex.build_index(path.parent.parent / "corpus", **self._settings(seed))
        try:
            for name in ("document_index", "sample_index", "shuffle_index"):
                np.testing.assert_array_equal(
                    np.load(path / f"{name}.npy"), getattr(expected, name)
                )
        except ValueError:
            assert self.damaged
            assert seed == 2
            return "old"
        return "other" if seed == 1 else "new"

    def strays(self, folder: Path) -> list[str]:
        return unknown_names(folder, "[0-9a-f]{32}")

    def _build(self, folder: Path, seed: int) -> None:
        corpus = folder.parent / "corpus"
        megaindex.build_index(corpus, cache_dir=folder, **self._settings(seed))

    @staticmethod
    def _settings(seed: int) -> dict[str, Any]:
        return {"sequence_length": 3, "seed": seed, "epochs": 2}


@dataclass(frozen=True)
class Durable:
    """An entry brought to the disk and marked."""

    name: str = "durable"

    def prepare(self, folder: Path) -> None:
        (folder / "entry").mkdir()
        (folder / "entry/a.npy").write_bytes(b"a")

    def act(self, folder: Path) -> None:
        make_durable(folder / "entry")

    def state(self, folder: Path) -> str:
        assert (folder / "entry/a.npy").read_bytes() == b"a"
        return "new" if (folder / "entry/durable").exists() else "old"

    def strays(self, folder: Path) -> list[str]:
        return []


@dataclass(frozen=True)
class Named:
    """Two sets of arrays under a framework's names, with their sidecars, by one claim holder."""

    name: str
    stale: bool = False
    """There are sets already, of a corpus that has changed since."""
    together: bool = True

    def prepare(self, folder: Path) -> None:
        group.make_sets_durable_later = lambda sets: None  # see NamedDurable
        if self.stale:
            self._build(folder, "old")

    def act(self, folder: Path) -> None:
        self._build(folder, "new")

    def _build(self, folder: Path, corpus: str) -> None:
        identity = Identity(settings=lambda: {"seed": 1}, corpus=lambda: corpus)
        files = [_files(folder, k) for k in range(2 if self.together else 1)]

        def find() -> list[Sidecar] | None:
            found = [find_arrays(each, identity, lambda arrays: None) for each in files]
            return None if None in found else [each for each in found if each is not None]

        def build() -> list[Sidecar]:
            if not self.together:
                with ArrayWriter(files[0]) as writer:
                    _fill(0, writer, corpus)
                    return [writer.publish(identity, corpus)]
            return write_together(
                [(ArrayWriter(each), identity, corpus) for each in files],
                lambda k, writer: _fill(k, writer, corpus),
            )

        build_once(folder, "0" if not self.together else "blend", find, build)

    def state(self, folder: Path) -> str:
        return max(self._set_state(folder, k) for k in range(2 if self.together else 1))

    def _set_state(self, folder: Path, number: int) -> str:
        """As the framework sees it: present when all its files are."""
        files = _files(folder, number)
        if not files.are_there():
            return "none"
        said = Path(files.paths[-1]).read_text()
        arrays = [np.load(path) for path in files.arrays.values()]
        for array, expected in zip(arrays, _contents(number, said).values(), strict=True):
            np.testing.assert_array_equal(array, expected)
        identity = Identity(settings=lambda: {"seed": 1}, corpus=lambda: said)
        assert find_arrays(files, identity, _refuse) is not None
        return said

    def strays(self, folder: Path) -> list[str]:
        known = r"\d-(a\.npy|b\.npy|description\.txt|megaindex\.json)"
        return unknown_names(folder, known)


class NamedDurable(Named):
    """Two sets that are there, brought to the disk and noted in their sidecar."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._build(folder, "new")

    def act(self, folder: Path) -> None:
        files = [_files(folder, number) for number in range(2)]
        sidecars = [(each, read_sidecar(each)) for each in files]
        make_sets_durable([(each, found) for each, found in sidecars if found is not None])

    def state(self, folder: Path) -> str:
        assert super().state(folder) == "new"  # whole, and known, whatever happens
        marks = parse_sidecar((folder / "0-megaindex.json").read_bytes()).durable
        assert marks in ("00", "10", "01", "11")
        return "new" if marks == "11" else "old"


@dataclass(frozen=True)
class Stored:
    """A store of arrays in two files: a third is written, or they are merged."""

    name: str
    merges: bool = False

    def prepare(self, folder: Path) -> None:
        for numbers in (range(10), range(5, 20)):
            self._write(folder, numbers)

    def act(self, folder: Path) -> None:
        if self.merges:
            Store(folder / "store").merge()
        else:
            self._write(folder, range(15, 30))

    def state(self, folder: Path) -> str:
        store = Store(folder / "store")
        store.verify()
        values, found = store.find(self._keys(range(30)))
        assert np.array_equal(values[found], np.flatnonzero(found))
        assert found[:20].all()
        assert found[20:].all() or not found[20:].any()
        return "new" if found[20:].all() or store.num_files == 1 else "old"

    def strays(self, folder: Path) -> list[str]:
        return unknown_names(folder / "store", r"store\.json|[0-9a-f]{32}\.rows")

    def _write(self, folder: Path, numbers: range) -> None:
        store = Store(folder / "store", dtype="int64", shape=())
        with store.writer() as writer:
            writer.append(self._keys(numbers), np.array(numbers))

    @staticmethod
    def _keys(numbers: range) -> Any:
        return np.stack((np.array(numbers) % 7, np.array(numbers) + 1), axis=1)


def _refuse(arrays: Mapping[str, Any]) -> None:
    raise AssertionError("arrays built here are known by their sidecar")


def _files(folder: Path, number: int) -> ArrayFiles:
    base = folder / str(number)
    return ArrayFiles(
        arrays={name: f"{base}-{name}.npy" for name in "ab"},
        sidecar=f"{base}-megaindex.json",
        marker=f"{base}-description.txt",
    )


def _contents(number: int, corpus: str) -> dict[str, Any]:
    first = 100 * number + (50 if corpus == "new" else 0)
    return {"a": np.arange(first, first + 20), "b": np.arange(20) - first}


def _fill(number: int, writer: ArrayWriter, corpus: str) -> None:
    for name, values in _contents(number, corpus).items():
        writer.allocate(name, values.shape, values.dtype.name)[...] = values
        writer.seal(name)


SCENARIOS: dict[str, Any] = {
    scenario.name: scenario
    for scenario in (
        Pair("writer", by_writer),
        Pair("writer-overwriting", by_writer, overwrite=True),
        Pair("merge", by_merge),
        Pair("merge-overwriting", by_merge, overwrite=True),
        Pair("split", by_split),
        Cache("cache"),
        Cache("cache-mapped", mapped=True),
        Cache("cache-damaged", damaged=True),
        Durable(),
        Named("named", together=False),
        Named("named-together"),
        Named("named-stale", stale=True),
        NamedDurable("named-durable"),
        Stored("store-writer"),
        Stored("store-merge", merges=True),
    )
}
TRACED: dict[str, Any] = {
    "traced-overwriting": TracedPair("traced-overwriting", by_split, overwrite=True),
    "traced": TracedPair("traced", by_merge),
    "untraced": TracedPair("untraced", by_writer, overwrite=True),
}
INTERRUPTED: dict[str, Any] = {
    **SCENARIOS,
    "split-overwriting": Pair("split-overwriting", by_split, overwrite=True),
    "split-in-two": Parts("split-in-two", by_split_in_two),
}
CACHES = ("cache", "cache-mapped", "cache-damaged", "named", "named-together", "named-stale")

__all__ = ["CACHES", "INTERRUPTED", "SCENARIOS", "TRACED", "MegaIndexError"]


@dataclass(frozen=True)
class Tidying:
    """Another process, which builds something else in the same directory."""

    folder: Path

    def run(self) -> None:
        leftovers._listed.clear()  # of another process, that never looked here

        def find() -> bool | None:
            return None

        assert build_once(self.folder, "another", find, lambda: True)
