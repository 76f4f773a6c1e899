"""Changes of a run in progress, and what every change of its weights may repeat.

The samples served stay, and the sources are read on from there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.mixing import ChangedMixing, FixedMixing, PerStream
from megaindex.index.orders.packed import most_documents
from megaindex.recipe.layout import PlannedStage, RecipeLayout, first_samples
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage
from megaindex.settings.run_settings import Target
from megaindex.validation import check_integer


def amend(
    layout: RecipeLayout,
    *,
    consumed_samples: int,
    stages: Sequence[RecipeStage],
    sources: Sequence[RecipeSource] = (),
) -> Recipe:
    """Return the recipe with its stages up to ``consumed_samples``, and other stages from there on.

    The current stage ends with the last step made. The new stages begin their draws anew and read
    each source on from its position, so that no sample is repeated or lost.

    Args:
        layout: the run as planned, from `megaindex.recipe.plan_recipe`.
        consumed_samples: samples served on all ranks together; the end of a step.
        stages: the stages that follow.
        sources: sources that only the new stages read.

    Raises:
        InvalidArgument: ``consumed_samples`` is not the end of a step of the run, ``stages`` is
            empty, or a name is used twice.
    """
    consumed_samples = check_integer("consumed_samples", consumed_samples)
    recipe, batch = layout.recipe, layout.batch
    steps = batch.iterations_within(consumed_samples)
    beyond = not recipe.first_sample <= consumed_samples <= layout.end_sample
    if beyond or batch.samples_after(steps) != consumed_samples:
        raise InvalidArgument(
            f"consumed_samples {consumed_samples} is not the end of a step of the run, which has "
            f"{layout.end_sample} samples; {steps} steps consume {batch.samples_after(steps)}"
        )
    kept = [
        _as_far_as(stage, layout, consumed_samples)
        for stage in recipe.stages
        if _first_sample(layout, stage.name) < consumed_samples
    ]
    if not stages:
        raise InvalidArgument("stages is empty; give at least one stage that follows")
    first, *rest = stages
    changes = recipe.mix_changes
    return replace(
        recipe,
        mix_changes=None if changes is None else changes.before(consumed_samples),
        sources=(*_with_blocks(layout), *sources),
        stages=(*kept, replace(first, first_step=steps), *rest),
    )


def _with_blocks(layout: RecipeLayout) -> list[RecipeSource]:
    """Return the sources with the blocks that they are read in, whatever the lengths to come."""
    return [
        source
        if size.blocks is None
        else replace(source, order="blocks", block_tokens=size.blocks.blocks.block_tokens)
        for source, size in zip(layout.recipe.sources, layout.sizes, strict=True)
    ]


def check_past(old: RecipeLayout, new: RecipeLayout, consumed_samples: int) -> None:
    """Check that two layouts serve the same samples before ``consumed_samples``.

    Sources are compared by the names that they are shuffled by, not by those in the recipes.

    Args:
        old: the run so far, from `megaindex.recipe.plan_recipe`.
        new: the changed run.
        consumed_samples: samples served so far, on all ranks together.

    Raises:
        InvalidArgument: they do not; the message names the first stage that differs.
    """
    _check_mix(old, new, consumed_samples)
    ours, theirs = (first_samples(plan.stages, consumed_samples) for plan in (old, new))
    for a, b in zip(ours, theirs, strict=False):
        if a.sequence_length == b.sequence_length:
            _check_order(a, old, new)
        if _facts(a, old) != _facts(b, new):
            raise InvalidArgument(
                f"stage {a.name}: the new recipe serves other samples than the run before sample "
                f"{consumed_samples}; keep its streams, limits, seed, batching and shuffle names, "
                "and change the stages after it (see amend)"
            )
    if len(ours) != len(theirs):
        raise InvalidArgument(
            f"the new recipe has {len(theirs)} stages before sample {consumed_samples}, the run "
            f"had {len(ours)}; keep those stages"
        )


def _check_order(stage: PlannedStage, old: RecipeLayout, new: RecipeLayout) -> None:
    """Refuse that a source which a stage has read in order epoch is read in blocks."""
    names = dict(zip(new.shuffle_names, new.recipe.sources, strict=True))
    for number in stage.mixed.sources:
        source, other = old.recipe.sources[number], names.get(old.shuffle_names[number])
        order = old.recipe.order_of(source)
        if order == "epoch" and other is not None and new.recipe.order_of(other) == "blocks":
            raise InvalidArgument(
                f"source {source.name}: stage {stage.name} read it in order epoch, whose unread "
                "samples lie scattered over the epoch, so stages of another sequence_length cannot "
                "follow; begin such runs with order: blocks, or give the new stages sources of "
                "their own"
            )


def _check_mix(old: RecipeLayout, new: RecipeLayout, consumed_samples: int) -> None:
    """Check that two runs change the mix in the same way before ``consumed_samples``."""
    ours, theirs = map(_mix_changes, (old, new))
    sample = ours.first_difference(theirs, consumed_samples)
    if sample is not None:
        raise InvalidArgument(
            f"mix_changes: the new recipe has other changes of the mix than the run, first at step "
            f"{old.batch.iterations_within(sample)} (sample {sample}); keep those before sample "
            f"{consumed_samples}, as in the checkpoint"
        )


def _mix_changes(layout: RecipeLayout) -> MixChanges:
    """Return the changes of the mix, with sources by the names that they are shuffled by; those
    that share one by their own names too."""
    names = [source.name for source in layout.recipe.sources]
    changes = layout.recipe.mix_changes or MixChanges.empty(names)
    shuffles = layout.shuffle_names
    times = Counter(shuffles)
    keys = {
        name: shuffle if times[shuffle] == 1 else f"{shuffle} {name}"
        for name, shuffle in zip(names, shuffles, strict=True)
    }
    return replace(changes, sources=tuple(keys[name] for name in changes.sources))


def _first_sample(layout: RecipeLayout, name: str) -> int:
    """Return the first sample of a stage; the end of the run if the stage was not reached."""
    begins = [stage.first_sample for stage in layout.stages if stage.name == name]
    return min(begins, default=layout.end_sample)


def _as_far_as(stage: RecipeStage, layout: RecipeLayout, end: int) -> RecipeStage:
    """Return the stage, shortened to its steps before sample ``end``."""
    batch, first = layout.batch, _first_sample(layout, stage.name)
    length = sum(piece.num_samples for piece in layout.stages if piece.name == stage.name)
    steps = batch.iterations_within(min(end, first + length), first)
    kept = replace(stage, length=Target(kind="iterations", value=Fraction(steps)))
    if end < first + length and layout.recipe.exhaustion == "redistribute":
        # its shares were lowered for its whole length
        return replace(kept, planned_samples=stage.planned_samples or length)
    return kept


def _facts(stage: PlannedStage, plan: RecipeLayout) -> tuple[Any, ...]:
    """Return everything that decides the samples of a stage, sources by the names that they are
    shuffled by, not by number.

    Changes of its mix are compared apart.
    """
    mixed, recipe, mixing = stage.mixed, plan.recipe, stage.mixing
    streams: Sequence[int] = range(len(mixed.sources))
    first: FixedMixing | None
    if isinstance(mixing, ChangedMixing):
        first, streams = mixing.first, mixing.streams_before(mixed.num_samples)
        unit = mixing.table.unit
    else:
        assert isinstance(mixing, FixedMixing), "of one of two kinds"
        first, unit = mixing, mixing.unit
    numbers = [mixed.sources[stream] for stream in streams]
    names, shuffles = plan.shuffle_names, []
    for number in numbers:
        s = recipe.sources[number]
        most = None  # documents of a sample, whether given or the default
        if s.order == "packed":
            most = most_documents(s.max_documents, stage.sequence_length)
        shuffles.append(
            (names[number], s.kind, recipe.order_of(s), s.packed, s.long_documents, s.align, most)
        )
    drawn = [plan.size_at(number, stage.sequence_length) for number in numbers]
    sizes = [size.samples for size in drawn]
    blocks = [size.blocks and size.blocks.blocks.block_tokens for size in drawn]
    begins = [mixed.begins[stream] for stream in streams]
    facts = (first and _mixing_facts(first), unit, shuffles, sizes, blocks, begins)
    return (*facts, recipe.seed, stage.sequence_length, mixed.num_samples)


def _mixing_facts(mixing: FixedMixing) -> tuple[Any, ...]:
    found = {f.name: getattr(mixing, f.name) for f in fields(mixing)}
    unit = math.gcd(*mixing.shares)  # 4:2 draws what 2:1 draws
    found["shares"] = [share // unit for share in mixing.shares]
    return type(mixing), found


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
class _DrawLimit:
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
) -> Iterator[_DrawLimit]:
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
                yield _DrawLimit(
                    first=first,
                    samples=stop - first,
                    restarts=restarts and first == planned.first_sample,
                    planned=planned,
                    stream=stream,
                    share=most,
                    slack=slack,
                )


def _first(draws: Iterator[_DrawLimit], layout: RecipeLayout, source: int) -> int | None:
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
