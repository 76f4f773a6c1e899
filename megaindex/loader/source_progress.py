"""Progress of a run by source and by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaindex._types import I64
from megaindex.errors import OutOfRange
from megaindex.recipe.layout import RecipeLayout
from megaindex.validation import check_integer


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """Samples served from one source."""

    source: str
    samples: int
    tokens: int
    """samples × sequence_length of their stage, the padding of instruction data included."""
    epochs: float
    """Samples served over samples of one epoch of the source, at the length of each."""


class SourceProgress:
    """Samples, tokens and epochs served from each source at any sample of a run.

    Computed from the layout for any past or future sample.

    >>> progress = SourceProgress(opened.layout)
    >>> progress.totals(loader.consumed_samples)      # rows of all sources

    Args:
        layout: layout of the recipe, `OpenRecipe.layout`.
    """

    def __init__(self, layout: RecipeLayout) -> None:
        self._plan = layout
        self._before = np.zeros((len(layout.stages) + 1, len(layout.sizes)), np.int64)
        for number, stage in enumerate(layout.stages):
            drawn = stage.mixed.drawn(stage.num_samples, len(layout.sizes))
            self._before[number + 1] = self._before[number] + drawn

    def totals(self, consumed_samples: int) -> list[ProgressRow]:
        """Return the row of every source, all stages together.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        return self._rows(self._served(consumed_samples), range(len(self._plan.stages)))

    def stages(self, consumed_samples: int) -> dict[str, list[ProgressRow]]:
        """Return the rows of every stage that has begun, by the name of the stage.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        begun: dict[str, list[int]] = {}
        served = self._served(consumed_samples)
        for number, stage in enumerate(self._plan.stages):
            if stage.first_sample < consumed_samples:
                begun.setdefault(stage.name, []).append(number)
        return {name: self._rows(served, numbers) for name, numbers in begun.items()}

    def _served(self, consumed: int) -> I64:
        """Return int64[stages, sources]: samples served before a position, without skipped ones."""
        consumed = check_integer("consumed_samples", consumed)
        skips = self._plan.skips
        end = self._plan.end_sample if skips is None else skips.run_end
        if not 0 <= consumed <= end:
            raise OutOfRange(
                f"consumed_samples must be from 0 to {end}, the samples of the run, got {consumed}"
            )
        if skips is None:
            return self._drawn(0, consumed)
        ranges = [
            *skips.segments(0, min(consumed, skips.end)),
            *skips.moved_ranges(max(0, consumed - skips.end)),
        ]
        return sum((self._drawn(*each) for each in ranges), self._drawn(0, 0))

    def _drawn(self, begin: int, end: int) -> I64:
        """Return int64[stages, sources]: draws of the samples begin ... end - 1 of the order."""
        return self._drawn_before(end) - self._drawn_before(begin)

    def _drawn_before(self, position: int) -> I64:
        counts = np.diff(self._before, axis=0)
        for k, stage in enumerate(self._plan.stages):
            within = position - stage.first_sample
            if within < stage.num_samples:
                counts[k] = stage.mixed.drawn(within, counts.shape[1]) if within > 0 else 0
        return counts

    def _rows(self, served: I64, numbers: Sequence[int]) -> list[ProgressRow]:
        """Return the sums of the stages of these numbers; ``served`` as from `_served`."""
        plan = self._plan
        lengths = [stage.sequence_length for stage in plan.stages]
        totals = {
            length: served[[n for n in numbers if lengths[n] == length]].sum(axis=0).tolist()
            for length in dict.fromkeys(lengths)
        }
        return [
            ProgressRow(
                source=source.name,
                samples=sum(counts[i] for counts in totals.values()),
                tokens=sum(counts[i] * length for length, counts in totals.items()),
                epochs=sum(
                    counts[i] / plan.size_at(i, length).samples
                    for length, counts in totals.items()
                    if counts[i]
                ),
            )
            for i, source in enumerate(plan.recipe.sources)
        ]
