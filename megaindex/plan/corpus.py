"""Sizes of a corpus: one pass over the lengths of an .idx, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.dialect import Dialect
from megaindex.recipe.run import Source

_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Part:
    """The sequences [begin, end) of one source, as far as one split uses them."""

    source: Source
    begin: int
    end: int
    tokens: int
    pass_samples: int | None = None
    """Samples of one pass where each is of whole documents: of pack_until_overflow, the fewest."""
    leaves_out: int = 0
    """Documents among them that are not served: without a label, or too long."""

    @property
    def sequences(self) -> int:
        return self.end - self.begin


def measure(source: Source, row: Dialect, split: str | None) -> list[Part]:
    """Parts of a source: all of it, or the train, valid and test parts of ``split``.

    Raises:
        MissingFile, StorageError, FormatError: the pair cannot be read, or a length is negative.
    """
    if source.tokens is not None:
        return [Part(source=source, begin=0, end=0, tokens=source.tokens)]
    dataset = IndexedDataset(source.path, dialect=row.file_dialect)
    bounds = [(0, len(dataset))] if split is None else row.split_bounds(split, len(dataset))
    lengths, path = dataset.sequence_lengths, f"{source.path}.idx"
    sums = [_sum(lengths, begin, end, path) for begin, end in bounds]
    return [
        Part(source=source, begin=begin, end=end, tokens=tokens)
        for (begin, end), tokens in zip(bounds, sums, strict=True)
    ]


def _sum(lengths: npt.NDArray[np.int32], begin: int, end: int, path: str) -> int:
    """Tokens of the sequences [begin, end), in blocks: the sum makes copies as wide as int64."""
    total = 0
    for start in range(begin, end, _CHUNK):
        block = lengths[start : min(start + _CHUNK, end)]
        if int(block.min()) < 0:
            at = int(np.argmax(block < 0))
            raise FormatError(
                f"{path}: sequence {start + at} has the length {int(block[at])}; lengths are "
                ">= 0: write the file again"
            )
        total += int(block.sum(dtype=np.int64))
    return total
