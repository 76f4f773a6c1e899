"""Sets of index arrays under a framework's names, as tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megaindex.cache.array_files import ArrayFiles, Arrays, Identity
from megaindex.cache.array_group import ArrayRequest, ArrayWriter
from megaindex.errors import FormatError

Contents = Mapping[str, Any]
"""The arrays of a set, by name."""


def files_of(folder: Path, contents: Contents, name: str) -> ArrayFiles:
    """Where the set ``name`` lies."""
    return ArrayFiles(
        arrays={array: f"{folder}/{name}-{array}.npy" for array in contents},
        sidecar=f"{folder}/{name}-megaindex.json",
        marker=f"{folder}/{name}-description.txt",
    )


def fill(writer: ArrayWriter, contents: Contents) -> None:
    """Write all arrays of a set."""
    for name, values in contents.items():
        writer.allocate(name, values.shape, values.dtype.name)[...] = values
        writer.seal(name)


class Request(ArrayRequest):
    """A request for the set ``name``, whose array holds ``size`` numbers of a corpus."""

    description = "text"

    def __init__(self, folder: Path, name: str, size: int, corpus: str = "first") -> None:
        self.files = files_of(folder, {"a": size}, name)
        self.size, self.corpus = size, corpus

    @property
    def identity(self) -> Identity:
        return Identity(settings=dict, corpus=lambda: self.corpus)

    @property
    def corpus_nbytes(self) -> int:
        return 0

    def fill(self, sink: Any, threads: int) -> None:
        fill(sink, {"a": np.arange(self.size, dtype=np.int32)})

    def check(self, arrays: Arrays) -> None:
        raise FormatError("of another corpus")
