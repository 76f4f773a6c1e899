"""Progress by source of every loader, against the rows that its sampler serves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import InvalidArgument, OutOfRange, Skip, build_blend, build_index
from megaindex.index.spans import Spans
from megaindex.loader import (
    CyclicSampler,
    Loader,
    MicroBatchSampler,
    SourceProgress,
    loader_of_recipe,
)
from megaindex.recipe import (
    BatchSchedule,
    Recipe,
    RecipeSource,
    RecipeStage,
    Stream,
    Target,
    open_recipe,
)

S = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("progress")
    for seed, name in enumerate(("web", "code")):
        write_corpus(folder / name, np.random.default_rng(seed).integers(1, 90, 40))
    return folder


def blend(folder: Path) -> Any:
    paths = [str(folder / name) for name in ("web", "code")]
    return build_blend(paths, weights=[2, 1], num_samples=75, sequence_length=S)


def loader_of(index: Any, kind: Any = MicroBatchSampler, **settings: Any) -> Loader:
    ranks = {"data_parallel_rank": 0, "data_parallel_size": 1, "micro_batch_size": 4}
    sampler = kind(**{"num_samples": index.num_samples, **ranks, **settings})
    return Loader(index, sampler, reader="mapped", read_ahead=0)


def counted(index: Any, ids: list[int]) -> list[int]:
    """Samples of each of two sources."""
    return np.bincount([index.locate([k]).source[0] for k in ids], minlength=2).tolist()


@for_each("tail", ["drop", "pad", "wrap"])
@for_each("skip", [None, [Skip(steps="0 3"), Skip(steps=5, move=True)]])
def test_a_loader_counts_what_it_served(folder: Path, tail: str, skip: Any) -> None:
    """After every batch, those of a wrapped last step, of which one sample is left, included."""
    index = blend(folder)
    loader = loader_of(index, num_samples=73, global_batch_size=12, tail=tail, skip=skip)
    ids: list[int] = []
    for rows, _ in zip(list(loader.sampler), loader, strict=True):
        ids += [row for row in rows if row is not None]
        totals = loader.ledger.totals(loader.consumed_samples)
        served = counted(loader.index, ids)
        assert [row.samples for row in totals] == served
        assert [row.tokens for row in totals] == [S * n for n in served]
        for row, n, source in zip(totals, served, index.indices, strict=True):
            assert row.epochs == float(n / Fraction(source.tokens_per_epoch, S))
    assert [row.source for row in totals] == [str(folder / name) for name in ("web", "code")]
    assert loader.ledger is loader.ledger


def test_positions_are_asked_for_in_any_order(folder: Path) -> None:
    index = blend(folder)
    progress = SourceProgress(index, ["a", "b"])
    for position in (40, 0, 75, 74, 74, 1):
        rows = progress.totals(position)
        assert [row.samples for row in rows] == counted(index, list(range(position)))
        assert rows == SourceProgress(index, ["a", "b"]).totals(position)
    assert progress.stages(75) == {}


def test_parts_of_a_stage_are_one(folder: Path) -> None:
    index = blend(folder)
    stages = [("one", 0), ("one", 10), ("two", 30), ("one", 60)]
    for consumed in (1, 30, 31, 75):
        rows = SourceProgress(index, ["a", "b"], stages).stages(consumed)
        two = list(range(30, min(consumed, 60)))
        expected = {"one": sorted({*range(consumed)} - {*two}), **({"two": two} if two else {})}
        assert {name: [row.samples for row in each] for name, each in rows.items()} == {
            name: counted(index, ids) for name, ids in expected.items()
        }


def test_a_position_outside_the_run_is_refused(folder: Path) -> None:
    """Moved samples that fill no step of their own are not of the run."""
    index = blend(folder)
    skip = [Skip(steps=2, move=True)]
    for skips, end in ((None, 75), (skip, 72 + 12)):
        ledger = loader_of(index, global_batch_size=12, skip=skips).ledger
        ledger.totals(end)
        for wrong in (-1, end + 1):
            for ask in (ledger.totals, ledger.stages):
                message = f"consumed_samples must be from 0 to {end}, the samples of the run, got"
                with pytest.raises(OutOfRange, match=f"{message} {wrong}"):
                    ask(wrong)


def test_samples_in_another_order_have_no_progress(folder: Path) -> None:
    loader = loader_of(blend(folder), CyclicSampler, train_samples=60)
    with pytest.raises(InvalidArgument, match="type CyclicSampler has no progress by source"):
        _ = loader.ledger


def test_every_source_needs_a_name(folder: Path) -> None:
    index = blend(folder)
    assert [row.source for row in SourceProgress(index).totals(0)] == [
        dataset.path_prefix for dataset in index.datasets
    ]
    with pytest.raises(InvalidArgument, match="names must be 2, one for each"):
        SourceProgress(index, ["a"])


class InTurn:
    """Index of two sources in turn, of another package."""

    num_samples, num_epochs, tokens_per_epoch, sequence_length, add_extra_token = 8, 1, 99, S, 1

    def __init__(self, one: Any) -> None:
        self.one = one

    def locate(self, sample_ids: Any) -> Spans:
        spans = self.one.locate(np.asarray(sample_ids) // 2)
        return replace(spans, source=np.repeat(sample_ids, np.diff(spans.row_splits)) % 2)


def test_an_epoch_that_an_index_does_not_state_is_refused(folder: Path) -> None:
    index = InTurn(build_index(folder / "web", sequence_length=S))
    progress = SourceProgress(index, ["a", "b"])
    assert [row.samples for row in progress.totals(1)] == [1, 0]
    with pytest.raises(InvalidArgument, match="a InTurn does not state the samples of an epoch"):
        progress.totals(2)


# recipes


def recipe(folder: Path, skip: Any) -> Recipe:
    def stage(name: str, samples: int, **shares: int) -> RecipeStage:
        return RecipeStage(
            name=name,
            streams=tuple(Stream(source=s, proportion=Fraction(w)) for s, w in shares.items()),
            length=Target(kind="samples", value=Fraction(samples)),
        )

    return Recipe(
        sequence_length=S,
        batch=BatchSchedule.constant(4),
        sources=tuple(RecipeSource(name=n, path=str(folder / n)) for n in ("web", "code")),
        stages=(
            stage("one", 20, web=2, code=1),
            stage("two", 8, code=1),
            stage("three", 12, web=1),
        ),
        skip=skip,
    )


def test_moved_samples_count_in_their_stage(folder: Path) -> None:
    skip = (Skip(steps="1 6"), Skip(steps="4-5 8", move=True))
    opened = open_recipe(recipe(folder, skip))
    ledger, index = SourceProgress.of_recipe(opened), opened.index
    bounds = {"one": (0, 20), "two": (20, 28), "three": (28, 40)}
    moved = [*range(16, 24), *range(32, 36)]
    holes = {*range(4, 8), *range(24, 28), *moved}
    order = [*range(40), *moved]
    for consumed in range(len(order) + 1):
        served = [k for k in range(consumed) if k >= 40 or k not in holes]
        rows = ledger.stages(consumed)
        assert list(rows) == [name for name, (first, _) in bounds.items() if first < consumed]
        for name, each in rows.items():
            low, high = bounds[name]
            inside = [k for k in served if low <= order[k] < high]
            assert [row.samples for row in each] == counted(index, inside)
        assert [row.samples for row in ledger.totals(consumed)] == counted(index, served)


def test_the_ledger_follows_a_change_of_the_mix(folder: Path) -> None:
    loader = loader_of_recipe(open_recipe(recipe(folder, ())), micro_batch_size=4)
    before, end = loader.ledger, loader.layout.num_samples
    assert [row.source for row in before.totals(end)] == ["web", "code"]
    loader.set_mix({"web": 1}, at=1)
    assert loader.ledger is not before
    assert [row.samples for row in loader.ledger.stages(20)["one"]] == [19, 1]
    assert [row.samples for row in before.stages(20)["one"]] == [13, 7]
