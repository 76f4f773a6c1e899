"""Where to cut a pair between documents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.format.pair import MappedPair

Documents = tuple[int, int]
"""First document of a part, and the first behind it."""
_STEP = 1 << 14  # sequences between two token counts that are kept


class TokenCounts:
    """Tokens before any sequence, from one pass: 8 bytes are kept for every 16,384 sequences."""

    def __init__(self, pair: MappedPair) -> None:
        self._lengths = pair.lengths
        starts = range(0, len(pair.lengths), _STEP)
        sums = [int(self._lengths[at : at + _STEP].sum(dtype=np.int64)) for at in starts]
        self._before = np.concatenate(([0], np.cumsum(sums, dtype=np.int64)))
        self.total = int(self._before[-1])

    def before(self, sequence: int) -> int:
        step = sequence // _STEP
        rest = self._lengths[step * _STEP : sequence]
        return int(self._before[step]) + int(rest.sum(dtype=np.int64))


def cut_at(pair: MappedPair, documents: Sequence[int]) -> list[Documents]:
    """Parts that end and begin at the given documents: (3, 5) of 9 gives 0:3, 3:5 and 5:9."""
    count = len(pair.bounds) - 1
    edges = [0, *documents, count]
    for left, right in pairwise(edges):
        if left >= right:
            raise InvalidArgument(
                f"at={list(documents)}: must rise, within 1 to {count - 1}: {pair.idx_path} has "
                f"{count} documents, and every part gets at least one"
            )
    return list(pairwise(edges))


def cut_ranges(pair: MappedPair, ranges: Sequence[Documents]) -> list[Documents]:
    """Explicit ranges, in any order; they may leave documents out, and may overlap."""
    count = len(pair.bounds) - 1
    for first, stop in ranges:
        if not 0 <= first < stop <= count:
            raise InvalidArgument(
                f"documents={first}:{stop}: must be a:b with 0 <= a < b <= {count}, the number of "
                f"documents of {pair.idx_path}"
            )
    return list(ranges)


def cut_evenly(pair: MappedPair, parts: int, by: str) -> list[Documents]:
    """Parts with as equal a number of documents or tokens as whole documents allow.

    By tokens, cut k is where the tokens in front are nearest to k/parts of all: lengths 5, 1, 4, 2
    in two parts give 0:2 and 2:4. Every part has at least one document.
    """
    count = len(pair.bounds) - 1
    if not 1 <= parts <= count:
        raise InvalidArgument(
            f"parts={parts}: must be in 1..{count}: {pair.idx_path} has {count} documents, and "
            f"every part gets at least one"
        )
    if by == "documents":
        return cut_at(pair, [k * count // parts for k in range(1, parts)])
    if by != "tokens":
        raise InvalidArgument(f"by={by!r}: must be tokens or documents")
    tokens = TokenCounts(pair)

    def scaled_tokens_before(document: int) -> int:
        return tokens.before(int(pair.bounds[document])) * parts

    cuts: list[int] = []
    for k in range(1, parts):
        wanted = k * tokens.total
        cut = bisect_left(range(count), wanted, key=scaled_tokens_before)
        if cut and wanted - scaled_tokens_before(cut - 1) <= scaled_tokens_before(cut) - wanted:
            cut -= 1
        lowest = cuts[-1] + 1 if cuts else 1
        cuts.append(min(max(cut, lowest), count - (parts - k)))
    return cut_at(pair, cuts)
