"""Limits of a mixture against OLMo-core's rules, on the same numbers.

OLMo-core (src/olmo_core/data/source_mixture.py) refuses a source whose share of the requested
tokens, ``requested x target_ratio``, is more than ``population x max_source_fraction x
max_repetition_ratio``. Here those are proportion, max_fraction and max_epochs.
golden/mixture_limits.json holds what its code selects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.recipe.amend import amend, check_past
from megaindex.recipe.layout import resolve_recipe
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Exhaustion, Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.recipe_file import recipe_of, to_mapping
from megaindex.settings.run_settings import Target

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/mixture_limits.json").read_text())
S = GOLDEN["sequence_length"]


@dataclass(frozen=True)
class Source:
    """As OLMo-core's SourceMixtureConfig; the population in samples of S tokens."""

    population: int
    target_ratio: Fraction
    max_source_fraction: Fraction = Fraction(1)
    max_repetition_ratio: Fraction = Fraction(1)

    def insufficient(self, requested_tokens: int) -> bool:
        """Its error "Insufficient tokens for source", in exact arithmetic."""
        needed = int(requested_tokens * self.target_ratio)
        most = int(self.population * S * self.max_source_fraction * self.max_repetition_ratio)
        return most < needed


def drawn(sources: list[Source], samples: int, exhaustion: Exhaustion) -> list[int]:
    names = [str(k) for k in range(len(sources))]
    recipe = Recipe(
        sequence_length=S,
        batch=BatchSchedule.constant(1),
        sources=tuple(
            RecipeSource(name=name, tokens=source.population * S + 1,
                   max_fraction=source.max_source_fraction,
                   max_epochs=source.max_repetition_ratio)
            for name, source in zip(names, sources, strict=True)
        ),
        stages=(
            RecipeStage(
                name="all",
                streams=tuple(
                    Stream(source=name, proportion=source.target_ratio)
                    for name, source in zip(names, sources, strict=True)
                ),
                length=Target(kind="samples", value=Fraction(samples)),
            ),
        ),
        exhaustion=exhaustion,
    )  # fmt: skip
    sizes = [
        SourceSize(tokens=s.population * S + 1, documents=1, samples=s.population) for s in sources
    ]
    return resolve_recipe(recipe, sizes).drawn()


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[Source], int]:
    """Sources whose ratios are tenths, and samples that tenths divide."""
    cuts = sorted(draw(st.sets(st.integers(1, 9), max_size=3)))
    tenths = [b - a for a, b in zip([0, *cuts], [*cuts, 10], strict=True)]
    sources = [
        Source(
            population=draw(st.integers(5, 80)),
            target_ratio=Fraction(part, 10),
            max_source_fraction=draw(
                st.sampled_from([Fraction(1), Fraction(3, 4), Fraction(1, 2)])
            ),
            max_repetition_ratio=draw(st.sampled_from([Fraction(1), Fraction(3, 2), Fraction(4)])),
        )
        for part in tenths
    ]
    return sources, 10 * draw(st.integers(1, 12))


@given(mixture=mixtures())
def test_what_it_refuses_is_refused(mixture: tuple[list[Source], int]) -> None:
    """And what it accepts draws exactly the shares it asks for."""
    sources, samples = mixture
    if any(source.insufficient(samples * S) for source in sources):
        with pytest.raises(InvalidArgument, match=r"source \d is exhausted in step"):
            drawn(sources, samples, "error")
    else:
        assert drawn(sources, samples, "error") == [samples * s.target_ratio for s in sources]


@given(mixture=mixtures())
def test_redistribution_goes_to_the_limits_and_no_further(
    mixture: tuple[list[Source], int],
) -> None:
    """Ours alone: what a source cannot give is drawn from the others, in their proportions."""
    sources, samples = mixture
    limits = [int(s.population * s.max_source_fraction * s.max_repetition_ratio) for s in sources]
    if sum(limits) < samples:
        with pytest.raises(InvalidArgument, match="the limits of its sources leave"):
            drawn(sources, samples, "redistribute")
        return
    counts = drawn(sources, samples, "redistribute")
    assert sum(counts) == samples
    assert all(count <= limit for count, limit in zip(counts, limits, strict=True))
    if not any(source.insufficient(samples * S) for source in sources):
        assert counts == [samples * s.target_ratio for s in sources]
    free = [k for k, limit in enumerate(limits) if counts[k] < limit]
    shares = sum(sources[k].target_ratio for k in free)
    for k in free:
        rest = sum(counts[j] for j in free)
        assert abs(counts[k] - rest * sources[k].target_ratio / shares) < 1
        assert counts[k] >= int(samples * sources[k].target_ratio)  # none is drawn less


@for_each("case", GOLDEN["cases"])
def test_its_own_code_selects_the_same(case: dict[str, Any]) -> None:
    """And where it says "Insufficient tokens", ours names the step; redistributed, it goes."""
    sources = [
        Source(population, *(Fraction(str(value)) for value in values))
        for population, *values in case["sources"]
    ]
    samples = case["instances"]
    if "error" not in case:
        assert drawn(sources, samples, "error") == case["selected"]
        assert drawn(sources, samples, "redistribute") == case["selected"]
        return
    assert case["error"].startswith("Insufficient tokens for source: 0 @ target global ratio")
    assert sources[0].insufficient(samples * S)
    with pytest.raises(InvalidArgument, match=r"source 0 is exhausted in step"):
        drawn(sources, samples, "error")


def test_what_is_short_is_drawn_from_the_others() -> None:
    """At most half of 10 samples, where 8 of 16 are asked."""
    half = Source(10, Fraction(1, 2), max_source_fraction=Fraction(1, 2))
    large = Source(100, Fraction(1, 2))
    assert drawn([half, large], 16, "redistribute") == [5, 11]


def test_a_run_that_a_source_stops_has_no_padding() -> None:
    """As planned, its last batch would be padded; it ends with the last that is full."""
    stage = RecipeStage(
        name="one",
        streams=(Stream(source="a", proportion=Fraction(1)),),
        length=Target(kind="samples", value=Fraction(100)),
    )
    source = RecipeSource(name="a", tokens=10**4, max_epochs=Fraction(1))
    recipe = Recipe(
        sequence_length=S, batch=BatchSchedule.constant(12), stages=(stage,), sources=(source,),
        tail="pad", exhaustion="stop",
    )  # fmt: skip
    found = {
        samples: resolve_recipe(recipe, [SourceSize(tokens=10**4, documents=1, samples=samples)])
        for samples in (30, 100)
    }
    assert [(each.num_samples, each.samples_masked) for each in found.values()] == [
        (24, 0),
        (100, 8),
    ]


def test_a_redistributed_stage_that_ends_early_keeps_its_shares() -> None:
    """b holds a fifth of what it is to give, so a gives more from the start. Cut short, the stage
    would fit without that, and must draw what it drew all the same."""
    streams = tuple(Stream(source=name, proportion=Fraction(1)) for name in "ab")
    stage = RecipeStage(
        name="one", streams=streams, length=Target(kind="iterations", value=Fraction(5))
    )
    recipe = Recipe(
        sequence_length=S, batch=BatchSchedule.constant(12), stages=(stage,),
        sources=tuple(RecipeSource(name=name, tokens=10**4) for name in "ab"),
        exhaustion="redistribute",
    )  # fmt: skip
    sizes = [SourceSize(tokens=10**4, documents=1, samples=n) for n in (150, 6)]
    old = resolve_recipe(recipe, sizes)
    assert old.drawn() == [54, 6]
    # a changed run can be changed again, also from an earlier checkpoint
    for name, consumed, counts in (
        ("two", 36, (32, 4)),
        ("three", 12, (11, 1)),
        ("four", 12, (11, 1)),
    ):
        after = replace(stage, name=name, streams=streams[:1])
        changed = amend(old, consumed_samples=consumed, stages=[after])
        stored = recipe_of(to_mapping(changed), "a checkpoint", Path("/"))
        new = resolve_recipe(stored, sizes)
        check_past(old, new, consumed)
        assert new.stages[0].counts == old.stages[0].shortened(consumed).counts == counts
        old = new
    with pytest.raises(InvalidArgument, match="planned_samples must be at least 1"):
        replace(stage, planned_samples=0)
