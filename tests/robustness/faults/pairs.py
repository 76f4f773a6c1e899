"""Pairs of a .bin and an .idx, written, merged and cut; fresh, or over an old one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.corpora import write_provenance

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.corpus.merge import merge
from megaindex.corpus.split import cut_evenly, split
from megaindex.format.provenance import provenance_faults

OLD = [[1, 1], [9]]
NEW = [[2, 2, 2], [], [5, 6]]


def write(prefix: Path, documents: list[list[int]], **options: Any) -> None:
    with IndexedDatasetWriter(prefix, np.uint16, **options) as writer:
        for tokens in documents:
            writer.add_document(tokens)


def read(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    dataset.validate()
    return [dataset[k].tolist() for k in range(len(dataset))]


def pair_state(prefix: Path) -> str:
    """By the .idx, as every reader takes it."""
    if not os.path.exists(f"{prefix}.idx"):
        return "none"
    documents = read(prefix)
    assert documents in (OLD, NEW), f"{prefix}: a mixture: {documents}"
    return "old" if documents == OLD else "new"


def unknown_names(folder: Path, known: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not re.fullmatch(known, path.name))


@dataclass(frozen=True)
class Pair:
    """A pair written by the writer, merged or cut out of another; fresh or over an old one."""

    name: str
    make: Callable[[Path, bool], None]
    overwrite: bool = False

    def prepare(self, folder: Path) -> None:
        write(folder / "whole", NEW)
        write(folder / "first", NEW[:1])
        write(folder / "rest", NEW[1:])
        if self.overwrite:
            write(folder / "out", OLD)

    def act(self, folder: Path) -> None:
        # A crash between the names of the two halves leaves a .bin, which readers take for nothing.
        self.make(folder, self.overwrite or os.path.exists(folder / "out.bin"))

    def state(self, folder: Path) -> str:
        assert read(folder / "whole") == NEW
        return pair_state(folder / "out")

    def strays(self, folder: Path) -> list[str]:
        # what a killed writer leaves: unlike those of a cache, nobody may judge whose they are
        return unknown_names(folder, r"(whole|first|rest|out)\.(bin|idx)")


def by_writer(folder: Path, overwrite: bool) -> None:
    write(folder / "out", NEW, overwrite=overwrite)


def by_merge(folder: Path, overwrite: bool) -> None:
    inputs = [str(folder / "first"), str(folder / "rest")]
    merge(str(folder / "out"), inputs, overwrite=overwrite)


def by_split(folder: Path, overwrite: bool) -> None:
    split(
        str(folder / "whole"),
        [str(folder / "out")],
        lambda pair: cut_evenly(pair, 1, "tokens"),
        overwrite=overwrite,
    )


class TracedPair(Pair):
    """A pair with provenance over another: two or three files that belong together."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        for name in ("whole", "first", "rest", *["out"] * self.overwrite):
            write_provenance(folder / name)

    def state(self, folder: Path) -> str:
        state = super().state(folder)
        if state != "none":
            faults, _ = provenance_faults(str(folder / "out"), len(IndexedDataset(folder / "out")))
            rules = {fault.rule for fault in faults}  # as `megaindex verify` names them
            # without a provenance of its own the old one goes last, and is named until then
            known = {"provenance-pair", "provenance-documents"}
            assert rules <= (known if self.name == "untraced" else set()), rules
            has_one = (folder / "out.provenance").exists()
            assert has_one or self.name == "untraced"
        return state

    def strays(self, folder: Path) -> list[str]:
        return unknown_names(folder, r"(whole|first|rest|out)\.(bin|idx|provenance)")


class Parts(Pair):
    """A pair cut in two, the second of which is still to come when the first has its names."""

    def state(self, folder: Path) -> str:
        assert read(folder / "whole") == NEW
        parts = [folder / "out-0", folder / "out-1"]
        there = [part for part in parts if os.path.exists(f"{part}.idx")]
        if not there:
            return "none"
        assert there == parts, f"{there} without the others"
        assert [tokens for part in parts for tokens in read(part)] == NEW
        return "new"

    def strays(self, folder: Path) -> list[str]:
        return unknown_names(folder, r"(whole|first|rest|out-[01])\.(bin|idx)")


def by_split_in_two(folder: Path, overwrite: bool) -> None:
    split(
        str(folder / "whole"),
        [str(folder / "out-{}")],
        lambda pair: [(0, 1), (1, 3)],
        overwrite=os.path.exists(folder / "out-0.bin"),
    )
