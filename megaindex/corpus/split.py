"""Split of a pair between documents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from megaindex.corpus.merge import check_documents
from megaindex.corpus.outputs import WriteResult, check_outputs, checked_outcome
from megaindex.errors import InvalidArgument
from megaindex.format.pair import MappedPair, PairSink, map_pair, pair_paths
from megaindex.format.writer import append_documents
from megaindex.io.filesystem import Progress
from megaindex.progress import Bar, silent

Documents = tuple[int, int]
"""First document of a part, and the first behind it."""

_STEP = 1 << 14  # sequences between two token counts that are kept


def split(
    source: str,
    outputs: Sequence[str],
    cut: Callable[[MappedPair], list[Documents]],
    *,
    dialect: str = "megatron",
    overwrite: bool = False,
    bar: Bar = silent,
) -> list[WriteResult]:
    """Write parts of the pair `source` as pairs of their own; token type and modes are kept.

    The parts appear one after another, each whole; if one fails, those before it are removed
    again.

    Args:
        outputs: a prefix for each part, or a single one with {} for the number of the part.
        cut: the documents of each part, such as `lambda pair: cut_evenly(pair, 8, "tokens")`.
        dialect: whose dtype codes the files use.
        overwrite: replace existing pairs.

    Raises:
        InvalidArgument: the cuts do not fit the pair, or the outputs do not fit the cuts.
        FormatError: the pair is damaged.
        StorageError: an output exists, or a file cannot be read or written.
    """
    pair = map_pair(source, dialect, multimodal=False)
    tokens = check_documents(pair)
    parts = cut(pair)
    names = _names(outputs, len(parts))
    check_outputs(names, pair_paths(source), overwrite=overwrite)
    # ranges may overlap or leave documents out, so that the bar's end is an estimate for them
    progress = bar(tokens * pair.dtype.itemsize)
    # A pair whose few sequences happen to be none has no use for modes, and does not say.
    multimodal = pair.modes is not None and pair.header.num_sequences > 0
    sinks: list[PairSink] = []
    try:
        for name, documents in zip(names, parts, strict=True):
            paths = pair_paths(name)
            sinks.append(PairSink(*paths, pair.dtype, multimodal=multimodal, overwrite=overwrite))
            _write_part(pair, sinks[-1], documents, progress)
        return [checked_outcome(name, dialect) for name in names]
    except BaseException:
        for sink in sinks:
            sink.take_back()
        raise


def _names(outputs: Sequence[str], count: int) -> list[str]:
    if len(outputs) == 1 and "{}" in outputs[0]:
        width = len(str(count - 1))
        return [outputs[0].replace("{}", f"{number:0{width}}") for number in range(count)]
    if len(outputs) != count:
        raise InvalidArgument(
            f"outputs: {len(outputs)} given for {count} parts; give one for each, or a single one "
            f"with {{}} where the number of the part goes"
        )
    return list(outputs)


def _write_part(pair: MappedPair, sink: PairSink, documents: Documents, progress: Progress) -> None:
    try:
        sink.open()
        append_documents(pair, sink, *documents, progress)
        sink.publish(pair.header.dtype_code)
    finally:
        sink.discard()


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
    """Return parts with as equal a number of documents or tokens as whole documents allow.

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
