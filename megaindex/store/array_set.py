"""One set of index arrays: where it lies, what is known of it, and what is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaindex.errors import FormatError
from megaindex.io.failures import storage_error
from megaindex.kernels.types import IntArray

Arrays = dict[str, IntArray]
ArrayRecord = tuple[str, tuple[int, ...], int]
"""dtype, shape, and bytes of the header of an .npy file."""
FileState = list[int]
"""Size in bytes, time of the last change in nanoseconds, inode: of a file that was not replaced or
written to, they stay, when it is renamed too."""
SUFFIX = "-megaindex.json"


@dataclass(kw_only=True, slots=True)
class ArrayFiles:
    """Where one set of arrays lies."""

    arrays: Mapping[str, str]
    """Path of the .npy file of each array."""
    sidecar: str
    """Its path, which ends in ``-megaindex.json``."""
    marker: str | None = None
    """A text file that the framework writes with them, and without which it finds nothing."""

    @property
    def paths(self) -> list[str]:
        """All that the framework looks for."""
        return [*self.arrays.values(), *([self.marker] if self.marker else [])]

    @property
    def name(self) -> str:
        """What the sidecar calls this set."""
        return self.sidecar.rpartition("/")[2].removesuffix(SUFFIX)

    @property
    def endings(self) -> tuple[dict[str, str], str | None]:
        """What follows the name of the set in those of its arrays, and of its marker."""
        base = str(self)
        arrays = {name: path.removeprefix(base) for name, path in self.arrays.items()}
        return arrays, self.marker and self.marker.removeprefix(base)

    def are_there(self, is_there: Callable[[str], bool] = os.path.isfile) -> bool:
        """Whether the framework would find them."""
        return all(map(is_there, self.paths))

    def __str__(self) -> str:
        return self.sidecar.removesuffix(SUFFIX)


@dataclass(kw_only=True)
class Sidecar:
    """What is known of one set of arrays."""

    origin: str
    """built: by megaindex; found: written by the framework, checked and accepted."""
    settings: Mapping[str, Any]
    """Everything but the corpus that decides the arrays."""
    corpus: str
    """Fingerprint of the corpus; empty where the arrays depend on none."""
    stamp: list[int]
    """Sizes and times of the corpus's files when the fingerprint was taken."""
    facts: Mapping[str, Any]
    """What a reader need not work out again."""
    arrays: Mapping[str, ArrayRecord]
    files: dict[str, FileState]
    """The files that this was recorded of: others of their names are not described by it."""
    checksums: Mapping[str, str] | None
    """XXH3-128 of the elements of each array; None where it was read and nobody needs them."""
    in_doubt: bool = False
    """Recorded under another boot, and nobody has noted that the files are on the disk: pages of
    them may have been lost. Not part of the record."""


@dataclass(kw_only=True, slots=True)
class Identity:
    """What a request depends on, asked for only as far as a sidecar does not answer it."""

    settings: Callable[[], Mapping[str, Any]]
    corpus: Callable[[], str]
    stamp: list[int] = field(default_factory=list)
    facts: Callable[[], Mapping[str, Any]] = dict
    learn: Callable[[Mapping[str, Any]], object] = dict
    """Called with the facts of a sidecar whose stamp shows that they still hold."""

    def is_of(self, sidecar: Sidecar) -> bool:
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
        """The record of arrays that are those of this identity."""
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
    """The state of each file.

    Raises:
        MissingFile: one is not there.
    """
    states = {}
    path = ""
    try:
        for name, path in paths.items():
            states[name] = state_of(os.stat(path))
    except OSError as error:
        raise storage_error(error, path, "cannot look at") from error
    return states


def state_of(status: os.stat_result) -> FileState:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def check_unchanged(files: ArrayFiles, sidecar: Sidecar) -> None:
    """Look whether these are still the files that a sidecar, found by a listing, was written for.

    Raises:
        MissingFile: one was removed.
        FormatError: one was replaced or written to.
    """
    if states_of(files.arrays) != sidecar.files:
        raise changed(files)


def changed(files: ArrayFiles) -> FormatError:
    """The error for files that are not those that were recorded."""
    return FormatError(
        f"{files}-*: these are not the files that {files.sidecar} was written for; remove all "
        "files of that name, they will be built again"
    )
