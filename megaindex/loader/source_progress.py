"""Progress of a run by source and by stage."""

from __future__ import annotations

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
    """samples × sequence_length, the padding of instruction data included."""
    epochs: float
    """Samples served over samples of one epoch of the source."""


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
        number, within = self._place(consumed_samples)
        counts = self._before[number].copy()
        if within:
            counts += self._plan.stages[number].mixed.drawn(within, counts.size)
        return self._rows(counts)

    def stages(self, consumed_samples: int) -> dict[str, list[ProgressRow]]:
        """Return the rows of every stage that has begun, by the name of the stage.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        number, within = self._place(consumed_samples)
        counts: dict[str, I64] = {}
        for k, stage in enumerate(self._plan.stages[: number + (within > 0)]):
            drawn = self._before[k + 1] - self._before[k]
            if k == number:
                drawn = stage.mixed.drawn(within, drawn.size)
            counts[stage.name] = counts.get(stage.name, 0) + drawn
        return {name: self._rows(drawn) for name, drawn in counts.items()}

    def _place(self, consumed: int) -> tuple[int, int]:
        """Return the number of the current stage, and the samples it has served."""
        consumed = check_integer("consumed_samples", consumed)
        if not 0 <= consumed <= self._plan.num_samples:
            raise OutOfRange(
                f"consumed_samples must be from 0 to {self._plan.num_samples}, the samples of the "
                f"run, got {consumed}"
            )
        for number, stage in enumerate(self._plan.stages):
            if consumed < stage.first_sample + stage.num_samples:
                return number, consumed - stage.first_sample
        return len(self._plan.stages), 0

    def _rows(self, counts: I64) -> list[ProgressRow]:
        recipe = self._plan.recipe
        return [
            ProgressRow(
                source=source.name,
                samples=count,
                tokens=count * recipe.sequence_length,
                epochs=count / size.samples,
            )
            for source, size, count in zip(
                recipe.sources, self._plan.sizes, counts.tolist(), strict=True
            )
        ]
