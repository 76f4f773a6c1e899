"""Changes of a run in progress.

The samples served stay, and the sources are read on from there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.mixing import ChangedMixing, FixedMixing
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
                f"{consumed_samples}; keep its streams, limits, seed, batching, subsets and "
                "shuffle names, and change the stages after it (see amend)"
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
    words = [size.words for size in drawn]
    facts = (first and _mixing_facts(first), unit, shuffles, words, sizes, blocks, begins)
    return (*facts, recipe.seed, stage.sequence_length, mixed.num_samples)


def _mixing_facts(mixing: FixedMixing) -> tuple[Any, ...]:
    found = {f.name: getattr(mixing, f.name) for f in fields(mixing)}
    unit = math.gcd(*mixing.shares)  # 4:2 draws what 2:1 draws
    found["shares"] = [share // unit for share in mixing.shares]
    return type(mixing), found
