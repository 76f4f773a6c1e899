"""One set of index arrays under a framework's file names: paths, record and file states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaindex._types import IntArray
from megaindex.errors import FormatError, MissingFile
from megaindex.io.os_errors import storage_error


class Listing:
    """The names and inodes of the files in a directory at one moment.

    A blend of 1500 datasets looks for 7500 files: as many system calls, or messages on a network,
    where a listing takes a few dozen. It does not contain sizes; they are compared when the files
    are mapped.
    """

    def __init__(self, inodes: dict[str, int]) -> None:
        self._inodes = inodes
        self.sidecars: dict[int, dict[str, Sidecar]] = {}
        """Sets by name of each sidecar file that was read, by its inode, since many names are hard
        links to one file."""
        self.accepted: list[tuple[ArrayFiles, Sidecar]] = []
        """Sets written by the framework that were checked and have to be recorded."""
        self.verified: list[tuple[ArrayFiles, Sidecar]] = []
        """Sets recorded under another boot that are complete and have to be marked as durable."""

    @classmethod
    def of(cls, directory: str, at_most: int) -> Listing | None:
        """Return the listing of a directory; None if it has more than ``at_most`` names or cannot
        be listed."""
        inodes: dict[str, int] = {}
        prefix = f"{directory}/"
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    inodes[prefix + entry.name] = entry.inode()
                    if len(inodes) > at_most:
                        return None
        except FileNotFoundError:
            return cls({})
        except OSError:
            return None
        return cls(inodes)

    def __contains__(self, path: str) -> bool:
        return path in self._inodes

    def inode(self, path: str) -> int | None:
        """Return the inode of a name; on union file systems it may differ from ``os.stat``'s."""
        return self._inodes.get(path)

    def shows(self, files: ArrayFiles, sidecar: Sidecar) -> bool:
        """Return True if all files exist and have the inodes that the sidecar records."""
        inodes = self._inodes
        return (
            not sidecar.in_doubt
            and (files.marker is None or files.marker in inodes)
            and all(
                inodes.get(path) == sidecar.files[name][-1] for name, path in files.arrays.items()
            )
        )


def current_states(
    files: ArrayFiles, sidecar: Sidecar | None, listing: Listing | None
) -> dict[str, FileState] | None:
    """Return the state of each array file; None if a file is missing.

    With a ``listing`` that has the recorded inodes the recorded states are returned.
    """
    if listing is not None and sidecar is not None and listing.shows(files, sidecar):
        return sidecar.files
    if not files.are_there(os.path.isfile if listing is None else listing.__contains__):
        return None
    try:
        return states_of(files.arrays)
    except MissingFile:  # removed meanwhile by another builder
        return None


Arrays = dict[str, IntArray]
ArrayRecord = tuple[str, tuple[int, ...], int]
"""dtype, shape, and bytes of the header of an .npy file."""
FileState = list[int]
"""Size in bytes, time of the last change in nanoseconds, and inode. Renaming a file keeps them."""
SUFFIX = "-megaindex.json"


@dataclass(kw_only=True, slots=True)
class ArrayFiles:
    """Paths of one set of arrays."""

    arrays: Mapping[str, str]
    """Path of the .npy file of each array."""
    sidecar: str
    """Path of the sidecar, which ends in ``-megaindex.json``."""
    marker: str | None = None
    """Path of a text file without which the framework does not find the arrays; None where it
    writes no such file."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files that the framework looks for."""
        return [*self.arrays.values(), *([self.marker] if self.marker else [])]

    @property
    def name(self) -> str:
        """Name of the set in the sidecar."""
        return self.sidecar.rpartition("/")[2].removesuffix(SUFFIX)

    @property
    def endings(self) -> tuple[dict[str, str], str | None]:
        """Endings of the names of its arrays, and of its marker, after the name of the set."""
        base = str(self)
        arrays = {name: path.removeprefix(base) for name, path in self.arrays.items()}
        return arrays, self.marker and self.marker.removeprefix(base)

    def are_there(self, is_there: Callable[[str], bool] = os.path.isfile) -> bool:
        """Return True if the framework would find the arrays."""
        return all(map(is_there, self.paths))

    def __str__(self) -> str:
        return self.sidecar.removesuffix(SUFFIX)


@dataclass(kw_only=True)
class Sidecar:
    """The record of one set of arrays."""

    origin: str
    """``built`` by megaindex; ``found``: written by the framework, then checked and accepted;
    ``exported``: another order, for the framework's own reader."""
    settings: Mapping[str, Any]
    """All values besides the corpus that the arrays depend on."""
    corpus: str
    """Fingerprint of the corpus; empty where the arrays depend on none."""
    stamp: list[int]
    """Sizes and times of the corpus's files when the fingerprint was taken."""
    facts: Mapping[str, Any]
    """Derived values, so that they need not be computed again."""
    arrays: Mapping[str, ArrayRecord]
    files: dict[str, FileState]
    """State of each file when it was recorded; the record does not hold for files of another
    state."""
    checksums: Mapping[str, str] | None
    """XXH3-128 of the elements of each array; None for a sidecar that was read and is not in
    doubt."""
    in_doubt: bool = False
    """True for a set recorded under another boot and not marked as durable: a power loss may have
    taken pages of its files. Not part of the record."""


@dataclass(kw_only=True, slots=True)
class Identity:
    """The inputs of a request, as functions that are called only if a sidecar leaves them open."""

    settings: Callable[[], Mapping[str, Any]]
    corpus: Callable[[], str]
    stamp: list[int] = field(default_factory=list)
    facts: Callable[[], Mapping[str, Any]] = dict
    learn: Callable[[Mapping[str, Any]], object] = dict
    """Called with the facts of a sidecar whose stamp is that of the corpus."""

    def is_of(self, sidecar: Sidecar) -> bool:
        """Return True if the sidecar records the corpus and the settings of this request."""
        known = bool(self.stamp) and sidecar.stamp == self.stamp
        if known:
            self.learn(sidecar.facts)
        return (known or sidecar.corpus == self.corpus()) and sidecar.settings == self.settings()

    def sidecar(
        self,
        origin: str,
        arrays: Mapping[str, ArrayRecord],
        files: dict[str, FileState],
        checksums: Mapping[str, str],
    ) -> Sidecar:
        """Return the record of arrays that are those of this identity."""
        return Sidecar(
            origin=origin,
            settings=self.settings(),
            corpus=self.corpus(),
            stamp=self.stamp,
            facts=self.facts(),
            arrays=arrays,
            files=files,
            checksums=checksums,
        )


def states_of(paths: Mapping[str, str]) -> dict[str, FileState]:
    """Return the state of each file.

    Raises:
        MissingFile: one is not there.
    """
    states = {}
    path = ""
    try:
        for name, path in paths.items():
            states[name] = state_of(os.stat(path))
    except OSError as error:
        raise storage_error(error, path, "cannot read the status of") from error
    return states


def state_of(status: os.stat_result) -> FileState:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def changed(files: ArrayFiles) -> FormatError:
    """Return the error for files that are not those that were recorded."""
    return FormatError(
        f"{files}-*: these are not the files that {files.sidecar} was written for; remove all "
        "files of that name, they will be built again"
    )
