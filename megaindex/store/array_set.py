"""One set of index arrays: where it lies, and what is known of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaindex.kernels.types import IntArray

Arrays = dict[str, IntArray]
ArrayRecord = tuple[str, tuple[int, ...], int]
"""dtype, shape, and bytes of the header of an .npy file."""
_SUFFIX = "-megaindex.json"


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
        return self.sidecar.rpartition("/")[2].removesuffix(_SUFFIX)

    def are_there(self, is_there: Callable[[str], bool] = os.path.isfile) -> bool:
        """Whether the framework would find them."""
        return all(map(is_there, self.paths))

    def __str__(self) -> str:
        return self.sidecar.removesuffix(_SUFFIX)


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
