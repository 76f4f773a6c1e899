"""Samples of whole documents in a plan: facts, input tokens, coverage and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megaindex.builders.single import build_packing, index_of
from megaindex.index.order_settings import order_of_row
from megaindex.index.orders.framework import PackingIndex
from megaindex.index.orders.packed import Packing, most_documents
from megaindex.kernels import active, num_threads
from megaindex.plan.coverage import BUILD_LIMIT, count_served, counted_coverage
from megaindex.plan.model import Coverage, PackingFacts, Row
from megaindex.run.parts import SplitPart, documents_order, open_dataset, with_labels
from megaindex.run.passes import ServedRange
from megaindex.settings.run_settings import RunSettings

_MOST_LOCATED = 1 << 22  # samples of which a plan counts the tokens


def packing_facts(
    packing: Packing | None, tokens: int, long_documents: int, max_documents: int | None
) -> PackingFacts | None:
    """Return the facts about samples of order packed; None in other orders."""
    if packing is None:
        return None
    pieces, samples = packing.pieces
    return PackingFacts(
        fill=packing.input_tokens / (packing.num_samples * packing.sequence_length),
        padding=packing.padding,
        cut_tokens=tokens - packing.input_tokens,
        long_documents=long_documents,
        max_documents=most_documents(max_documents, packing.sequence_length),
        pieces_per_sample=float(pieces @ samples / packing.num_samples),
        most_pieces=int(pieces[-1]),
        likeness=packing.likeness,
        rare_tokens=packing.rare_tokens / packing.input_tokens,
    )


class InputTokens(NamedTuple):
    """Input tokens of a range of samples in order packed."""

    tokens: int
    exact: bool
    """False for the mean over seeds."""


def mean_inputs(packing: Packing, begin: int, end: int) -> InputTokens:
    """Return the input tokens of samples ``begin`` to ``end - 1``: of complete epochs exactly, else
    the mean over seeds."""
    size, inputs = packing.num_samples, packing.input_tokens
    whole = begin % size == end % size == 0 or begin == end
    return InputTokens(end * inputs // size - begin * inputs // size, whole)


def is_countable(packing: Packing, documents: int, begin: int, end: int) -> bool:
    """Return whether the input tokens of samples ``begin`` to ``end - 1`` are cheap to count.

    Of an epoch that is read in part, the samples read or the others are located.
    """
    size = packing.num_samples
    parts = [end - begin] if begin // size == end // size else [-begin % size, end % size]
    located = sum(min(part, size - part) for part in parts)
    return documents <= BUILD_LIMIT and located <= _MOST_LOCATED


def packed_inputs(run: RunSettings, part: SplitPart, row: Row) -> InputTokens:
    """Return the input tokens of the samples drawn of a source in order packed.

    Of a part of an epoch they are those of the counted coverage, or counted in the index where that
    is cheap, else the mean over seeds.
    """
    packing = part.packing
    assert packing is not None
    assert row.drawn is not None, "draws of our orders are always counted"
    mean = mean_inputs(packing, 0, row.drawn)
    if mean.exact:
        return mean
    if row.coverage.tokens_served is not None:
        return InputTokens(row.coverage.tokens_served, True)
    counts = bool(part.source.path) and run.coverage not in ("expected", "none")
    if not (counts and is_countable(packing, part.sequences, 0, row.drawn)):
        return mean
    index: Any = index_of(
        open_dataset(part.source.path, run.row),
        part.documents,
        order_of_row(run.row),
        sequence_length=run.sequence_length,
        seed=run.seed,
        num_samples=row.drawn,
        source_name=part.shuffle_name,
    )
    return InputTokens(index.count_inputs(0, row.drawn), True)


def index_of_part(run: RunSettings, part: SplitPart, requested: int) -> PackingIndex:
    """Return the index that GPT-NeoX builds for ``requested`` samples."""
    assert run.packing is not None
    return build_packing(
        open_dataset(part.source.path, run.row),
        range(part.begin, part.end),
        with_labels(run.packing, part.source, run.row),
        sequence_length=run.sequence_length,
        seed=run.seed,
        num_samples=max(1, requested),
    )


def samples_of_first_pass(index: PackingIndex, part: SplitPart) -> int:
    """Return the samples of pack_until_overflow that begin in the first pass over the documents."""
    taking_part = part.sequences - part.leaves_out
    return int(np.searchsorted(index.sample_index[:-1, 0], taking_part))


def packing_error(
    run: RunSettings, part: SplitPart, index: PackingIndex, served: Sequence[ServedRange]
) -> str:
    """Return the error with which GPT-NeoX ends on pack_until_overflow, or an empty string.

    It ends with one where the last document of a pass is left out, and where the sample filled last
    is served as the first.
    """
    assert run.packing is not None
    if run.packing.pack_impl == "unpacked":
        return ""
    if part.leaves_out and _reads_beyond_a_pass(run, part, index):
        return "an IndexError: the last document of a pass is left out of training"
    if _last_sample(index) == 0 and any(piece.begin == 0 for piece in served):
        return "a RecursionError: no document follows its first sample"
    return ""


def _reads_beyond_a_pass(run: RunSettings, part: SplitPart, index: PackingIndex) -> bool:
    assert run.packing is not None
    order = documents_order(part.source, run.row, part.sequences, run.packing, run.sequence_length)
    state = active().seed_state(run.seed)
    active().shuffle(state, np.arange(index.num_samples), num_threads())
    shuffled = np.arange(part.sequences)
    for _ in range(index.num_epochs - 1):
        active().shuffle(state, shuffled, num_threads())
        if not order.takes_part[shuffled[-1]]:
            return True
    return False


def _last_sample(index: PackingIndex) -> int:
    """Return the position of the sample that was filled last."""
    return int(np.argmax(index.shuffle_index == index.num_samples - 1))


def serves_first_again(index: PackingIndex, served: Sequence[ServedRange]) -> bool:
    """Return True if the sample filled last is served, for which GPT-NeoX reads the first."""
    last = _last_sample(index)
    return any(part.begin <= last < part.end for part in served)


def packing_coverage(
    run: RunSettings, part: SplitPart, index: PackingIndex, served: Sequence[ServedRange]
) -> Coverage:
    """Return the counted coverage of a part."""
    lengths = open_dataset(part.source.path, run.row).sequence_lengths[part.begin : part.end]
    served = _with_last_replaced(run, index, served)
    return counted_coverage(*count_served(index, served, lengths, part.begin))


def _with_last_replaced(
    run: RunSettings, index: PackingIndex, served: Sequence[ServedRange]
) -> list[ServedRange]:
    """Return the samples that GPT-NeoX reads: for the one filled last, it reads the first."""
    assert run.packing is not None
    if run.packing.pack_impl == "unpacked":
        return list(served)
    last = _last_sample(index)
    pieces = []
    for part in served:
        if part.begin <= last < part.end:
            around = (replace(part, end=last), replace(part, begin=last + 1))
            pieces += [*around, ServedRange(0, 1, part.times)]
        else:
            pieces.append(part)
    return [part for part in pieces if part.begin < part.end]
