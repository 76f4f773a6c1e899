"""Weights changed in mid-run: against a plain model, on any ranks, with kills and resumes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex import IndexedDatasetWriter
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.index.mixing import Stratified, row_of_weights
from megaindex.kernels.reference.blending import UNIT
from megaindex.loader import (
    CostModel,
    Loader,
    SampleOptions,
    check_receipts,
    join_states,
    loader_of_recipe,
)
from megaindex.lock import make_lock
from megaindex.plan import make_plan
from megaindex.plan.limits import earliest_repeats
from megaindex.recipe import (
    BatchSchedule,
    Target,
    amend,
    check_past,
    open_recipe,
    plan_recipe,
    read_recipe,
)
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.recipe import Recipe
from megaindex.settings.recipe_file import to_mapping

S, G, STEPS = 8, 8, 24
NAMES = ("web", "code", "math")
RECIPE = """
sequence_length: 8
batch: {global_batch_size: 8}
sources: {web: web, code: code, math: math}
stages:
  all: {steps: 16, mix: {web: 0.7, code: 0.3}}
  end: {steps: 8, batching: BATCHING, mix: {web: 0.5, math: 0.5}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources whose tokens are all different: a row names its sample."""
    folder = tmp_path_factory.mktemp("mix")
    first = 0
    for name, documents in zip(NAMES, (60, 25, 12), strict=True):
        with IndexedDatasetWriter(str(folder / name), np.int32) as writer:
            for length in np.random.default_rng(documents).integers(1, 40, documents):
                writer.add_document(np.arange(first, first + length))
                first += int(length)
    for batching in ("stratified", "random", "per_stream"):
        text = RECIPE.replace("BATCHING", batching)
        (folder / f"{batching}.yaml").write_text(text)
    return folder


def recipe_at(folder: Path, batching: str = "stratified") -> Recipe:
    return read_recipe(folder / f"{batching}.yaml")


class Cluster:
    """Loaders of all ranks of a run."""

    def __init__(self, recipe: Recipe, ranks: int, micro: int, state: Any = None, **more: Any):
        self.loaders = [
            loader_of_recipe(
                open_recipe(recipe),
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                micro_batch_size=micro,
                options=SampleOptions(dataset_id=True),
                **more,
            )
            for rank in range(ranks)
        ]
        self.batches = [iter(loader) for loader in self.loaders]
        self.rows: list[tuple[int, int]] = []
        """Source and first token of each row served."""
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)
            self.batches = [iter(loader) for loader in self.loaders]

    @property
    def first(self) -> Loader:
        return self.loaders[0]

    def set_mix(self, weights: Mapping[str, Any], at: int | None = None) -> None:
        for loader in self.loaders:
            loader.set_mix(weights, at)

    def round(self) -> bool:
        """Serve one micro batch on every rank; False at the end of the run."""
        for batches in self.batches:
            batch = next(batches, None)
            if batch is None:
                return False
            columns = batch["dataset_id"].tolist(), batch["tokens"][:, 0].tolist()
            self.rows += zip(*columns, strict=True)
        return True

    def run(self, mixes: Mapping[int, Mapping[str, Any]], rounds: int = 10**9) -> None:
        """Serve rounds; each mix is set before its step, unless it was."""
        for _ in range(rounds):
            step = self.first.next_step
            changes = self.first.recipe.mix_changes
            known = changes is not None and G * step in changes.positions
            if step in mixes and not known and self.first.consumed_samples == G * step:
                self.set_mix(mixes[step])
            if not self.round():
                return

    def state(self) -> Any:
        states = [loader.state_dict() for loader in self.loaders]
        return json.loads(json.dumps(join_states(states)))


def draws_of(mixes: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The plain model: the source of each position, draw by draw."""
    found: list[int] = []
    for begin, end, shares in ((0, 16, (7, 3, 0)), (16, 24, (1, 0, 1))):
        order = sorted(range(3), key=lambda k: shares[k] == 0)
        owed = [Fraction(0)] * 3
        units = [Fraction(share, sum(shares)) for share in shares]
        cuts = sorted({begin, end, *(step for step in mixes if begin <= step < end)})
        for first, stop in itertools.pairwise(cuts):
            if first in mixes:
                given = [Fraction(str(mixes[first].get(name, 0))) for name in NAMES]
                units = [Fraction(int(w), UNIT) for w in row_of_weights(given)]
            for _ in range((stop - first) * G):
                times = [((Fraction(1, 2) - owed[k]) / units[k], at, k)
                         for at, k in enumerate(order) if units[k]]  # fmt: skip
                source = min(times)[2]
                owed[source] -= 1
                found.append(source)
            owed = [o + u * G * (stop - first) for o, u in zip(owed, units, strict=True)]
            if first not in mixes:  # the stage's own mix owes nothing
                owed = [Fraction(0)] * 3
    return found


MIX = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from((0, 0.05, 0.3, 1, 2.5)) for name in NAMES}
).filter(lambda mix: any(mix.values()))
MIXES = st.dictionaries(st.integers(0, STEPS - 1), MIX, max_size=6)
SHAPES = st.sampled_from(((1, 8), (2, 2), (4, 1), (1, 1), (2, 4)))


PARTS = st.lists(st.tuples(SHAPES, st.integers(0, 4), st.integers(1, 30)), max_size=3)


def check_model(
    folder: Path,
    mixes: dict[int, dict[str, Any]],
    parts: list[tuple[tuple[int, int], int, int]],
    last: tuple[int, int],
) -> None:
    """Serve a run with kills and resumes on other ranks, and compare it with the model."""
    recipe = recipe_at(folder)
    state, rows = None, []
    for shape, ahead, rounds in parts:
        cluster = Cluster(recipe, *shape, state, read_ahead=ahead)
        cluster.run(mixes, rounds - rounds % (G // (shape[0] * shape[1])))
        state, rows = cluster.state(), rows + cluster.rows
    cluster = Cluster(recipe, *last, state)
    cluster.run(mixes)
    rows += cluster.rows
    assert [source for source, _ in rows] == draws_of(mixes)
    sizes = [size.samples for size in cluster.first.layout.sizes]
    for source, size in enumerate(sizes):
        served = [token for number, token in rows if number == source]
        for begin in range(0, len(served), size):
            assert max(Counter(served[begin : begin + size]).values()) == 1
    whole = Cluster(recipe, 1, G)
    whole.run(mixes)
    assert whole.rows == rows
    joined = cluster.state()
    assert joined["receipt"]["receipt"] == whole.state()["receipt"]["receipt"]
    index = open_recipe(cluster.first.recipe).index
    assert check_receipts([joined], index).equal


@pytest.mark.slow
@settings(max_examples=2)
@given(mixes=MIXES, parts=PARTS, last=SHAPES)
def test_any_cluster_serves_what_the_model_draws(
    folder: Path, mixes: Any, parts: Any, last: Any
) -> None:
    """Nothing repeats before its epoch ends."""
    check_model(folder, mixes, parts, last)


@pytest.mark.slow
@settings(max_examples=100)
@given(mixes=MIXES, parts=PARTS, last=SHAPES)
def test_many_clusters_serve_what_the_model_draws(
    folder: Path, mixes: Any, parts: Any, last: Any
) -> None:
    check_model(folder, mixes, parts, last)


def check_batching(
    folder: Path, batching: str, balance: CostModel | None, shapes: list[tuple[int, int]]
) -> None:
    mixes = {18: {"code": 1, "web": 1}, 20: {"math": 3, "web": 1}}
    found = []
    for shape in shapes:
        cluster = Cluster(recipe_at(folder, batching), *shape, balance=balance)
        cluster.run(mixes, 19 * G // (shape[0] * shape[1]))
        cluster = Cluster(recipe_at(folder, batching), *shape, cluster.state(), balance=balance)
        cluster.run(mixes)
        found.append(cluster.state()["receipt"]["receipt"])
        by_step = [
            Counter(source for source, _ in cluster.rows[k : k + G]) for k in range(0, 40, G)
        ]
        if batching == "per_stream":
            assert all(len(step) == 1 for step in by_step)
    assert len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["random", "per_stream"])
@pytest.mark.parametrize("balance", [None, CostModel(linear=10, attention=1)])
def test_every_batching_and_balance(folder: Path, batching: str, balance: Any) -> None:
    check_batching(folder, batching, balance, [(1, 4), (4, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["random", "per_stream"])
@pytest.mark.parametrize("balance", [None, CostModel(linear=10, attention=1)])
def test_every_batching_and_balance_on_more_ranks(
    folder: Path, batching: str, balance: Any
) -> None:
    check_batching(folder, batching, balance, [(1, 4), (2, 2), (4, 2), (8, 1)])


@pytest.mark.slow
def test_the_mix_of_a_step_begun_and_of_prefetched_batches(folder: Path) -> None:
    """It changes with the next step; batches before it are neither read again nor lost."""
    recipe = recipe_at(folder)
    plain = Cluster(recipe, 1, 2)
    plain.run({})
    cluster = Cluster(recipe, 1, 2, read_ahead=16)
    cluster.run({}, 5)  # a quarter of step 1
    assert cluster.first.next_step == 2
    assert cluster.first.set_mix({"math": 1}) == 2
    assert len(cluster.first) == STEPS * G // 2
    cluster.run({})
    assert cluster.rows[:16] == plain.rows[:16]
    assert {source for source, _ in cluster.rows[16:128]} == {2}
    assert len(cluster.rows) == STEPS * G
    # a change behind the prefetched batches leaves them
    cluster = Cluster(recipe, 1, 2, read_ahead=2, num_threads=1)
    cluster.run({}, 1)
    prepared: list[Any] = []
    reader = cluster.first._source
    prepare = reader.prepare
    lock = threading.Lock()

    def counted(ids: Any) -> Any:
        with lock:
            prepared.append(tuple(ids))
        return prepare(ids)

    reader.prepare = counted  # type: ignore[method-assign]
    cluster.batches = [iter(cluster.first)]
    cluster.run({}, 2)
    cluster.first.set_mix({"math": 1}, at=9)
    cluster.run({})
    assert len(prepared) == len(set(prepared))


def test_what_a_trainer_may_call_when(folder: Path) -> None:
    cluster = Cluster(recipe_at(folder), 1, 8)
    loader = cluster.first
    loader.set_mix({"code": 1}, at=20)
    loader.set_mix({"math": 1}, at=3)
    loader.set_mix({"web": 1, "math": 1}, at=3)  # in place of it
    cluster.run({}, 3)
    with pytest.raises(InvalidArgument, match="from step 3, the next one, to step 23"):
        loader.set_mix({"code": 1}, at=2)
    cluster.run({})
    assert Counter(source for source, _ in cluster.rows[24:128]) == {0: 52, 2: 52}
    assert {source for source, _ in cluster.rows[160:]} == {1}
    assert {source for source, _ in cluster.rows[128:160]} == {0, 2}  # the stage's own mix
    with pytest.raises(InvalidArgument, match="from step 24"):
        loader.set_mix({"code": 1})


WRONG = {
    "unknown": ({"wb": 1}, "unknown source 'wb'; the sources are web, code, math"),
    "nothing": ({"web": 0}, "sum to 0"),
    "empty": ({}, "sum to 0"),
    "negative": ({"web": -0.5}, "web: must be a number from 0, got -0.5"),
    "nan": ({"web": float("nan")}, "web: must be a number from 0, got nan"),
    "infinite": ({"web": float("inf")}, "got inf"),
    "text": ({"web": "much"}, "web must be a number"),
    "list": ([0.5, 0.5], "a mapping of sources to weights"),
}


@for_each("case", WRONG)
def test_wrong_mixes_are_refused_and_change_nothing(folder: Path, case: str) -> None:
    weights: Any
    weights, message = WRONG[case]
    loader = loader_of_recipe(open_recipe(recipe_at(folder)))
    state = loader.state_dict()
    with pytest.raises(InvalidArgument, match=message):
        loader.set_mix(weights)
    assert loader.state_dict() == state


def test_stages_and_policies_that_a_mix_does_not_fit(folder: Path, tmp_path: Path) -> None:
    text = RECIPE.replace("BATCHING", "stratified").replace("{web: web, code: code, math: math}", (
        "{web: {path: web, max_epochs: 5}, code: {path: code, max_epochs: 5}, "
        "math: {path: math, max_epochs: 5}}"))  # fmt: skip
    for name in NAMES:
        text = text.replace(f"path: {name}", f"path: {folder / name}")
    counts = text.replace("{web: 0.7, code: 0.3}", "{web: {repeat: 2}, code: {choose: 5}}")
    for policy, content, weights, message in (
        ("continue", counts, {"web": 1}, "draw by repeat and choose, numbers of samples"),
        ("redistribute", text, {"web": 1}, "exhaustion redistribute divides"),
        ("error", text, {"math": 1}, "source math is exhausted in step 15"),
    ):
        path = tmp_path / f"{policy}.yaml"
        path.write_text(f"{content}\nexhaustion: {policy}\n")
        loader = loader_of_recipe(open_recipe(read_recipe(path)))
        before = loader.state_dict()
        with pytest.raises(InvalidArgument, match=message):
            loader.set_mix(weights)
        assert loader.state_dict() == before
    for policy, steps in (("continue", STEPS), ("stop", 11)):
        path = tmp_path / f"{policy}.yaml"
        path.write_text(f"{text}\nexhaustion: {policy}\n".replace("epochs: 5", "epochs: 4"))
        cluster = Cluster(read_recipe(path), 1, 8)
        cluster.run({1: {"math": 1, "web": 0.01, "code": 0.02}})
        served = Counter(source for source, _ in cluster.rows)
        assert served[2] <= 4 * cluster.first.layout.sizes[2].samples
        assert len(cluster.rows) // G >= steps or policy == "stop"
        check = check_receipts([cluster.state()], open_recipe(cluster.first.recipe).index)
        assert check.equal


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"web": (0.6, 1), "code": (0.6, 1)}, "the least shares sum to 1.2"),
        ({"web": (0, 0.5), "code": (0, 0.3), "math": (0, 0.1)}, "greatest shares sum to 0.9"),
    ],
)
def test_bounds_that_no_weights_fit(
    folder: Path, bounds: dict[str, tuple[float, float]], message: str
) -> None:
    exact = tuple((name, *(Fraction(str(x)) for x in pair)) for name, pair in bounds.items())
    with pytest.raises(InvalidArgument, match=message):
        replace(recipe_at(folder), mix_bounds=exact)


def test_ranks_with_other_mixes_are_named(folder: Path) -> None:
    cluster = Cluster(recipe_at(folder), 2, 2)
    cluster.set_mix({"web": 1}, at=2)
    cluster.loaders[0].set_mix({"web": 1, "math": 1}, at=5)
    cluster.loaders[1].set_mix({"web": 1, "math": 2}, at=5)
    with pytest.raises(InvalidArgument, match="ranks 0 and 1 differ .* from sample 40 on"):
        join_states([loader.state_dict() for loader in cluster.loaders])


def test_states_that_are_damaged_or_of_another_past(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_at(folder)
    cluster = Cluster(recipe, 1, 8)
    cluster.run({2: {"math": 1}, 4: {"code": 2, "web": 1}}, 6)
    state = cluster.state()
    other = Cluster(recipe, 1, 8)
    other.run({2: {"math": 1}, 5: {"code": 2, "web": 1}}, 6)
    changed = replace(recipe, mix_changes=other.first.recipe.mix_changes)
    loader = loader_of_recipe(open_recipe(changed))
    before = loader.state_dict()
    with pytest.raises(InvalidArgument, match=r"other changes of the mix .* step 4 \(sample 32\)"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
    loader.load_state_dict(state, allow=("past",))
    part = state["recipe"]
    changes = part["mix_changes"]
    for change in (
        {"data": changes["data"][:-4]},
        {"data": "?"},
        {"changes": 3},
        {"sources": ["web", "code", "maths"]},
        {"sources": "web"},
    ):
        damaged = {**state, "recipe": {**part, "mix_changes": {**changes, **change}}}
        with pytest.raises(FormatError):
            loader_of_recipe(open_recipe(recipe)).load_state_dict(damaged)
    without = {**state, "recipe": {name: part[name] for name in ("text", "sources")}}
    with pytest.raises(FormatError, match="it has no mix_changes"):
        loader_of_recipe(open_recipe(recipe)).load_state_dict(without)
    # 16 bytes a source and change, at most
    assert len(changes["data"]) <= 16 * 3 * 2


def test_balanced_steps_after_a_change_are_those_of_a_run_that_had_it(folder: Path) -> None:
    """Rows are assigned by the lengths of the samples that the new mix draws."""
    cost, recipe = CostModel(linear=0, attention=1), recipe_at(folder)
    cluster = Cluster(recipe, 2, 2, balance=cost)
    cluster.run({2: {"math": 1, "code": 1}})
    changed = replace(recipe, mix_changes=cluster.first.recipe.mix_changes)
    straight = Cluster(changed, 2, 2, balance=cost)
    straight.run({})
    assert cluster.rows == straight.rows


def test_a_refused_state_leaves_the_mix_as_it_was(folder: Path) -> None:
    """Refused after its changes of the mix were taken: its samples are not those of the order."""
    cluster = Cluster(recipe_at(folder), 1, 8)
    cluster.run({2: {"math": 1}}, 6)
    state = cluster.state()
    order = {**state["order"], "last": "0" * 32}
    other = Cluster(recipe_at(folder), 1, 8)
    with pytest.raises(InvalidArgument, match="serves other samples"):
        other.first.load_state_dict({**state, "order": order})
    assert other.first.recipe.mix_changes is None
    other.run({})
    fresh = Cluster(recipe_at(folder), 1, 8)
    fresh.run({})
    assert other.rows == fresh.rows


def test_a_state_whose_run_ends_before_this_position_loads_or_changes_nothing(
    folder: Path,
) -> None:
    """The mix of the state uses up a source; this loader is past the end that this gives."""
    recipe = replace(recipe_at(folder), exhaustion="stop", batch=BatchSchedule.constant(4))
    recipe = replace(
        recipe, sources=tuple(replace(source, max_epochs=1) for source in recipe.sources)
    )

    def at(steps: int) -> Cluster:
        cluster = Cluster(recipe, 1, 4)
        cluster.run({}, steps)
        return cluster

    ahead, other = at(20), at(1)
    other.set_mix({"math": 1})
    other.run({}, 1)
    state, before = other.state(), ahead.state()
    end = other.first.index.num_samples
    assert end < ahead.first.consumed_samples < ahead.first.index.num_samples
    order = {**state["order"], "last": "0" * 32}
    with pytest.raises(InvalidArgument, match="serves other samples"):
        ahead.first.load_state_dict({**state, "order": order})
    assert ahead.state() == before
    straight = at(20)
    for cluster in (ahead, straight):  # the iteration goes on
        cluster.run({}, 3)
    assert ahead.rows == straight.rows
    ahead.first.load_state_dict(state)
    assert ahead.first.index.num_samples == end
    ahead.batches, ahead.rows, other.rows = [iter(ahead.first)], [], []
    for cluster in (ahead, other):
        cluster.run({})
    assert ahead.rows == other.rows
    assert len(ahead.rows) == end - 8


def test_a_sampler_that_a_user_holds_follows_the_state(folder: Path) -> None:
    """As one that StatefulDataLoader was given: it is replaced only where it cannot serve."""
    recipe = recipe_at(folder)
    changed, other = Cluster(recipe, 1, 8), Cluster(recipe, 1, 8)
    changed.set_mix({"math": 1})
    changed.run({}, 2)
    sampler = other.first.sampler
    other.first.load_state_dict(changed.state())
    assert other.first.sampler is sampler
    assert len(list(sampler)) == STEPS - 2
    assert changed.first.index.num_samples == other.first.index.num_samples


def test_an_amended_run_keeps_its_changes(folder: Path) -> None:
    recipe = recipe_at(folder)
    cluster = Cluster(recipe, 2, 2)
    cluster.run({2: {"math": 1, "web": 3}, 9: {"code": 1}}, 2 * 10)
    cluster.set_mix({"web": 1}, at=12)
    consumed = cluster.first.consumed_samples
    run = amend(cluster.first.layout, consumed_samples=consumed, stages=[recipe.stages[1]])
    assert run.mix_changes is not None
    assert len(run.mix_changes) == 2
    check_past(cluster.first.layout, plan_recipe(run), consumed)
    resumed = Cluster(run, 4, 2, cluster.state())
    resumed.run({})
    assert check_receipts([resumed.state()], open_recipe(run).index).equal
    with pytest.raises(InvalidArgument, match="other changes of the mix"):
        check_past(cluster.first.layout, plan_recipe(recipe), consumed)


def test_an_earlier_state_ends_later_changes(folder: Path) -> None:
    """A loader that goes back to a state serves what a new loader serves from it."""
    recipe = recipe_at(folder)
    cluster = Cluster(recipe, 1, 8)
    cluster.run({}, 3)
    state = cluster.state()
    cluster.run({4: {"math": 1}}, 3)
    cluster.set_mix({"code": 1}, at=9)
    cluster.first.load_state_dict(state)
    assert cluster.first.recipe.mix_changes is None
    cluster.batches, cluster.rows = [iter(cluster.first)], []
    cluster.run({})
    again = Cluster(recipe, 1, 8, state)
    again.run({})
    assert cluster.rows == again.rows


def test_a_run_opened_with_changes_goes_on_with_those_made_since(folder: Path) -> None:
    before = Cluster(recipe_at(folder), 1, 8)
    before.set_mix({"math": 1}, at=3)
    given = replace(recipe_at(folder), mix_changes=before.first.recipe.mix_changes)
    for at in (9, None):  # a change to come, and one that is over
        cluster = Cluster(given, 1, 8)
        cluster.run({}, 5)
        cluster.set_mix({"web": 1, "math": 2}, at=at)
        cluster.run({}, 2)
        resumed = Cluster(given, 1, 8, cluster.state())
        made = len(cluster.rows)
        cluster.run({})
        resumed.run({})
        assert cluster.rows[made:] == resumed.rows
    other = replace(recipe_at(folder), mix_changes=cluster.first.recipe.mix_changes)
    cluster = Cluster(given, 1, 8)
    cluster.run({}, 1)
    cluster.set_mix({"code": 1}, at=4)
    with pytest.raises(InvalidArgument, match="sets changes of the mix for steps to come"):
        Cluster(other, 1, 8, cluster.state())


def test_changes_set_for_later_end_with_the_stage_amended(folder: Path) -> None:
    cluster = Cluster(recipe_at(folder), 1, 8)
    cluster.run({}, 8)
    cluster.set_mix({"math": 1}, at=12)
    stage = replace(recipe_at(folder).stages[1], name="other")
    changed = amend(cluster.first.layout, consumed_samples=8 * G, stages=[stage])
    resumed, straight = Cluster(changed, 1, 8, cluster.state()), Cluster(changed, 1, 8)
    resumed.run({})
    straight.run({})
    assert straight.rows[8 * G :] == resumed.rows
    assert "mix_changes" not in to_mapping(changed)
    assert "mix_changes" not in str(make_lock(changed).content)


def test_changes_set_for_later_are_not_taken_into_another_stage(folder: Path) -> None:
    recipe = recipe_at(folder)
    cluster = Cluster(recipe, 1, 8)
    cluster.run({}, 2)
    cluster.set_mix({"math": 1}, at=5)
    first, *others = recipe.stages
    shorter = replace(first, length=Target(kind="iterations", value=Fraction(3)))
    loader = loader_of_recipe(open_recipe(replace(recipe, stages=(shorter, *others))))
    before = loader.state_dict()
    with pytest.raises(InvalidArgument, match="changes the mix at step 5"):
        loader.load_state_dict(cluster.state())
    assert loader.state_dict() == before


def test_the_mix_cannot_change_under_a_dataset(folder: Path) -> None:
    loader = loader_of_recipe(open_recipe(recipe_at(folder)))
    loader.set_mix({"math": 1}, at=2)
    state = loader.state_dict()
    loader.dataset()
    loader.load_state_dict(state)
    with pytest.raises(InvalidArgument, match=r"cannot change after dataset\(\)"):
        loader.set_mix({"web": 1})
    assert loader.state_dict() == state


def test_a_controller_gets_statistics_and_sets_the_mix(folder: Path) -> None:
    cluster = Cluster(recipe_at(folder), 1, 8)
    loader = cluster.first
    cluster.run({}, 4)
    loader.report_loss("web", 2.0, tokens=3)
    loader.report_loss(0, 4.0)
    rows = loader.mix_statistics()
    assert [row.source for row in rows] == list(NAMES)
    served = Counter(source for source, _ in cluster.rows)
    assert [row.samples for row in rows] == [served[k] for k in range(3)]
    assert (rows[0].loss, rows[0].reports, rows[1].loss, rows[1].steps) == (2.5, 2, None, 4)
    assert [round(row.weight, 6) for row in rows] == [0.7, 0.3, 0]
    step = loader.control_mix(lambda rows: {row.source: row.loss or 1 for row in rows})
    assert step == 4
    assert [round(row.weight, 3) for row in loader.mix_statistics()] == [0.556, 0.222, 0.222]
    assert loader.mix_statistics()[0].reports == 0
    assert loader.control_mix(lambda _: None) is None
    for source, loss in (("x", 1.0), (3, 1.0), ("web", float("nan"))):
        with pytest.raises(InvalidArgument):
            loader.report_loss(source, loss)
    several = Cluster(recipe_at(folder), 2, 2)
    with pytest.raises(InvalidArgument, match="broadcast must be given with 2 ranks"):
        several.first.control_mix(lambda _: {"web": 1})
    sent: list[Any] = []
    for each in several.loaders:
        each.control_mix(
            lambda _: {"math": 1},
            broadcast=lambda mix: sent.append(mix) or sent[0],  # type: ignore[func-returns-value]
        )
    assert sent == [{"math": 1}, None]
    several.run({})
    assert {source for source, _ in several.rows[:128]} == {2}


def test_bounds_of_the_recipe_hold(folder: Path) -> None:
    third = Fraction(1, 3)
    recipe = replace(recipe_at(folder), mix_bounds=(("web", third, Fraction(1, 2)),))
    loader = loader_of_recipe(open_recipe(recipe))
    loader.set_mix({"web": 1, "code": 1, "math": 1})
    for web in (0.2, 2.5):
        with pytest.raises(InvalidArgument, match=r"out of its mix_bounds \[0.333333, 0.5\]"):
            loader.set_mix({"web": web, "code": 1, "math": 1})
    # shares that are no whole number of units, at their bounds
    bounds = tuple(
        (name, Fraction(n, 7), Fraction(n, 7)) for name, n in zip(NAMES, (3, 2, 2), strict=True)
    )
    loader = loader_of_recipe(open_recipe(replace(recipe, mix_bounds=bounds)))
    loader.set_mix({"web": 3, "code": 2, "math": 2})


def test_a_change_at_the_end_of_the_run_is_refused(folder: Path) -> None:
    recipe = recipe_at(folder)
    loader = loader_of_recipe(open_recipe(recipe))
    loader.set_mix({"web": 1}, at=STEPS - 1)
    changes = loader.recipe.mix_changes
    assert changes is not None
    shorter = replace(recipe.stages[1], length=Target(kind="iterations", value=Fraction(7)))
    with pytest.raises(InvalidArgument, match="changes at sample 184"):
        open_recipe(replace(recipe, stages=(recipe.stages[0], shorter), mix_changes=changes))


def test_a_file_of_changes_gives_the_same_run(folder: Path, tmp_path: Path) -> None:
    cluster = Cluster(recipe_at(folder), 1, 8)
    cluster.run({3: {"math": 1, "code": 2}, 17: {"web": 1}})
    changes = cluster.first.recipe.mix_changes
    assert changes is not None
    changes.write(tmp_path / "mix.npy")
    (tmp_path / "run.yaml").write_text(
        RECIPE.replace("BATCHING", "stratified").replace("{web: web, code: code, math: math}", (
            f"{{web: {folder / 'web'}, code: {folder / 'code'}, math: {folder / 'math'}}}"))
        + "mix_changes: mix.npy\n"
    )  # fmt: skip
    again = Cluster(read_recipe(tmp_path / "run.yaml"), 2, 4)
    again.run({})
    assert again.rows == cluster.rows
    assert again.first.recipe.mix_changes == changes
    for shape, dtype in (((2, 3), np.int64), ((2, 4), np.int32), ((2, 4), np.int64), (4, np.int64)):
        np.save(tmp_path / "mix.npy", np.ones(shape, dtype))
        with pytest.raises(FormatError, match="not the changes of a mix"):
            read_recipe(tmp_path / "run.yaml")
    (tmp_path / "mix.npy").write_text("0 1 1 1")
    with pytest.raises(FormatError, match="mix.npy: not an array in .npy format"):
        read_recipe(tmp_path / "run.yaml")
    (tmp_path / "mix.npy").unlink()
    with pytest.raises(MissingFile, match="mix.npy: the file of mix changes is not there"):
        read_recipe(tmp_path / "run.yaml")


@for_each(
    ("rows", "wrong"),
    [
        ([[0, 2**31, 0], [2**60, 0, 2**31]], ""),
        ([[0, 2**31, 0], [2**60 + 1, 0, 2**31]], "samples from 0 to"),
        ([[-1, 2**31, 0], [5, 0, 2**31]], "samples from 0 to"),
        ([[3, 2**31, 0], [3, 0, 2**31]], "samples that increase"),
        ([[0, 2**31, 0], [4, 0, 2**31], [3, 0, 2**31], [9, 0, 2**31]], "samples that increase"),
        ([[0, 2**31 - 1, 0], [5, 0, 2**31]], "weights from 0 that sum to"),
        ([[0, 2**31 + 1, -1]], "weights from 0 that sum to"),
    ],
)
def test_rows_of_a_file_of_changes(tmp_path: Path, rows: list[list[int]], wrong: str) -> None:
    path = str(tmp_path / "mix.npy")
    np.save(path, np.array(rows, np.int64))
    if wrong:
        with pytest.raises(FormatError, match=f"mix.npy: not .* it must have {wrong}"):
            MixChanges.read(path)
    else:
        assert MixChanges.read(path).to_array().tolist() == rows


@for_each(
    ("begin", "piece", "rows"),
    [(0, 9, (0, 3)), (0, 14, (0, 3)), (0, 15, (1, 3)), (0, 29, (1, 3)), (0, 30, (2, 3)),
     (15, 15, (1, 3)), (16, 16, (2, 3)), (31, 31, None)],
)  # fmt: skip
def test_a_part_begins_with_the_change_in_force(
    begin: int, piece: int, rows: tuple[int, int] | None
) -> None:
    first = Stratified(shares=(1, 1))
    table = np.array([[10, 2**31, 0], [15, 0, 2**31], [30, 2**30, 2**30]])
    changes = MixChanges.from_array(["a", "b"], table, "")
    mixing = changes.mixing(begin, 99, piece, ["a", "b"], first, 1)
    assert (mixing and mixing.rows) == rows


def test_records_of_changes_are_equal_by_their_content() -> None:
    table = np.array([[10, 2**31, 0], [15, 1, 2**31 - 1]])
    one, other = (MixChanges.from_array(["a", "b"], table, "") for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))
    assert one.before(15) != one
    assert repr(one) == "MixChanges(2 of a, b)"


def test_weights_of_exhausted_sources_alone_are_refused() -> None:
    table = np.array([[10, 2**31, 0], [15, 2**31 - 1, 1], [20, 2**31, 0]])
    changes = MixChanges.from_array(["a", "b"], table, "")
    assert changes.before(10).mixing(0, 99, 0, ["b"], None, 1) is None
    for begin, first in ((0, 10), (16, 20)):
        with pytest.raises(InvalidArgument, match=f"from sample {first} on has weights of exhaus"):
            changes.mixing(begin, 99, begin, ["b"], None, 1)
    assert changes.before(20).mixing(11, 99, 15, ["b"], None, 1) is not None


def test_changes_in_a_recipe_file_are_in_a_file(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_at(folder)
    table = np.array([[8, 2**31, 0, 0]])
    empty, changes = MixChanges.empty(NAMES), MixChanges.from_array(NAMES, table, "")
    assert "mix_changes" not in to_mapping(replace(recipe, mix_changes=empty))
    for kept in (changes.write(tmp_path / "mix.npy"), empty.write(tmp_path / "none.npy")):
        written = to_mapping(replace(recipe, mix_changes=kept))["mix_changes"]
        assert written == {"file": kept.path, "sources": list(NAMES)}
    with pytest.raises(InvalidArgument, match="mix_changes .* must be a file, got changes that no"):
        to_mapping(replace(recipe, mix_changes=changes))


PROCESS = """
import sys
import torch.distributed as dist
from megaindex.loader import Loader, join_states, loader_of_recipe
from megaindex.recipe import open_recipe, read_recipe

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)

def broadcast(mix):
    box = [mix]
    dist.broadcast_object_list(box, src=0)
    return box[0]

recipe = read_recipe(f"{folder}/stratified.yaml")
loader = loader_of_recipe(open_recipe(recipe), data_parallel_rank=rank, data_parallel_size=2)
batches = iter(loader)
while True:
    if loader.next_step % 5 == 1 and loader.consumed_samples % 8 == 0:
        loader.report_loss("web", 2.0 + rank)  # those of rank 0 count
        loader.control_mix(
            lambda rows: {row.source: row.weight + (row.loss or 1) for row in rows},
            broadcast=broadcast,
        )
    if next(batches, None) is None:
        break
states = [None, None]
dist.all_gather_object(states, loader.state_dict())
joined = join_states(states)
print(joined["recipe"]["mix_changes"]["changes"], joined["receipt"]["samples"])
dist.destroy_process_group()
"""


def test_a_known_past_only_postpones_the_earliest_repeat(folder: Path) -> None:
    bounds = (("math", Fraction(0), Fraction(3, 4)),)
    recipe = replace(recipe_at(folder), mix_bounds=bounds, exhaustion="repeat")
    layout = plan_recipe(recipe)
    steps = [earliest_repeats(layout, consumed)[2].first_step for consumed in (0, 8, 64, 120, 136)]
    assert None not in steps
    assert steps == sorted(steps, key=lambda step: step or 0)
    assert steps[0] != steps[-1]


@pytest.mark.slow
def test_two_processes_share_the_mix_of_a_controller(folder: Path, tmp_path: Path) -> None:
    (folder / "store").unlink(missing_ok=True)
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs == ["5 192\n", "5 192\n"]


def test_the_earliest_repeat_under_any_mix(folder: Path) -> None:
    """No mix within the bounds repeats a source before; drawing it alone does at that step."""
    recipe = recipe_at(folder)
    plan = make_plan(recipe, mix_bounds=True)
    assert [row.source for row in plan.mix_bounds] == list(NAMES)
    for number, row in enumerate(plan.mix_bounds):
        loader = loader_of_recipe(open_recipe(recipe))
        for step in (0, 16):
            loader.set_mix({row.source: 1}, at=step)
        layout, size = loader.layout, loader.layout.sizes[number].samples
        first = make_plan(layout, mix_bounds=True).mix_bounds[number].planned_step
        assert row.first_step == first == (None if size >= STEPS * G else size // G)
    half = replace(recipe, mix_bounds=(("math", Fraction(0), Fraction(1, 2)),))
    bound = make_plan(half, mix_bounds=True).mix_bounds[2].first_step
    loader = loader_of_recipe(open_recipe(half))
    for step in (0, 16):
        loader.set_mix({"math": 1, "web": 1}, at=step)
    rows = make_plan(loader.layout, mix_bounds=True).mix_bounds
    assert bound is not None
    assert rows[2].planned_step is not None
    assert bound <= rows[2].planned_step <= bound + 2
