"""Extension of an index beyond its planned end.

The consumed samples stay as they are. The unserved samples of the old index follow, those with the
least-seen tokens first: for a GPT-NeoX run that stopped after one epoch of two epochs shuffled
together, the quarter of the tokens not seen yet. Then follow whole epochs, each built by the order
of the run with a derived seed, so that a longer extension begins with a shorter one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.index.spans import (
    Index,
    Spans,
    locate_range,
    separates_documents,
)
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.kernels import active
from megaindex.validation import check_between, check_integer, check_setting


def extend_index(
    old: Index,
    *,
    consumed_samples: int,
    more_samples: int,
    seed: int,
    further: Callable[[int], Index],
) -> StretchedIndex:
    """Return ``old`` up to ``consumed_samples``, extended by ``more_samples``.

    Args:
        old: index of the run so far, of any order.
        consumed_samples: samples served so far, 0 to ``old.num_samples``.
        more_samples: samples to add, at least 1.
        seed: of the old run, from which the seeds of further epochs are derived.
        further: function that builds one whole epoch with a seed; called only if the old index does
            not have enough samples.

    Raises:
        InvalidArgument: a number is out of range, or a further epoch does not match the old index.
    """
    consumed_samples = check_integer("consumed_samples", consumed_samples)
    more_samples = check_setting("more_samples", more_samples)
    seed = check_setting("seed", seed)
    check_extension("the old index", old.num_samples, consumed_samples, more_samples)
    left = min(more_samples, old.num_samples - consumed_samples)
    begun = least_seen_index(old, consumed_samples, left)
    stretches = [Stretch(index=begun, samples=range(consumed_samples + left))]
    seeds: list[int] = []
    missing = more_samples - left
    while missing > 0:
        seeds.append(derived_seed(seed, old.num_samples, len(seeds)))
        epoch = further(seeds[-1])
        _check_fits(epoch, old)
        if epoch.num_samples < 1:
            raise InvalidArgument("a further epoch must have at least 1 sample; use more documents")
        samples = range(min(missing, epoch.num_samples))
        passes = stretches[-1].first_passes + stretches[-1].index.num_epochs
        stretches.append(Stretch(index=epoch, samples=samples, first_passes=passes))
        missing -= epoch.num_samples
    return StretchedIndex(stretches=tuple(stretches), further_seeds=tuple(seeds))


def least_seen_index(index: Index, consumed_samples: int, count: int) -> Index:
    """Return the index with ``count`` samples after the consumed ones, least-seen tokens first;
    itself if they come in its order, as in one epoch."""
    order = least_seen_samples(index, consumed_samples, count)
    if (order == np.arange(consumed_samples, consumed_samples + count)).all():
        return index
    return StretchedIndex(
        stretches=(
            Stretch(index=index, samples=range(consumed_samples)),
            Stretch(index=index, samples=order),
        ),
        least_seen=consumed_samples,
    )


def derived_seed(seed: int, num_samples: int, epoch: int) -> int:
    """Return the seed of a further epoch, 0 to 2**32 - 1."""
    return xxhash.xxh3_64_intdigest(f"extend {seed} {num_samples} {epoch}".encode()) % 2**32


def check_extension(what: str, num_samples: int, consumed_samples: int, more_samples: int) -> None:
    """Raise InvalidArgument unless the numbers are an extension of ``what``."""
    end = f"the samples of {what}"
    check_between("consumed_samples", consumed_samples, 0, num_samples, most_is=end)
    check_setting("more_samples", more_samples)


def least_seen_samples(index: Index, consumed_samples: int, count: int) -> I64:
    """Return ``count`` sample ids from ``consumed_samples`` on, least-seen tokens first, int64.

    Each step chooses the sample whose input tokens were served least often by the consumed samples
    and the steps before; ties go to the first in the old order. Memory is proportional to the spans
    of the index, not to its tokens.
    """
    spans = locate_range(index, 0, index.num_samples)
    if all(separates_documents(index)):
        length = spans.input_lengths(index.sequence_length)
    else:
        # Orders of running jobs depend on this: also a shorter last sample loses its last token.
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
    """Return how many tokens samples 0 to ``end - 1`` serve ``[never, once, twice, ...]``."""
    spans = locate_range(index, 0, end)
    runs = _Segments.of(spans, spans.input_lengths(index.sequence_length))
    counts = runs.counts(runs.begins.size)
    tokens = np.zeros(int(counts.max(initial=0)) + 1, np.int64)
    np.add.at(tokens, counts, runs.widths)
    tokens[0] = index.tokens_per_epoch - int(tokens[1:].sum())
    return [int(number) for number in tokens]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Segments:
    """Spans as ranges of segments, each segment inside or outside every span.

    Spans 0-10 and 4-20 of one sequence give the segments 0-4, 4-10 and 10-20.
    """

    begins: I64
    ends: I64
    widths: I64
    """Tokens of each segment; a segment between two sequences is in no span."""

    @classmethod
    def of(cls, spans: Spans, length: I64) -> _Segments:
        """Return the segments of the first ``length`` tokens of each span."""
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
        """Return int64[segments]: the number of the first ``runs`` spans that cover each."""
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
                f"a further epoch must have {name} {ours}, as the old index, got {theirs}; build "
                "it from the same documents with the same settings"
            )
