"""Sets of index arrays under a framework's names, as tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaindex.cache.array_files import ArrayFiles
from megaindex.cache.array_group import ArrayWriter

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
