"""Runs changed on the way: the past stays, sources go on, the ledger counts both."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus

from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.receipts import fingerprint_keys, planned_receipt
from megaindex.loader.checkpoint import SourceProgress
from megaindex.recipe.amend import amend, check_past
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target


def stage(name: str, steps: int, batching: str = "stratified", **shares: int) -> RecipeStage:
    return RecipeStage(
        name=name,
        streams=tuple(Stream(source=s, proportion=Fraction(w)) for s, w in shares.items()),
        length=Target(kind="iterations", value=Fraction(steps)),
        batching=batching,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(8)
    for name in "abc":
        write_corpus(folder / name, rng.integers(1, 90, 40))
    return folder


def recipe_of(folder: Path, *stages: RecipeStage, sources: str = "ab") -> Recipe:
    return Recipe(
        sequence_length=8,
        batch=BatchSchedule(stages=((0, 4), (40, 8))),
        sources=tuple(RecipeSource(name=name, path=str(folder / name)) for name in sources),
        stages=stages,
        seed=3,
    )


def receipt_of(opened: OpenRecipe, end: int) -> str:
    keys = fingerprint_keys(opened.fingerprints)
    return str(planned_receipt(opened.index, 0, end, keys))


@pytest.mark.parametrize("batching", ["stratified", "random"])
@given(steps=st.integers(1, 40))
def test_the_past_of_a_changed_run_is_the_same(folder: Path, batching: str, steps: int) -> None:
    """Another blend, a new source, more stages: at any step, proven by the receipt."""
    recipe = recipe_of(folder, stage("one", 30, batching, a=9, b=1), stage("two", 10, b=1))
    old = open_recipe(recipe)
    consumed = recipe.batch.samples_after(steps)
    changed = amend(
        old.layout, consumed_samples=consumed,
        stages=[stage("even", 20, batching, a=1, b=1, c=1), stage("last", 5, c=1)],
        sources=[RecipeSource(name="c", path=str(folder / "c"))],
    )  # fmt: skip
    new = open_recipe(changed)
    check_past(old.layout, new.layout, consumed)
    assert receipt_of(old, consumed) == receipt_of(new, consumed)
    assert new.layout.num_steps == steps + 25
    source, sample = new.index.origin(np.arange(new.index.num_samples))
    for number in range(3):
        mine = sample[source == number]
        assert mine.tolist() == list(range(mine.size))


def test_a_run_goes_on_with_stages_or_not_at_all(folder: Path) -> None:
    layout = open_recipe(recipe_of(folder, stage("main", 20, a=1, b=1))).layout
    with pytest.raises(InvalidArgument, match="stages is empty"):
        amend(layout, consumed_samples=40, stages=())


def test_a_change_of_the_past_is_refused(folder: Path) -> None:
    recipe = recipe_of(folder, stage("one", 30, a=9, b=1))
    old = open_recipe(recipe).layout
    for other in (
        recipe_of(folder, stage("one", 30, a=8, b=1)),
        replace(recipe, seed=4),
        recipe_of(folder, stage("one", 2, a=9, b=1), stage("two", 30, a=1)),
    ):
        with pytest.raises(InvalidArgument, match="stage one: .* other samples"):
            check_past(old, open_recipe(other).layout, 20)
    check_past(old, open_recipe(recipe_of(folder, stage("one", 90, a=9, b=1))).layout, 20)
    chosen = [
        replace(
            stage("one", 30, a=1),
            streams=tuple(Stream(source=s, choose=n * k) for s, n in (("a", 2), ("b", 1))),
        )
        for k in (4, 8)
    ]
    ours, theirs = (open_recipe(recipe_of(folder, each)).layout for each in chosen)
    short = open_recipe(recipe_of(folder, stage("one", 4, a=9, b=1))).layout
    long = open_recipe(recipe_of(folder, stage("one", 4, a=9, b=1), stage("two", 9, a=1))).layout
    check_past(long, short, 16)
    for before, after, counts in ((long, short, "1 .*2"), (short, long, "2 .*1")):
        with pytest.raises(InvalidArgument, match=f"{counts}; keep those stages"):
            check_past(before, after, 20)
    check_past(ours, theirs, 20)  # 4:2 draws what 2:1 draws
    anew = amend(old, consumed_samples=0, stages=[stage("x", 1, a=1)])
    assert [each.name for each in anew.stages] == ["x"]
    with pytest.raises(InvalidArgument, match="consumed_samples 41 is not the end of a step"):
        amend(old, consumed_samples=41, stages=[stage("x", 1, a=1)])
    with pytest.raises(InvalidArgument, match="is not the end of a step"):
        amend(old, consumed_samples=8_000, stages=[stage("x", 1, a=1)])


def test_the_ledger_counts_what_was_served(folder: Path) -> None:
    recipe = recipe_of(
        folder, stage("one", 12, "random", a=2, b=1), stage("two", 10, b=1), stage("three", 4, a=1)
    )
    opened = open_recipe(recipe)
    ledger, total = SourceProgress.of_recipe(opened), opened.index.num_samples
    source, _ = opened.index.origin(np.arange(total))
    bounds = np.cumsum([s.num_samples for s in opened.layout.stages])
    for consumed in range(total + 1):
        served = np.bincount(source[:consumed], minlength=2)
        rows = ledger.totals(consumed)
        assert [row.samples for row in rows] == served.tolist()
        assert [row.tokens for row in rows] == (8 * served).tolist()
        per_epoch = [s.size.samples for s in opened.sources]
        assert [row.epochs for row in rows] == (served / per_epoch).tolist()
        by_stage = ledger.stages(consumed)
        assert (
            list(by_stage)
            == ["one", "two", "three"][: np.searchsorted(bounds, consumed) + 1][: len(by_stage)]
        )
        assert sum(row.samples for rows in by_stage.values() for row in rows) == consumed
    with pytest.raises(OutOfRange, match=f"must be from 0 to {total}"):
        ledger.totals(total + 1)


def test_the_default_of_max_documents_is_no_change_where_it_is_given(folder: Path) -> None:
    def layout(limit: int | None, length: int = 8) -> RecipeLayout:
        recipe = recipe_of(folder, stage("one", 20, a=1, b=1))
        sources = (replace(s, order="packed", max_documents=limit) for s in recipe.sources)
        changed = replace(recipe, sources=tuple(sources), sequence_length=length)
        return resolve_recipe(changed, [SourceSize(tokens=999, documents=9, samples=99)] * 2)

    check_past(layout(None), layout(16), 20)
    check_past(layout(32, 1024), layout(None, 1024), 20)
    for other in (layout(17), layout(2)):
        with pytest.raises(InvalidArgument, match="stage one: .* other samples"):
            check_past(layout(None), other, 20)
