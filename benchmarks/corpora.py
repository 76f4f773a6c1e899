"""Corpora of billions of tokens: real .idx files with sparse .bin files."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Number and lengths of a corpus's documents, and epochs."""

    name: str
    documents: int
    mean_tokens: int
    epochs: int
    sequence_length: int = 2048
    lognormal: bool = True

    def lengths(self) -> np.ndarray:
        """Draw lengths from a fixed seed: int32[documents], at least 1."""
        if not self.lognormal:
            return np.full(self.documents, self.mean_tokens, np.int32)
        sigma = 1.0
        drawn = np.random.default_rng(20260101).lognormal(
            np.log(self.mean_tokens) - sigma**2 / 2, sigma, self.documents
        )
        return np.clip(drawn, 1, 2**31 - 1).astype(np.int32)


# lognormal lengths of mean 1000: 1 M documents are a billion tokens
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="1B", documents=1_000_000, mean_tokens=1000, epochs=1),
        Shape(name="10B", documents=10_000_000, mean_tokens=1000, epochs=1),
        Shape(name="40B", documents=10_000_000, mean_tokens=1000, epochs=4),
        Shape(name="100M-short", documents=100_000_000, mean_tokens=30, epochs=1),
        Shape(name="100k-long", documents=100_000, mean_tokens=100_000, epochs=1, lognormal=False),
    )
}


def write_sparse(directory: Path, shape: Shape) -> Path:
    """Write the corpus in ``directory`` unless it exists, and return its prefix."""
    prefix = directory / shape.name
    if prefix.with_suffix(".idx").exists():
        return prefix
    lengths = shape.lengths()
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * _ITEMSIZE)
    write_index(prefix, lengths)
    return prefix


def write_linked(folder: Path, sources: int, documents: int, mean_tokens: int = 1000) -> list[str]:
    """Write corpora that share one file of tokens and differ in the lengths of documents.

    Returns:
        Their prefixes.
    """
    prefixes = [folder / f"c{number}" for number in range(sources)]
    if not folder.exists():
        folder.mkdir(parents=True)
        shape = Shape(name="", documents=documents, mean_tokens=mean_tokens, epochs=1)
        lengths = shape.lengths()
        tokens = np.random.default_rng(1).integers(0, 50_000, lengths.sum(), np.uint16)
        tokens.tofile(folder / "c0.bin")
        for number, prefix in enumerate(prefixes):
            write_index(prefix, np.roll(lengths, number))
            if number:
                os.link(folder / "c0.bin", prefix.with_suffix(".bin"))
    return list(map(str, prefixes))


def move_away(paths: Iterable[Path], folder: Path) -> None:
    """Move files and folders to ``folder`` in place of removing them, if they exist.

    ext4 does not reuse inodes for some minutes after their files were removed: each new file looks
    for one past all of those. A build after removing hundreds of files would measure that.
    """
    folder.mkdir(exist_ok=True)
    for path in filter(Path.exists, paths):
        path.rename(folder / f"{os.getpid()}-{next(_numbers)}")


_numbers = itertools.count()


def write_index(prefix: Path, lengths: np.ndarray) -> None:
    """Write the .idx of uint16 documents of these lengths."""
    pointers = np.zeros(lengths.size, np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    with open(prefix.with_suffix(".tmp"), "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, _CODE, lengths.size, lengths.size + 1))
        for array in (lengths, pointers * _ITEMSIZE, np.arange(lengths.size + 1, dtype=np.int64)):
            array.tofile(file)
    prefix.with_suffix(".tmp").rename(prefix.with_suffix(".idx"))


_ITEMSIZE, _CODE = 2, 8  # uint16
