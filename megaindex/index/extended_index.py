"""An index that goes on after its planned end, with its past as it was.

The samples already consumed are pinned. Then come the samples of the old index that were not
served, those whose tokens have been seen least often first: of a GPT-NeoX run that stopped after
one epoch's worth of two epochs shuffled together, the quarter of the tokens it never saw. Then
whole epochs, each built by the order of the run with a seed of its own, so that a longer extension
begins with a shorter one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.index.spans import (
    CHUNK,
    Chunks,
    Index,
    Spans,
    check_sample_ids,
    in_order,
    joined,
    share,
    walk,
)
from megaindex.kernels import active
from megaindex.validation import check_between, check_integer, check_setting


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """Samples of one index, in the order in which they are served."""

    index: Index
    samples: range | I64
    """Ids in ``index``."""

    def locate(self, places: I64) -> Spans:
        """Locate the samples at these places of the stage."""
        if isinstance(self.samples, range):
            return self.index.locate(places + self.samples.start)
        return self.index.locate(self.samples[places])

    def walk(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        """Iterate over places begin ... end - 1 of the stage, and the spans there."""
        if isinstance(self.samples, range):
            shift = self.samples.start
            for positions, spans in walk(self.index, begin + shift, end + shift, part, parts):
                yield positions - shift, spans
        else:
            first, stop = share(begin, end, part, parts)
            for start in range(first, stop, CHUNK):
                places = np.arange(start, min(stop, start + CHUNK))
                yield places, self.locate(places)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendedIndex:
    """Stages served one after the other: the pinned past, what it left out, further epochs."""

    stages: tuple[Stage, ...]
    further_seeds: tuple[int, ...] = ()
    """Of the further epochs, one each."""

    @property
    def num_samples(self) -> int:
        return sum(len(stage.samples) for stage in self.stages)

    @property
    def num_epochs(self) -> int:
        return self.stages[0].index.num_epochs + len(self.further_seeds)

    @property
    def tokens_per_epoch(self) -> int:
        return self.stages[0].index.tokens_per_epoch

    @property
    def sequence_length(self) -> int:
        return self.stages[0].index.sequence_length

    @property
    def add_extra_token(self) -> int:
        return self.stages[0].index.add_extra_token

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        ends = np.cumsum([len(stage.samples) for stage in self.stages])
        which = np.searchsorted(ends, ids, side="right")
        pieces = []
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            stage = self.stages[number]
            pieces.append((places, stage.locate(ids[places] - (ends[number] - len(stage.samples)))))
        return joined(pieces, ids.size)

    def walk(self, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
        """See `megaindex.index.spans.walk`."""
        first = 0
        for stage in self.stages:
            low, high = max(begin - first, 0), min(end - first, len(stage.samples))
            if low < high:
                for places, spans in stage.walk(low, high, part, parts):
                    yield places + first, spans
            first += len(stage.samples)


def extend_index(
    old: Index,
    *,
    consumed_samples: int,
    more_samples: int,
    seed: int,
    further: Callable[[int], Index],
) -> ExtendedIndex:
    """``old`` up to ``consumed_samples``, and ``more_samples`` after that.

    Args:
        old: the index the run has used, of any order.
        consumed_samples: samples it was served, 0 ... old.num_samples.
        more_samples: samples to serve beyond them, at least 1.
        seed: of the old run; the seeds of further epochs derive from it.
        further: gives an index of one whole epoch for a seed; called only if the old index does
            not hold enough samples.

    Raises:
        InvalidArgument: a number is out of range, or a further epoch does not fit the old index.
    """
    consumed_samples = check_integer("consumed_samples", consumed_samples)
    more_samples = check_setting("more_samples", more_samples)
    seed = check_setting("seed", seed)
    check_extension("the old index", old.num_samples, consumed_samples, more_samples)
    left = min(more_samples, old.num_samples - consumed_samples)
    stages = [
        Stage(index=old, samples=range(consumed_samples)),
        Stage(index=old, samples=least_seen_samples(old, consumed_samples, left)),
    ]
    seeds: list[int] = []
    missing = more_samples - left
    while missing > 0:
        seeds.append(derived_seed(seed, old.num_samples, len(seeds)))
        epoch = further(seeds[-1])
        _check_fits(epoch, old)
        if epoch.num_samples < 1:
            raise InvalidArgument("a further epoch holds no sample; build it from more documents")
        stages.append(Stage(index=epoch, samples=range(min(missing, epoch.num_samples))))
        missing -= epoch.num_samples
    return ExtendedIndex(stages=tuple(stages), further_seeds=tuple(seeds))


def derived_seed(seed: int, num_samples: int, epoch: int) -> int:
    """Return the seed of a further epoch after an index of ``num_samples``, 0 ... 2**32 - 1."""
    return xxhash.xxh3_64_intdigest(f"extend {seed} {num_samples} {epoch}".encode()) % 2**32


def check_extension(what: str, num_samples: int, consumed_samples: int, more_samples: int) -> None:
    """Refuse a place outside ``what`` is extended, or no further samples."""
    end = f"the samples of {what}"
    check_between("consumed_samples", consumed_samples, 0, num_samples, most_is=end)
    check_setting("more_samples", more_samples)


def least_seen_samples(index: Index, consumed_samples: int, count: int) -> I64:
    """``count`` of the samples from ``consumed_samples`` on, least-seen tokens first, int64[count].

    At each step the sample whose tokens (without the label's) have been served least often so far,
    by the samples before ``consumed_samples`` and by the steps before; of equals the first in the
    old order. Memory grows with the runs of the whole index, not with its tokens.
    """
    spans = in_order(index, 0, index.num_samples)
    # The order of a run under way: also where a shorter last sample feeds this token as input.
    length = spans.length.copy()
    length[spans.row_splits[1:] - 1] -= index.add_extra_token
    runs = _Segments.of(spans, length)
    first = int(spans.row_splits[consumed_samples])
    counts = runs.counts(first)
    splits = spans.row_splits[consumed_samples:] - first
    begins, ends = runs.begins[first:], runs.ends[first:]
    order = active().least_seen(begins, ends, splits, runs.widths, counts, count)
    return order + consumed_samples


def times_served(index: Index, end: int) -> list[int]:
    """Tokens by how often samples 0 ... end - 1 serve them: ``[never, once, twice, ...]``."""
    spans = in_order(index, 0, end)
    runs = _Segments.of(spans, spans.input_lengths(index.sequence_length))
    counts = runs.counts(runs.begins.size)
    tokens = np.zeros(int(counts.max(initial=0)) + 1, np.int64)
    np.add.at(tokens, counts, runs.widths)
    tokens[0] = index.tokens_per_epoch - int(tokens[1:].sum())
    return [int(number) for number in tokens]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Segments:
    """Runs as ranges of segments, which every run covers as a whole or not at all.

    Runs 0-10 and 4-20 of one sequence make the segments 0-4, 4-10 and 10-20.
    """

    begins: I64
    ends: I64
    widths: I64
    """Tokens; between two sequences a segment that no run covers."""

    @classmethod
    def of(cls, spans: Spans, length: I64) -> _Segments:
        """Return the first ``length`` tokens of each run."""
        _, sequence = np.unique(
            spans.source.astype(np.int64) * (spans.document.max(initial=0) + 1) + spans.document,
            return_inverse=True,
        )
        stop = spans.offset + length
        start_of_sequence = sequence * (stop.max(initial=0) + 1)
        begins, ends = start_of_sequence + spans.offset, start_of_sequence + stop
        bounds = np.unique(np.concatenate((begins, ends)))
        return cls(
            begins=np.searchsorted(bounds, begins),
            ends=np.searchsorted(bounds, ends),
            widths=np.diff(bounds),
        )

    def counts(self, runs: int) -> I64:
        """int64[segments]: how many of the first ``runs`` runs cover each."""
        steps = np.zeros(self.widths.size + 1, np.int64)
        np.add.at(steps, self.begins[:runs], 1)
        np.add.at(steps, self.ends[:runs], -1)
        return np.cumsum(steps)[:-1]


def _check_fits(epoch: Index, old: Index) -> None:
    for name in ("sequence_length", "add_extra_token", "tokens_per_epoch"):
        theirs: Any = getattr(epoch, name)
        ours: Any = getattr(old, name)
        if theirs != ours:
            raise InvalidArgument(
                f"a further epoch has {name} {theirs}, the old index {ours}; build it from the "
                "same documents with the same settings"
            )
