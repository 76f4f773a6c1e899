"""The first difference of two runs in a range of positions, and its causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from typing import Any, NamedTuple

import numpy as np

from megaindex._types import I64, U64
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import InvalidArgument
from megaindex.index.counts import source_counts
from megaindex.index.description import describe_index
from megaindex.index.receipts import (
    DEFAULT_STRIDE,
    Receipt,
    explain,
    keys_for,
    planned_block_receipts,
    receipts_between,
)
from megaindex.index.skips import unskipped
from megaindex.index.spans import Index, datasets_of
from megaindex.run.run import Run
from megaindex.run.subset import block_bounds, differences, first_step, step_bounds_of
from megaindex.settings.mix_changes import MixChanges
from megaindex.validation import shown


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """What decides the positions of a run, to be compared with another run.

    Attributes:
        index: samples, without skips.
        fingerprints: those of its sources.
        step_bounds: first sample of each step, without skips, and the end; None: not known.
        mix: changes of the mix; None without any.
    """

    index: Index
    fingerprints: Sequence[str]
    step_bounds: I64 | None = None
    mix: MixChanges | None = None

    @classmethod
    def of(cls, run: Run) -> Compared:
        """Return the positions of a run without its skips."""
        return cls(
            index=unskipped(run.index),
            fingerprints=[corpus_fingerprint(each) for each in datasets_of(run.index)],
            step_bounds=bounds_without_moved(run),
        )

    @property
    def keys(self) -> U64:
        return keys_for(self.index, self.fingerprints)

    @property
    def description(self) -> Any:
        """The index as JSON values; empty for arrays that were not built from settings."""
        try:
            return describe_index(self.index)
        except InvalidArgument:
            return {}


def bounds_without_moved(run: Run) -> I64:
    """Return the bounds of the steps of a run without those of moved samples."""
    if run.skips is None:
        return run.step_bounds
    before = run.step_bounds[run.step_bounds < run.skips.end]
    return np.append(before, run.skips.end)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of `same_until`, with descriptions of the first difference of each kind.

    Attributes:
        begin, end: positions that were compared; those of steps from the first one on.
        where: the first block of positions, [begin, end), with other samples; None: there is none.
        sources: other contents of the sources.
        samples: change of the mix, first sample and settings of the order that differ, as far as
            they are known; empty if ``where`` is None.
        steps: the first other step.
    """

    begin: int
    end: int
    where: tuple[int, int] | None
    sources: tuple[str, ...]
    samples: tuple[str, ...]
    steps: tuple[str, ...]

    @property
    def causes(self) -> tuple[str, ...]:
        """Descriptions of all differences; empty if there are none."""
        return (*self.sources, *self.samples, *self.steps)


def same_until(
    first: Compared,
    second: Compared,
    begin: int,
    end: int,
    *,
    stride: int = DEFAULT_STRIDE,
    end_of_steps: int | None = None,
) -> Comparison:
    """Compare the samples of two runs at positions ``begin`` to ``end - 1``, and their steps.

    Samples are compared by the receipts of blocks of ``stride`` positions, and in the first block
    that differs one by one. Steps are compared up to ``end_of_steps``, by default ``end``. Without
    it, a source that one run has behind those of the other differs only if it is drawn.

    Raises:
        OutOfRange: a run has fewer positions.
    """
    where = _first_block(first, second, begin, end, stride)
    samples = () if where is None else tuple(_causes(first, second, where, begin, end))
    last = end if end_of_steps is None else end_of_steps
    later = set[int]() if end_of_steps is not None else undrawn(first, second, begin, end)
    pairs = zip_longest(first.fingerprints, second.fingerprints, fillvalue="nothing")
    sources = (
        apart(f"fingerprint of source {n}", *pair) for n, pair in enumerate(pairs) if n not in later
    )
    return Comparison(
        begin=begin,
        end=end,
        where=where,
        sources=tuple(text for texts in sources for text in texts),
        samples=samples,
        steps=tuple(other_steps(first, second, last)),
    )


def undrawn(first: Compared, second: Compared, begin: int, end: int) -> set[int]:
    """Return the sources that one run alone has, and does not draw at the positions."""
    longer = max(first, second, key=lambda each: len(each.fingerprints))
    both, count = (f(len(each.fingerprints) for each in (first, second)) for f in (min, max))
    if both == count:
        return set()
    drawn = source_counts(longer.index, begin, end, count)
    return {n for n in range(both, count) if not drawn[n]}


def _first_block(
    first: Compared, second: Compared, begin: int, end: int, stride: int
) -> tuple[int, int] | None:
    """Return the positions of the first block with other samples, or None."""
    if first.index is second.index and list(first.fingerprints) == list(second.fingerprints):
        return None
    ours, theirs = (
        planned_block_receipts(each.index, begin, end, each.keys, stride=stride)
        for each in (first, second)
    )
    return ours.first_difference(theirs)


def _causes(
    first: Compared, second: Compared, where: tuple[int, int], begin: int, end: int
) -> Iterator[str]:
    """Yield the causes of other samples in a block of the positions from ``begin`` to ``end``."""
    joined = (getattr(each.index, "first_position", 0) for each in (first, second))
    stop = min(end, where[1])
    at = min(stop, max(begin, where[0], *joined))
    sample = explain(first.index, second.index, at, stop, first.keys, second.keys)
    changed = first_changed_mix(first, second, end)
    if changed is not None and changed >= begin:
        yield mix_difference(first, second, changed)
    if sample is not None:
        yield str(sample)
    if sample is None or changed is None or sample.position < changed:
        ours, theirs = first.description, second.description
        kinds = [{"order": each.get("order")} for each in (ours, theirs)]
        pair = (ours, theirs) if kinds[0] == kinds[1] else kinds
        for place, one, other in differences(*pair):
            yield from apart(f"order: {place}", one, other)


def first_changed_mix(first: Compared, second: Compared, end: int) -> int | None:
    """Return the first sample before ``end`` at which the weights change differently, or None."""
    either = first.mix or second.mix
    if either is None or first.step_bounds is None or second.step_bounds is None:
        return None  # the changes of an index that is given are not known
    empty = MixChanges.empty(either.sources)
    return (first.mix or empty).first_difference(second.mix or empty, end)


def mix_difference(first: Compared, second: Compared, sample: int) -> str:
    """Return the weights that a sample is drawn with by each run."""
    assert first.step_bounds is not None, "of known changes"
    step = int(np.searchsorted(first.step_bounds, sample, "right")) - 1
    texts = []
    for each in (first, second):
        weights = None if each.mix is None else each.mix.weights_from(sample)
        shares = (f"{name} {share:.6g}" for name, share in (weights or {}).items())
        texts.append("no change" if weights is None else ", ".join(shares))
    where = f"mix at step {step} (sample {sample})"
    return f"{where}: {texts[0]} in the first, {texts[1]} in the second"


def other_steps(first: Compared, second: Compared, end: int) -> Iterator[str]:
    """Yield the first step before a position that differs, if the steps of both are known."""
    if first.step_bounds is None or second.step_bounds is None:
        return
    ours, theirs = (
        bounds[: np.searchsorted(bounds, end)] for bounds in (first.step_bounds, second.step_bounds)
    )
    size = min(ours.size, theirs.size)
    differing = np.flatnonzero(ours[:size] != theirs[:size])
    if differing.size:
        step = int(differing[0])
        yield from apart(f"samples before step {step}", int(ours[step]), int(theirs[step]))
    else:
        yield from apart("number of steps", ours.size - 1, theirs.size - 1)


class OtherReceipt(NamedTuple):
    """Steps of a subset whose samples are others than those of an index."""

    first_step: int
    last_step: int
    theirs: str
    """Receipt that the subset states."""
    ours: str
    """Receipt of the samples of the index."""


def compare_receipts(
    subset: Mapping[str, Any], index: Index, keys: U64
) -> tuple[Receipt, OtherReceipt | None]:
    """Return the receipt of all samples of an index that a subset serves, and the first block of
    steps of which the subset states another; None without any."""
    bounds, size = step_bounds_of(subset), subset["receipts"]["block_steps"]
    found = receipts_between(index, block_bounds(bounds, size), keys)
    pairs = zip_longest(subset["receipts"]["blocks"], map(str, found))
    first = first_step(bounds)
    others = (
        OtherReceipt(begin, begin + size - 1, *pair)
        for begin, pair in zip(count(first, size), pairs, strict=False)
        if pair[0] != pair[1]
    )
    return sum(found, Receipt()), next(others, None)


def apart(what: str, first: object, second: object) -> Iterator[str]:
    """Yield the description of two values, if they differ."""
    if first != second:
        yield f"{what}: {shown(first)} in the first, {shown(second)} in the second"
