"""Split of a pair between documents."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from megaindex.corpus.merge import checked_provenance
from megaindex.corpus.outputs import WriteResult, check_outputs, checked_outcome
from megaindex.errors import InvalidArgument
from megaindex.format.pair import MappedPair, map_pair, pair_paths
from megaindex.format.provenance import Provenance
from megaindex.format.sink import PairSink, written_paths
from megaindex.format.writer import append_documents
from megaindex.io.paths import Progress, listed_paths
from megaindex.progress import Bar, silent
from megaindex.validation import check_between, check_choice

Documents = tuple[int, int]
"""First document of a part, and the first document after it."""

_STEP = 1 << 14  # sequences between two stored token counts


def split(
    source: str | os.PathLike[str],
    outputs: Sequence[str | os.PathLike[str]],
    cut: Callable[[MappedPair], list[Documents]],
    *,
    dialect: str = "megatron",
    overwrite: bool = False,
    bar: Bar = silent,
) -> list[WriteResult]:
    """Write parts of a pair as pairs of their own; token type, modes and provenance are kept.

    Each part is published whole; if one fails, the others are removed again.

    Args:
        source: prefix of the pair.
        outputs: a prefix for each part, or a single one with {} for the number of the part.
        cut: function that returns the documents of each part, such as
            `lambda pair: cut_evenly(pair, 8, "tokens")`.
        dialect: framework that defines the dtype codes: "megatron", "neox" or "paddlenlp".
        overwrite: replace existing pairs.
        bar: function of the total bytes that returns a function called with bytes copied.

    Returns:
        Documents, tokens and bytes of each part, after a check of all its entries.

    Raises:
        InvalidArgument: the parts do not fit the pair, or the outputs do not fit the parts.
        FormatError: the pair is damaged.
        StorageError: an output exists, or a file cannot be read or written.
    """
    source, outputs = os.fspath(source), listed_paths(outputs)
    pair = map_pair(source, dialect, multimodal=False)
    pair.check_documents()
    tokens = pair.check_everything()
    parts = cut(pair)
    names = _names(outputs, len(parts))
    check_outputs(names, written_paths(source), overwrite=overwrite)
    provenance = checked_provenance(source)
    # an estimate for ranges that overlap or leave documents out
    progress = bar(tokens * pair.dtype.itemsize)
    # an .idx without sequences does not show whether it has modes
    multimodal = pair.modes is not None and pair.header.num_sequences > 0
    sinks: list[PairSink] = []
    try:
        for name, documents in zip(names, parts, strict=True):
            sink = PairSink(
                *pair_paths(name),
                pair.dtype,
                multimodal=multimodal,
                overwrite=overwrite,
                provenance=provenance is not None,
            )
            sinks.append(sink)
            _write_part(pair, provenance, sink, documents, progress)
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
            f"{count} parts need as many outputs, or one with {{}} for the number of the part, got "
            f"{len(outputs)}"
        )
    return list(outputs)


def _write_part(
    pair: MappedPair,
    provenance: Provenance | None,
    sink: PairSink,
    documents: Documents,
    progress: Progress,
) -> None:
    try:
        sink.open()
        append_documents(pair, sink, *documents, progress)
        if provenance is not None and sink.provenance is not None:
            with sink:
                sink.provenance.add_part(provenance, *documents)
        sink.publish(pair.header.dtype_code)
    finally:
        sink.discard()


def cut_at(pair: MappedPair, documents: Sequence[int]) -> list[Documents]:
    """Return parts that begin at document 0 and at the given documents.

    Documents (3, 5) of 9 give the parts 0:3, 3:5 and 5:9.

    Raises:
        InvalidArgument: the documents do not rise within the pair.
    """
    count = len(pair.bounds) - 1
    edges = [0, *documents, count]
    for left, right in pairwise(edges):
        if left >= right:
            raise InvalidArgument(
                f"first documents of parts must rise from at least 1 to at most {count - 1}, got "
                f"{list(documents)}: {pair.idx_path} has {count} documents, and a part at least one"
            )
    return list(pairwise(edges))


def cut_ranges(pair: MappedPair, ranges: Sequence[Documents]) -> list[Documents]:
    """Return explicit ranges [first, stop) of documents, which may overlap and leave some out.

    Raises:
        InvalidArgument: a range is empty or outside the pair.
    """
    count = len(pair.bounds) - 1
    for first, stop in ranges:
        if not 0 <= first < stop <= count:
            raise InvalidArgument(
                f"a range of documents a:b must have 0 <= a < b <= {count}, the number of "
                f"documents of {pair.idx_path}, got {first}:{stop}"
            )
    return list(ranges)


def cut_evenly(pair: MappedPair, parts: int, by: str) -> list[Documents]:
    """Return parts of about the same number of documents or tokens.

    By tokens, part k begins at the document before which the number of tokens is nearest to k/parts
    of all: lengths 5, 1, 4, 2 in two parts give 0:2 and 2:4.

    Args:
        pair: the pair, as `split` passes it.
        parts: number of parts, each of at least one document.
        by: "tokens" or "documents".

    Raises:
        InvalidArgument: the pair has fewer documents than parts, or `by` is unknown.
    """
    count = len(pair.bounds) - 1
    limit = f"the number of documents of {pair.idx_path}"
    parts = check_between("the number of parts", parts, 1, count, most_is=limit)
    if check_choice("by", by, ("tokens", "documents")) == "documents":
        return cut_at(pair, [k * count // parts for k in range(1, parts)])
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
    """Tokens before any sequence, from one pass; 8 bytes are stored for 16,384 sequences."""

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
