"""Random runs, changed on the way: other clusters, blends, stages, sources. At every step what the
ranks are handed is what the plan says, and nothing is repeated, lost or trained on as padding."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.examples import one_in
from support.walking import Walk, origins

from megaindex import IndexedDatasetWriter
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import InvalidArgument
from megaindex.index import mixing as mixing_module
from megaindex.recipe.amend import amend, check_past
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import (
    EXHAUSTIONS,
    Exhaustion,
    Recipe,
    RecipeSource,
    RecipeStage,
    Stream,
)
from megaindex.settings.run_settings import Target

S = 8
TEXTS = {"web": 420, "code": 130, "books": 60}
"""Tokens of each, about."""
SCHEDULES = (((0, 12),), ((0, 12), (60, 24)))
CLUSTERS = ((1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (6, 1), (12, 1))
"""(ranks, micro batch): each divides every batch."""

REFUSED = (
    "cannot fill a batch|less than one batch|is exhausted in step|"
    "limits of its sources leave|use batching stratified or random|"
    "is exhausted at sample|allows no whole batch"
)
"""What recipes are refused for that are sound but for their numbers."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing_module, "BLOCK", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    rng = np.random.default_rng(5)
    for name, tokens in TEXTS.items():
        write_corpus(folder / name, rng.multinomial(tokens, [1 / 20] * 20) + 1)
    with (
        IndexedDatasetWriter(str(folder / "chat"), np.int32) as chat,
        IndexedDatasetWriter(str(folder / "chat_mask"), np.int32) as mask,
    ):
        for length in rng.integers(2, 11, 40):
            chat.add_document(rng.integers(100, 999, length))
            mask.add_document(rng.integers(0, 2, length))
    return folder


def sources_of(folder: Path, limits: dict[str, Fraction | None]) -> tuple[RecipeSource, ...]:
    text = [RecipeSource(name=n, path=str(folder / n), max_epochs=limits.get(n)) for n in TEXTS]
    chat = RecipeSource(name="chat", path=str(folder / "chat"), loss_mask=str(folder / "chat_mask"),
                  kind="finetuning", max_epochs=limits.get("chat"))  # fmt: skip
    return (*text, chat)


@st.composite
def stages(draw: st.DrawFn, prefix: str, names: tuple[str, ...], constant: bool) -> RecipeStage:
    """One stage with a blend of some sources."""
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    kind, values = draw(
        st.sampled_from([
            ("proportion", st.integers(1, 9).map(Fraction)),
            ("repeat", st.sampled_from([Fraction(1), Fraction(3, 2), Fraction(5, 2)])),
            ("choose", st.integers(12, 40)),
        ])
    )  # fmt: skip
    batchings = ["stratified", "random"] + ["per_stream"] * (constant and kind != "repeat")
    return RecipeStage(
        name=prefix,
        streams=tuple(Stream(source=name, **{kind: draw(values)}) for name in chosen),
        length=Target(kind="iterations", value=Fraction(draw(st.integers(1, 9)))),
        batching=draw(st.sampled_from(batchings)),  # type: ignore[arg-type]
    )


def check_no_repeat(opened: OpenRecipe, walk: Walk) -> None:
    """Each source gave its samples 0, 1, 2, ..., and no place of it twice in an epoch."""
    limits = {c.name: c.max_epochs or 1 for c in opened.layout.recipe.sources}
    for source in opened.sources:
        name, per_epoch = source.corpus.name, source.size.samples
        samples = [k for which, k in walk.served if which == name]
        assert samples == list(range(len(samples)))
        if not samples:
            continue
        if opened.layout.recipe.exhaustion != "repeat":
            assert len(samples) <= per_epoch * limits[name]
        spans = source.index(len(samples)).locate(np.array(samples))
        first = spans.row_splits[:-1]
        places = zip(np.array(samples) // per_epoch, spans.document[first], spans.offset[first],
                     strict=True)  # fmt: skip
        assert len(set(places)) == len(samples)


def opened_or_none(recipe: Recipe) -> OpenRecipe | None:
    """None where the limits or the batch leave a stage empty, which is refused."""
    try:
        return open_recipe(recipe)
    except InvalidArgument as error:
        if re.search(REFUSED, str(error)):
            return None
        raise


def changed(
    data: st.DataObject,
    opened: OpenRecipe,
    walk: Walk,
    name: str,
    sources: tuple[RecipeSource, ...],
) -> OpenRecipe | None:
    """The run with another stage from here on, which may draw from a new source; its past kept."""
    recipe = opened.layout.recipe
    if walk.consumed == 0 or opened.layout.samples_masked:
        return None
    stage = data.draw(stages(name, tuple(s.name for s in sources), recipe.batch.is_constant))
    new = opened_or_none(
        amend(opened.layout, consumed_samples=walk.consumed, stages=[stage],
              sources=[s for s in sources if s not in recipe.sources])
    )  # fmt: skip
    if new is not None:
        check_past(opened.layout, new.layout, walk.consumed)
        assert origins(new, list(range(walk.consumed))) == walk.served
    return new


@pytest.mark.slow_cases("continue", "repeat", "stop")
@pytest.mark.parametrize("policy", EXHAUSTIONS)
@one_in(2)
@given(data=st.data())
def test_any_run_changed_in_any_way(folder: Path, policy: Exhaustion, data: st.DataObject) -> None:
    limit = st.sampled_from([None, Fraction(3, 2), Fraction(4)])
    limits = {} if policy == "repeat" else {name: data.draw(limit) for name in (*TEXTS, "chat")}
    sources, schedule = sources_of(folder, limits), data.draw(st.sampled_from(SCHEDULES))
    constant = len(schedule) == 1
    tail = data.draw(st.sampled_from(["drop", "drop", "pad"]))
    begun = sources[: data.draw(st.integers(2, 4))]  # the others join later
    names = tuple(s.name for s in begun)
    first = [
        data.draw(stages(f"stage {k}", names, constant))
        for k in range(data.draw(st.integers(1, 3)))
    ]
    if tail == "pad":  # only samples, and not steps, can end within a batch
        length = Target(kind="samples", value=Fraction(data.draw(st.integers(13, 90))))
        first[-1] = replace(first[-1], length=length)
    opened = opened_or_none(
        Recipe(sequence_length=S, batch=BatchSchedule(stages=schedule), sources=begun, seed=9,
               stages=tuple(first), tail=tail, exhaustion=policy)
    )  # fmt: skip
    if opened is None:
        return
    walk = Walk()
    for number in range(data.draw(st.integers(1, 3))):
        walk.go(opened, data.draw(st.sampled_from(CLUSTERS)), data.draw(st.integers(1, 6)))
        opened = changed(data, opened, walk, f"changed {number}", sources) or opened
    walk.go(opened, data.draw(st.sampled_from(CLUSTERS)), 10_000)
    assert walk.consumed == opened.layout.num_samples
    drawn = dict(zip([s.corpus.name for s in opened.sources], opened.layout.drawn(), strict=True))
    assert drawn == {name: [s for s, _ in walk.served].count(name) for name in drawn}
    check_no_repeat(opened, walk)
