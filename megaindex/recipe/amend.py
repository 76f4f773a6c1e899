"""Changing a run that is under way: its past stays, its sources read on from where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from megaindex.configs.run import Target
from megaindex.errors import InvalidArgument
from megaindex.recipe.layout import PlannedStage, RecipeLayout, first_samples
from megaindex.recipe.recipe import Recipe, RecipeStage
from megaindex.recipe.source import RecipeSource
from megaindex.validation import check_integer


def amend(
    layout: RecipeLayout,
    *,
    consumed_samples: int,
    stages: Sequence[RecipeStage],
    sources: Sequence[RecipeSource] = (),
) -> Recipe:
    """The recipe up to ``consumed_samples``, and other stages from there on.

    The stage under way ends with the last step made. What comes after draws anew: no stream makes
    up for what it lagged behind before, and each source reads on, so nothing repeats or is lost.

    Args:
        layout: the run as it was planned.
        consumed_samples: samples that all ranks together were served, whole steps.
        stages: what follows.
        sources: sources that are new.

    Raises:
        InvalidArgument: the samples consumed are not whole steps of the run, or names collide.
    """
    consumed_samples = check_integer("consumed_samples", consumed_samples)
    recipe, batch = layout.recipe, layout.recipe.batch
    steps = batch.iterations_within(consumed_samples)
    beyond = consumed_samples > layout.num_samples
    if beyond or batch.samples_after(steps) != consumed_samples:
        raise InvalidArgument(
            f"consumed_samples {consumed_samples} is not the end of a step of the run, which has "
            f"{layout.num_samples} samples; {steps} steps consume {batch.samples_after(steps)}"
        )
    kept = [
        _as_far_as(stage, layout, consumed_samples)
        for stage in recipe.stages
        if _first_sample(layout, stage.name) < consumed_samples
    ]
    if not stages:
        raise InvalidArgument("stages must hold at least one stage: what follows from there on")
    first, *rest = stages
    return replace(
        recipe,
        sources=(*recipe.sources, *sources),
        stages=(*kept, replace(first, first_step=steps), *rest),
    )


def check_past(old: RecipeLayout, new: RecipeLayout, consumed_samples: int) -> None:
    """Refuse a new plan that would have served other samples before ``consumed_samples``.

    Raises:
        InvalidArgument: it would; the message names the stage.
    """
    ours, theirs = (first_samples(plan.stages, consumed_samples) for plan in (old, new))
    for a, b in zip(ours, theirs, strict=False):
        if _facts(a, old) != _facts(b, new):
            raise InvalidArgument(
                f"stage {a.name}: the new recipe serves other samples of it than the run was "
                f"served before sample {consumed_samples}; keep its streams, limits, seed and "
                "batching, and change what comes after (see amend)"
            )
    if len(ours) != len(theirs):
        raise InvalidArgument(
            f"the new recipe has {len(theirs)} stages before sample {consumed_samples}, the run "
            f"had {len(ours)}; keep them"
        )


def _first_sample(layout: RecipeLayout, name: str) -> int:
    """Where a stage begins; beyond the run where it was never reached."""
    begins = [stage.first_sample for stage in layout.stages if stage.name == name]
    return min(begins, default=layout.num_samples)


def _as_far_as(stage: RecipeStage, layout: RecipeLayout, end: int) -> RecipeStage:
    """The stage, ended by its number of steps where the run has not got to its end."""
    batch, first = layout.recipe.batch, _first_sample(layout, stage.name)
    length = sum(piece.num_samples for piece in layout.stages if piece.name == stage.name)
    steps = batch.iterations_within(min(end, first + length), first)
    kept = replace(stage, length=Target(kind="iterations", value=Fraction(steps)))
    if end < first + length and layout.recipe.exhaustion == "redistribute":
        # its shares were lowered for its whole length, and must stay so
        return replace(kept, planned_samples=stage.planned_samples or length)
    return kept


def _facts(stage: PlannedStage, plan: RecipeLayout) -> tuple[Any, ...]:
    """All that decides what a stage serves; sources by name, since their numbers may move."""
    mixed, recipe = stage.mixed, plan.recipe
    mixing = {f.name: getattr(mixed.mixing, f.name) for f in fields(mixed.mixing)}
    unit = math.gcd(*mixed.mixing.shares)  # 4:2 draws what 2:1 draws
    mixing["shares"] = [share // unit for share in mixed.mixing.shares]
    sources = [recipe.sources[i] for i in mixed.sources]
    shuffles = [(s.name, s.kind, s.order, s.packed, s.long_documents) for s in sources]
    sizes = [plan.sizes[i].samples for i in mixed.sources]
    facts = (type(mixed.mixing), mixing, shuffles, sizes, mixed.begins)
    return (*facts, recipe.seed, recipe.sequence_length, mixed.num_samples)
