"""Earliest steps at which sources can repeat, whatever mixes a run is given."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from megaindex.index.mixing import PerStream
from megaindex.recipe.layout import PlannedStage, RecipeLayout


@dataclass(frozen=True, kw_only=True)
class EarliestRepeat:
    """The earliest step at which a source can repeat under any mix within its bounds.

    Attributes:
        source: its name.
        least: least share that changed weights may give it.
        most: greatest share, also by the least shares of the others.
        first_step: first step, from 0, that can serve one of its samples again; None if none in
            the run can.
        planned_step: first step that does so by the plan; None if none does.
    """

    source: str
    least: float
    most: float
    first_step: int | None
    planned_step: int | None


def earliest_repeats(layout: RecipeLayout, consumed_samples: int = 0) -> list[EarliestRepeat]:
    """Return the earliest repeat of each source under any mix from ``consumed_samples`` on.

    Changed weights are exact to a sample for each stream, which the bound allows for; it is exact
    for a source that may be drawn alone. Stages by repeat and choose, or with batches of several
    sizes, keep their draws. Where stages differ in sequence length, the weights of a stage are
    those of its own sources, and more draws at one length never lead to an earlier block at the
    next.
    """
    recipe = layout.recipe
    bounds = {name: (low, high) for name, low, high in recipe.mix_bounds}
    lows = sum((low for low, _ in bounds.values()), Fraction(0))

    def first_step(number: int, share: Fraction | None, consumed: int) -> int | None:
        position = _first(_draws(layout, number, share, consumed), layout, number)
        return None if position is None else layout.batch.iterations_within(position)

    found = []
    for number, source in enumerate(recipe.sources):
        least, high = bounds.get(source.name, (Fraction(0), Fraction(1)))
        most = min(high, 1 - (lows - least))  # the others have at least their lows
        found.append(
            EarliestRepeat(
                source=source.name,
                least=float(least),
                most=float(most),
                first_step=first_step(number, most, consumed_samples),
                planned_step=first_step(number, None, 0),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _Draws:
    """The most draws from a source in a range of positions."""

    first: int
    samples: int
    restarts: bool
    planned: PlannedStage
    """The part of a stage that lies there, with its draws."""
    stream: int | None
    """Stream of the source in it; None if it does not draw from the source."""
    share: Fraction | None
    """Greatest share of changed weights; None where the weights stay."""
    slack: Fraction = Fraction(0)

    def most(self, samples: int) -> int:
        """Return the most draws in the first ``samples`` positions."""
        own = 0
        if self.stream is not None:
            begin = self.first - self.planned.first_sample
            counts = (self.planned.mixing.counts(n)[self.stream] for n in (begin, begin + samples))
            low, high = map(int, counts)
            own = high - low
        if self.share is None:
            return own
        return min(samples, max(own, int(self.share * samples + self.slack)))


def _draws(
    layout: RecipeLayout, source: int, share: Fraction | None, consumed: int
) -> Iterator[_Draws]:
    """Yield the draws from a source, stage by stage; before ``consumed`` they are known."""
    recipe = layout.recipe
    stages = {stage.name: stage for stage in recipe.stages}
    name, begun = recipe.sources[source].name, ""
    slack = Fraction(0 if share == 1 else 1) + (share or 0) * len(recipe.sources) * (share != 1)
    for planned in layout.stages:
        stage = stages[planned.name]
        restarts = planned.name != begun and any(
            stream.restart for stream in stage.streams if stream.source == name
        )
        begun = planned.name
        sources = planned.mixed.sources
        stream = sources.index(source) if source in sources else None
        end = planned.first_sample + planned.num_samples
        known = min(max(consumed, planned.first_sample), end)
        fixed = isinstance(planned.mixing, PerStream) and planned.mixing.batch_size is None
        fixed = fixed or not stage.by_proportion or recipe.exhaustion == "redistribute"
        fixed = fixed or (recipe.has_lengths and name not in {s.source for s in stage.streams})
        free = None if fixed else share
        for first, stop, most in ((planned.first_sample, known, None), (known, end, free)):
            if first < stop:
                yield _Draws(
                    first=first,
                    samples=stop - first,
                    restarts=restarts and first == planned.first_sample,
                    planned=planned,
                    stream=stream,
                    share=most,
                    slack=slack,
                )


def _first(draws: Iterator[_Draws], layout: RecipeLayout, source: int) -> int | None:
    """Return the first position that can serve a sample of the source again."""
    recipe, size = layout.recipe, layout.sizes[source]
    name = recipe.sources[source].name
    restarts = any(stream.restart for stage in recipe.stages for stream in stage.streams)
    allowed = int(size.samples * recipe.sources[source].most_epochs)
    if recipe.exhaustion != "repeat" and allowed <= size.samples and not restarts:
        return None
    stages = {stage.name: {stream.source for stream in stage.streams} for stage in recipe.stages}
    read, length = layout.begins[source], recipe.lengths_of(name)[0]
    reached = read > 0
    for part in draws:
        at = part.planned.sequence_length
        if size.blocks is not None and at != length and name in stages[part.planned.name]:
            read, _ = size.blocks.at_length(length).next_block(read, at)
            length = at
        epoch = size.at_length(length).samples
        if part.restarts:
            read = epoch if reached else 0  # its first sample was served before
        left, most_drawn = max(0, epoch - read), part.most(part.samples)
        if most_drawn > left:
            # draws rise with samples: the last position of the fewest that need more than is left
            return part.first + bisect_right(range(part.samples), left, key=part.most) - 1
        read += most_drawn
        reached = reached or most_drawn > 0
    return None
