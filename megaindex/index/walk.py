"""All samples of a range in the order in which they are found fastest.

Receipts and counts are sums, which do not ask for the order of training: an index whose samples lie
one after another in some other order may give them in that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from megaindex.errors import OutOfRange
from megaindex.index.plain import check_integer
from megaindex.index.spans import Index, Spans, joined
from megaindex.kernels.types import I64

CHUNK = 1 << 14
"""Samples given at once: what passes from kernel to kernel stays in a near cache."""

SCATTERED = 8
"""One sample in so few, or fewer, is found faster in the order of training than by passing over all
of them in the order in which they lie."""

Chunks: TypeAlias = Iterator[tuple[I64, Spans]]
"""Positions in the order of training, int64[n], and the runs of the samples there."""


class Locating(Protocol):
    """The part of an index that finds samples."""

    def locate(self, sample_ids: I64) -> Spans: ...


@runtime_checkable
class Walkable(Protocol):
    """An index with a fast walk of its own."""

    def walk(self, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
        """See `walk`; the range lies inside."""
        ...


def walk(index: Index, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
    """Samples begin ... end - 1, each once, in any order, in chunks.

    ``parts`` walks with part 0, 1, ..., parts - 1 give them all together; each may run in a thread
    of its own.

    Raises:
        OutOfRange: the index does not hold them.
    """
    begin, end = check_range(index, begin, end)
    if isinstance(index, Walkable):
        return index.walk(begin, end, part, parts)
    return located(index, begin, end, part, parts)


def located(index: Locating, begin: int, end: int, part: int, parts: int) -> Chunks:
    """The walk of any index, in the order of training."""
    first, stop = share(begin, end, part, parts)
    for start in range(first, stop, CHUNK):
        positions = np.arange(start, min(stop, start + CHUNK))
        yield positions, index.locate(positions)


def share(begin: int, end: int, part: int, parts: int) -> tuple[int, int]:
    """The part-th of ``parts`` stretches of begin ... end - 1: 0 to 10 in three: 0 3 6 10."""
    return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts


def in_order(index: Index, begin: int, end: int) -> Spans:
    """The spans of samples begin ... end - 1, as ``index.locate`` gives them."""
    begin, end = check_range(index, begin, end)
    pieces = [(positions - begin, spans) for positions, spans in walk(index, begin, end)]
    return joined(pieces, end - begin)


def check_range(index: Index, begin: int, end: int) -> tuple[int, int]:
    """Both as plain integers.

    Raises:
        OutOfRange: the index does not hold samples begin ... end - 1.
        InvalidArgument: they are no integers.
    """
    begin, end = check_integer("begin", begin), check_integer("end", end)
    if not 0 <= begin <= end <= index.num_samples:
        raise OutOfRange(
            f"samples {begin} to {end} were asked for, the index holds samples 0 to "
            f"{index.num_samples}; ask for a range inside"
        )
    return begin, end
