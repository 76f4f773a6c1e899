"""A recipe laid out: what every stretch of the run draws from which source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaindex.index.mixing import Mixing
from megaindex.index.staged import MixedStage
from megaindex.recipe.evaluation import Rounds
from megaindex.recipe.model import Recipe
from megaindex.recipe.streams import SourceSize


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stretch of the run in which the mixture does not change."""

    name: str
    first_sample: int
    mixed: MixedStage
    without: tuple[str, ...] = ()
    """Sources of the stage that were exhausted before it began."""

    @property
    def num_samples(self) -> int:
        return self.mixed.num_samples

    @property
    def mixing(self) -> Mixing:
        return self.mixed.mixing

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples that each of its streams gives."""
        return tuple(int(count) for count in self.mixing.counts(self.num_samples))

    def shortened(self, num_samples: int) -> PlannedStage:
        """Its first samples."""
        return replace(self, mixed=replace(self.mixed, num_samples=num_samples))


@dataclass(frozen=True, kw_only=True)
class StageEnd:
    """Samples that a stage of the recipe was to have, and those it has in whole batches."""

    stage: str
    length: str
    """As the recipe says it, such as ``epochs: 1``."""
    wanted: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Itinerary:
    """The run from its first sample to its last."""

    recipe: Recipe
    sizes: tuple[SourceSize, ...]
    """One epoch of each source."""
    stages: tuple[PlannedStage, ...]
    num_steps: int
    samples_masked: int = 0
    """Rows of the last batch that are padding without loss, under tail pad."""
    evaluation: Rounds | None = None
    validation: SourceSize | None = None
    """One epoch of the source of the evaluations."""
    ends: tuple[StageEnd, ...] = ()
    """Of the stages that were reached to their end."""
    stopped_by: str = ""
    """The source that ends the run early, where exhaustion stops it."""

    @property
    def num_samples(self) -> int:
        """Samples that are served, on all ranks together."""
        return sum(stage.num_samples for stage in self.stages)

    def drawn(self) -> list[int]:
        """Samples of each source that the run draws."""
        total = [0] * len(self.sizes)
        for stage in self.stages:
            for source, count in zip(stage.mixed.sources, stage.counts, strict=True):
                total[source] += count
        return total

    def reads_to(self) -> list[int]:
        """One past the last sample of each source that the run reads, 0 where it reads none."""
        ends = [0] * len(self.sizes)
        for stage in self.stages:
            mixed = stage.mixed
            for source, begin, count in zip(mixed.sources, mixed.begins, stage.counts, strict=True):
                ends[source] = max(ends[source], begin + count)
        return ends


def first_samples(stages: Sequence[PlannedStage], end: int) -> tuple[PlannedStage, ...]:
    """The stages as far as sample ``end`` of the run."""
    return tuple(
        stage.shortened(min(stage.num_samples, end - stage.first_sample))
        for stage in stages
        if stage.first_sample < end
    )
