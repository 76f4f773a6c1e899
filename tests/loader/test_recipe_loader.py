"""A recipe's batches: text and instruction data in one, resumed and changed on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import one_in
from support.inputs import for_each

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.receipts import Receipt, fingerprint_keys, planned_receipt
from megaindex.loader import CostModel, Loader, check_receipts, join_states, loader_of_recipe
from megaindex.recipe.amend import amend
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeEvaluation, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target

S = 16


def write(prefix: Path, documents: list[np.ndarray]) -> None:
    with IndexedDatasetWriter(str(prefix), np.int32) as writer:
        for tokens in documents:
            writer.add_document(tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, and two sets of instructions: with labels, and with a mask of the response."""
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(5)
    write(folder / "web", [rng.integers(10, 99, n) for n in rng.integers(1, 70, 60)])
    for name in ("chat", "qa"):
        documents = [rng.integers(100, 999, n) for n in rng.integers(2, 24, 40)]
        write(folder / name, documents)
        responses = [np.arange(d.size) >= d.size // 2 for d in documents]
        write(folder / f"{name}_mask", [r.astype(np.int32) for r in responses])
        labels = [np.where(r, d, -100) for d, r in zip(documents, responses, strict=True)]
        write(folder / f"{name}_labels", labels)
    return folder


def stage(name: str, steps: int, **shares: int) -> RecipeStage:
    streams = [Stream(source=s, proportion=Fraction(w)) for s, w in shares.items()]
    length = Target(kind="iterations", value=Fraction(steps))
    return RecipeStage(name=name, streams=tuple(streams), length=length, batching="random")


def recipe_of(folder: Path, *stages: RecipeStage) -> Recipe:
    chat = RecipeSource(name="chat", path=str(folder / "chat"), kind="finetuning",
                  labels=str(folder / "chat_labels"))  # fmt: skip
    qa = RecipeSource(name="qa", path=str(folder / "qa"), kind="finetuning", packed=False,
                loss_mask=str(folder / "qa_mask"), long_documents="split")  # fmt: skip
    return Recipe(
        sequence_length=S, batch=BatchSchedule.constant(12),
        sources=(RecipeSource(name="web", path=str(folder / "web")), chat, qa),
        stages=stages or (stage("one", 6, web=2, chat=1), stage("two", 5, web=1, chat=1, qa=1)),
    )  # fmt: skip


def expected_row(opened: OpenRecipe, folder: Path, sample: int) -> dict[str, list[float]]:
    """One row, token by token, from the files."""
    spans = opened.index.locate([sample])
    corpus = opened.sources[int(spans.source[0])].corpus
    name = corpus.name
    row: dict[str, list[float]] = {"tokens": [], "labels": [], "loss_mask": []}
    text = IndexedDataset(str(folder / name))
    if name == "web" and corpus.order == "epoch":
        parts = [text.get(d, o, n) for d, o, n in zip(*list(spans)[1:], strict=True)]
        tokens = np.concatenate(parts)
        return {
            "tokens": tokens[:S].tolist(),
            "labels": tokens[1:].tolist(),
            "loss_mask": [1.0] * S,
        }
    mask = None if name == "web" else IndexedDataset(str(folder / f"{name}_mask"))
    for document, offset, length in zip(*list(spans)[1:], strict=True):
        tokens = text.get(document, offset, length)
        targets = np.ones_like(tokens) if mask is None else mask.get(document, offset, length)
        row["tokens"] += tokens.tolist()
        row["labels"] += [*(tokens * targets)[1:].tolist(), 0]
        row["loss_mask"] += [*targets[1:].astype(float).tolist(), 0.0]
    return {key: (values + [0] * S)[:S] for key, values in row.items()}


def served(loader: Loader, batches: int | None = None) -> list[dict[str, list[float]]]:
    """The rows of so many batches."""
    rows = []
    iterator = iter(loader)
    for _ in range(len(loader) if batches is None else batches):
        batch = next(iterator)
        fields = {key: batch[key].tolist() for key in ("tokens", "labels", "loss_mask")}
        rows += [
            {key: values[k] for key, values in fields.items()} for k in range(len(fields["tokens"]))
        ]
    return rows


def test_every_token_has_the_right_loss(folder: Path) -> None:
    opened = open_recipe(recipe_of(folder))
    rows = served(loader_of_recipe(opened, micro_batch_size=4))
    assert len(rows) == opened.index.num_samples == 11 * 12
    for sample, row in enumerate(rows):
        assert row == expected_row(opened, folder, sample)


def packed_recipe(folder: Path) -> Recipe:
    """The same sources in order packed, finetuning included."""
    plain = recipe_of(folder, stage("one", 6, web=2, chat=1), stage("two", 5, web=1, qa=1))
    sources = [
        replace(source, order="packed", packed=True, long_documents="split", max_documents=limit)
        for source, limit in zip(plain.sources, (None, 2, 3), strict=True)
    ]
    return replace(plain, sources=tuple(sources))


def test_order_packed_has_the_right_loss_in_every_source(folder: Path) -> None:
    opened = open_recipe(packed_recipe(folder))
    rows = served(loader_of_recipe(opened, micro_batch_size=4))
    assert len(rows) == opened.index.num_samples
    for sample, row in enumerate(rows):
        assert row == expected_row(opened, folder, sample)


@one_in(3)  # each serves a whole run
@given(
    first=st.sampled_from([(1, 4), (2, 2), (3, 2)]),
    second=st.sampled_from([(1, 3), (2, 3), (4, 1), (6, 2)]),
    steps=st.integers(0, 11),
)
def test_a_run_goes_on_with_other_ranks(
    folder: Path, first: tuple[int, int], second: tuple[int, int], steps: int
) -> None:
    opened = open_recipe(recipe_of(folder))
    total, states = Receipt(), []
    for rank in range(first[0]):
        loader = loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=first[0],
                              micro_batch_size=first[1], read_ahead=1)  # fmt: skip
        served(loader, steps * 12 // (first[0] * first[1]))
        states.append(json.loads(json.dumps(loader.state_dict())))
        assert loader.consumed_samples == 12 * steps
        total += loader.recorder.receipt
    rows = []
    for rank in range(second[0]):
        loader = loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=second[0],
                              micro_batch_size=second[1], read_ahead=1)  # fmt: skip
        state = states[0]
        state["receipt"] = None  # the old ranks' receipts were added up above
        loader.load_state_dict(state)
        rows += served(loader)
        total += loader.recorder.receipt
    assert len(rows) == (11 - steps) * 12
    keys = fingerprint_keys(opened.fingerprints)
    assert total == planned_receipt(opened.index, 0, opened.index.num_samples, keys)


def test_a_changed_recipe_keeps_its_past_and_its_receipt(folder: Path) -> None:
    """A new source and another blend from step 4 on: both receipts together are the new plan's."""
    old = open_recipe(recipe_of(folder))
    before = loader_of_recipe(old, micro_batch_size=4)
    served(before, 4 * 3)
    state = before.state_dict()
    more = RecipeSource(name="web2", path=str(folder / "web"))
    changed = amend(old.layout, consumed_samples=48, sources=[more],
                    stages=[stage("new", 3, web=1, web2=1, qa=1)])  # fmt: skip
    new = open_recipe(changed)
    after = loader_of_recipe(new, micro_batch_size=2)
    after.load_state_dict(state)
    assert len(served(after)) == 36
    keys = fingerprint_keys(new.fingerprints)
    assert after.recorder.receipt == planned_receipt(new.index, 0, 84, keys)
    rows = after.ledger.totals(after.consumed_samples)
    assert [row.samples for row in rows] == new.layout.drawn()
    assert rows[-1].source == "web2"
    assert rows[-1].samples > 0


@pytest.mark.parametrize("change", ["past", "content", "gone", "targets"])
def test_another_past_is_refused_unless_allowed(folder: Path, tmp_path: Path, change: str) -> None:
    recipe = recipe_of(folder)
    loader = loader_of_recipe(open_recipe(recipe), micro_batch_size=4)
    served(loader, 6)
    state: dict[str, Any] = loader.state_dict()
    other = replace(recipe, seed=77)
    says = "stage one: the new recipe serves other samples"
    if change == "content":
        write(tmp_path / "web", [np.arange(50)] * 30)
        web = replace(recipe.sources[0], path=str(tmp_path / "web"))
        other = replace(recipe, sources=(web, *recipe.sources[1:]))
        says = "source web: content must be"
    if change == "targets":
        chat = replace(recipe.sources[1], labels="", loss_mask=str(folder / "chat_mask"))
        other = replace(recipe, sources=(recipe.sources[0], chat, recipe.sources[2]))
        says = "source chat: targets must be labels .* got loss mask"
    if change == "gone":
        kept = stage("one", 6, web=2)
        other = replace(recipe, sources=recipe.sources[:1], stages=(kept,))
        says = "source chat: .* the recipe has no such source"
    fresh = loader_of_recipe(open_recipe(other), micro_batch_size=4)
    with pytest.raises(InvalidArgument, match=says):
        fresh.load_state_dict(state)
    if change == "past":
        fresh.load_state_dict(state, allow=["past"])
        assert fresh.consumed_samples == 24
    part = state["recipe"]
    for damaged in ({"version": 1}, {**state, "version": 99}, {**state, "recipe": "["},
                    {**state, "recipe": {**part, "sources": [{"name": "web"}]}},
                    {**state, "content": state["content"][:1]},
                    {**state, "sampler": []}):  # fmt: skip
        with pytest.raises(FormatError, match="not (the|a source of the) (state|recipe)"):
            fresh.load_state_dict(damaged)
    shuffled = json.loads(json.dumps(state, sort_keys=True))
    loader_of_recipe(open_recipe(recipe), micro_batch_size=4).load_state_dict(shuffled)


def test_documents_of_other_lengths_are_other_content(folder: Path, tmp_path: Path) -> None:
    """The same tokens in two documents more: as many samples, which hold other documents."""
    recipe = recipe_of(folder)
    loader = loader_of_recipe(open_recipe(recipe), micro_batch_size=4)
    served(loader, 6)
    web = IndexedDataset(str(folder / "web"))
    documents = [web[k] for k in range(len(web))]
    halves = [half for each in documents[:2] for half in np.array_split(each, 2)]
    write(tmp_path / "web", [*halves, *documents[2:]])
    other = replace(recipe.sources[0], path=str(tmp_path / "web"))
    fresh = loader_of_recipe(
        open_recipe(replace(recipe, sources=(other, *recipe.sources[1:]))), micro_batch_size=4
    )
    with pytest.raises(InvalidArgument, match="source web: content must be"):
        fresh.load_state_dict(loader.state_dict())
    state = json.loads(json.dumps({**loader.state_dict()}))
    state["receipt"] = None  # a sum over samples of the other corpus
    fresh.load_state_dict(state, allow=["content"])
    assert fresh.consumed_samples == loader.consumed_samples


@for_each("iterations", [None, 2])
@for_each(("ranks", "micro"), [(1, 4), (3, 2), (4, 3)])
def test_an_evaluation_scores_each_sample_once(
    folder: Path, iterations: int | None, ranks: int, micro: int
) -> None:
    """On any number of ranks: as many batches on each, the same rows in every round."""
    source = RecipeSource(name="validation", path=str(folder / "qa"), kind="finetuning",
                          packed=False, loss_mask=str(folder / "qa_mask"))  # fmt: skip
    evaluation = RecipeEvaluation(source=source, iterations=iterations)
    opened = open_recipe(replace(recipe_of(folder), evaluation=evaluation))
    rounds = opened.layout.evaluation
    assert rounds is not None
    assert rounds.samples == (40 if iterations is None else 24)
    rows: list[list[int]] = []
    counts = set()
    for rank in range(ranks):
        loader = loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=ranks,
                              micro_batch_size=micro)  # fmt: skip
        for round_number in range(2):
            batches = [
                (batch["tokens"].tolist(), batch["loss_mask"].sum(1).tolist())
                for batch in loader.evaluation()
            ]
            counts.add(len(batches))
            if round_number == 0:
                first = batches
        assert first == batches
        rows += [t for tokens, loss in batches for t, n in zip(tokens, loss, strict=True) if n]
    assert len(counts) == 1
    source_index = opened.validation
    assert source_index is not None
    text = IndexedDataset(str(folder / "qa"))
    chosen = source_index.index(rounds.samples).locate(np.arange(rounds.samples)).document
    expected = sorted(([*text[d].tolist(), *[0] * S])[:S] for d in chosen)
    assert sorted(rows) == expected


def test_no_evaluation_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="the run must have an evaluation"):
        loader_of_recipe(open_recipe(recipe_of(folder)), micro_batch_size=4).evaluation()


def test_padding_never_reaches_the_loss(folder: Path) -> None:
    """29 samples in batches of 12: the last batch has 7 rows of padding."""
    one = replace(stage("one", 1, web=1, qa=1), length=Target(kind="samples", value=Fraction(29)))
    opened = open_recipe(replace(recipe_of(folder, one), tail="pad"))
    assert opened.layout.samples_masked == 7
    counts = []
    for rank in range(3):
        loader = loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=3,
                              micro_batch_size=2)  # fmt: skip
        rows = served(loader)
        assert len(rows) == 12
        counts.append(sum(sum(row["loss_mask"]) > 0 for row in rows))
        assert all(row["loss_mask"] == [0.0] * S for row in rows if not any(row["tokens"]))
    assert sum(counts) == 29


@pytest.mark.slow
def test_a_balanced_run_has_the_samples_of_each_step_and_their_receipts(folder: Path) -> None:
    """Stopped within a step, and continued by other ranks; the recipe may change after the step."""
    recipe = recipe_of(folder)
    opened = open_recipe(recipe)
    cost = CostModel(linear=0, attention=1)

    def loaders(ranks: int, opened: OpenRecipe = opened, **settings: Any) -> list[Loader]:
        return [
            loader_of_recipe(
                opened, data_parallel_rank=rank, data_parallel_size=ranks, micro_batch_size=2,
                balance=cost, **settings,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    first = loaders(3)
    rows = [served(loader, 5) for loader in first]  # two rounds a step
    joined = join_states([loader.state_dict() for loader in first])
    sampler = joined["sampler"]
    assert (sampler["consumed_samples"], sampler["rows_left"]) == (30, 6)
    assert sampler["balance"] == cost.to_dict()
    with pytest.raises(InvalidArgument, match="balance must be"):
        loader_of_recipe(opened, micro_batch_size=2).load_state_dict(joined)
    # the samples of the step begun must stay: sample 30 is served, or to be served
    shorter = open_recipe(recipe_of(folder, stage("one", 2, web=2, chat=1), stage("two", 5, qa=1)))
    with pytest.raises(InvalidArgument, match="before sample 36"):
        loaders(1, shorter)[0].load_state_dict(joined)
    later = open_recipe(recipe_of(folder, stage("one", 3, web=2, chat=1), stage("two", 5, qa=1)))
    (changed,) = loaders(1, later)
    changed.load_state_dict(joined)

    (second,) = loaders(1)
    second.load_state_dict(joined)
    rows.append(served(second))
    assert second.consumed_samples == opened.index.num_samples
    expected = [expected_row(opened, folder, k) for k in range(opened.index.num_samples)]

    def texts(rows: list[dict[str, list[float]]]) -> list[str]:
        return sorted(json.dumps([[float(x) for x in row[key]] for key in row]) for row in rows)

    assert texts([row for part in rows for row in part]) == texts(expected)
    for step in range(36, 132, 12):
        begin = 6 + step - 36  # after the rows left of the step begun
        assert texts(rows[3][begin : begin + 12]) == texts(expected[step : step + 12])
    check = check_receipts([second.state_dict()], opened.index)
    assert check.equal, str(check)
    assert check.in_place == opened.index.num_samples
