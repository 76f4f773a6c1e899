"""Loaders of locked runs, which are made from the samples of the lock alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

pytest.importorskip("torch")

import torch
from support.command_line import cli
from support.folders import inside
from support.locked_runs import RUNS, write_inputs

from megaindex import Skip
from megaindex.builders.recipe import open_recipe
from megaindex.errors import FormatError, InvalidArgument
from megaindex.loader import (
    Loader,
    MicroBatchSampler,
    check_receipts,
    join_states,
    loader_of_recipe,
)
from megaindex.lock import make_lock, open_run, read_lock
from megaindex.lock.lock_file import lock_text
from megaindex.lock.settings import checked_settings
from megaindex.recipe import Recipe, read_recipe
from megaindex.run.from_settings import run_of_settings
from megaindex.settings.batch_schedule import BatchSchedule

RECIPES = {"recipe": "run.yaml", "lengths": "lengths.yaml", "past": "past.yaml"}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    with inside(folder):
        for name, flags in RUNS.items():
            assert cli("lock", *flags.split(), "--out", f"{name}.lock")[::2] == (0, "")
        yield


def by_settings(name: str, rank: int, ranks: int) -> Loader:
    """The loader of a run of its settings, without the lock."""
    settings = checked_settings(read_lock(f"{name}.lock")).settings
    if isinstance(settings, Recipe):
        loader: Loader = loader_of_recipe(
            open_recipe(settings), data_parallel_rank=rank, data_parallel_size=ranks
        )
        return loader
    run = run_of_settings(settings)
    sampler = MicroBatchSampler(
        num_samples=run.index.num_samples,
        train_samples=run.num_samples if run.skips is None else run.skips.end,
        consumed_samples=int(run.step_bounds[run.past_steps]),
        global_batch_size=settings.batch,
        tail="pad" if run.masked_rows else "drop",
        index=run.index,
        micro_batch_size=settings.micro_batch_size or 1,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
    )
    return Loader(run.index, sampler)


def equal(ours: Any, theirs: Any) -> bool:
    """Compare two batches, field by field."""
    same = [torch.equal(ours[key], theirs[key]) for key in ours]
    return ours.keys() == theirs.keys() and all(same)


def ranks_of(name: str) -> tuple[int, ...]:
    return (2,) if name == "lengths" else (1, 2) if name in RECIPES else (1,)


@pytest.mark.slow
@for_each("name", [name for name in RUNS if name not in ("amended", "extended")])
def test_the_batches_are_those_of_the_settings(name: str) -> None:
    for ranks in ranks_of(name):
        for rank in range(ranks):
            ours = open_run(f"{name}.lock", data_parallel_rank=rank, data_parallel_size=ranks)
            theirs = by_settings(name, rank, ranks)
            assert len(ours) == len(theirs)
            assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_rounds_of_an_evaluation_are_those_of_the_recipe() -> None:
    for rank in range(2):
        ranks: dict[str, Any] = {"data_parallel_rank": rank, "data_parallel_size": 2}
        for more in ({}, {"micro_batch_size": 1}):
            ours = list(open_run("recipe.lock", **ranks, **more).evaluation())
            theirs = loader_of_recipe(open_recipe(read_recipe("run.yaml")), **ranks, **more)
            pairs = zip(ours, theirs.evaluation(), strict=True)
            assert ours
            assert all(equal(a, b) for a, b in pairs)
    for name in ("neox", "past"):  # whose rounds go on, and without one
        with pytest.raises(InvalidArgument, match="must have an evaluation"):
            open_run(f"{name}.lock").evaluation()


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_of_the_recipe_is_continued_by_its_lock(name: str) -> None:
    states = []
    for rank in range(2):
        loader = loader_of_recipe(
            open_recipe(read_recipe(RECIPES[name])), data_parallel_rank=rank, data_parallel_size=2
        )
        batches = iter(loader)
        for _ in range(7):
            next(batches)
        states.append(json.loads(json.dumps(loader.state_dict())))
        rank_of = {"data_parallel_rank": rank, "data_parallel_size": 2}
        rest = open_run(f"{name}.lock", **rank_of, read_ahead=0)
        rest.load_state_dict(states[-1])
        assert all(equal(a, b) for a, b in zip(rest, batches, strict=True))
    other = "recipe" if name == "past" else "past"
    with pytest.raises((InvalidArgument, FormatError)):
        open_run(f"{other}.lock", data_parallel_size=2).load_state_dict(states[0])
    for change in ({"recipe": 3}, {"recipe": {}}, {"content": 3}, {"identity": 3}):
        with pytest.raises(
            FormatError, match="^not the (state|recipe) of a loader|^not the recipe"
        ):
            open_run(f"{name}.lock", data_parallel_size=2).load_state_dict({**states[0], **change})


def test_other_tokens_or_targets_are_not_continued() -> None:
    loader = loader_of_recipe(open_recipe(read_recipe("run.yaml")), data_parallel_size=2)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    digests = state["content"][4]["targets"]
    digests["sampled"] = digests["sampled"][:-1] + ("1" if digests["sampled"][-1] != "1" else "2")
    with pytest.raises(InvalidArgument, match="labels or loss mask differ"):
        open_run("recipe.lock", data_parallel_size=2).load_state_dict(state)


def test_settings_do_not_decide() -> None:
    """They are text to show: a lock of other settings gives the same batches."""
    content = json.loads(json.dumps(read_lock("flags.lock").content))
    content["settings"]["run"]["seed"] += 1
    Path("edited.lock").write_bytes(lock_text(content))
    pairs = zip(open_run("edited.lock"), open_run("flags.lock"), strict=True)
    assert all(equal(a, b) for a, b in pairs)


@for_each(
    ("bounds", "masked", "changes", "sizes"),
    [
        ([0, 4, 8, 12], 0, [], [4]),
        ([0, 4, 8, 9], 3, [], [4]),
        ([0, 4, 8, 9], 0, [], [1, 4]),
        ([0, 4, 6, 10, 12], 0, [], [2, 4]),
        ([40, 40, 40, 44, 48], 0, [], [4]),
        ([40, 40, 44, 50], 0, [44], [4, 6]),
        ([0, 4, 8, 14, 20], 0, [8], [4, 6]),
    ],
)
def test_a_schedule_of_listed_steps(
    bounds: list[int], masked: int, changes: list[int], sizes: list[int]
) -> None:
    listed = np.array(bounds, np.int64)
    schedule = BatchSchedule.of_steps(listed, masked, changes)
    assert sorted({*schedule.sizes()}) == sizes
    rows = [*bounds[:-1], bounds[-1] + masked]
    first = (
        bounds.index(rows[0])
        if rows[0] == 0
        else max(k for k, b in enumerate(bounds) if b == rows[0])
    )
    for step in range(first, len(bounds) - 1):
        assert schedule.samples_after(1, bounds[step]) == rows[step + 1]
        assert schedule.samples_after(step - first, bounds[first]) == bounds[step]
        for end in (bounds[step], bounds[step] + 1):
            steps = schedule.iterations_within(end, bounds[first])
            assert steps == np.searchsorted(rows, end, "right") - 1 - first


@pytest.mark.parametrize("first", [0, 3, 5, 8, 9])
def test_steps_begin_where_their_shape_changes(first: int) -> None:
    for bounds in ([0, 4, 8], [first, first, first + 4]):
        with pytest.raises(InvalidArgument, match=f"no step begins with sample {first}"):
            BatchSchedule.of_steps(np.array(bounds), 0, [first])
    with pytest.raises(InvalidArgument, match="must have a step"):
        BatchSchedule.of_steps(np.array([first]))


@for_each("name", RUNS)
def test_states_name_the_identity_of_the_lock(name: str) -> None:
    ours = read_lock(f"{name}.lock").identity
    size = {"data_parallel_size": 2} if name in RECIPES else {}
    loader = open_run(f"{name}.lock", **size)
    assert loader.identity == loader.state_dict()["identity"] == ours
    if name in RECIPES:
        theirs = loader_of_recipe(open_recipe(read_recipe(RECIPES[name])), **size)
        assert theirs.state_dict()["identity"] == ours


def test_changes_that_no_file_holds_have_no_identity() -> None:
    loader = loader_of_recipe(open_recipe(read_recipe("past.yaml")), data_parallel_size=2)
    before = loader.state_dict()
    loader.set_mix({"web": 1, "code": 1}, 5006)
    assert loader.state_dict()["identity"] is None
    loader.load_state_dict(before)
    assert loader.identity == read_lock("past.lock").identity


def test_moved_samples_that_fill_no_step_are_not_served() -> None:
    """Of a schedule whose next step would be larger than the last one."""
    make_lock(
        data_path=["data/web"], sequence_length=8, batch_schedule="0:4 320:8", train_iters=10,
        eval_iters=0, skip=[Skip(steps="0", move=True)],
    ).write("moved.lock")  # fmt: skip
    steps = read_lock("moved.lock").content["subsets"]["train"]["steps"]
    loader = open_run("moved.lock")
    rows = sum(batch["tokens"].shape[0] for batch in loader)
    assert (steps, rows, loader.consumed_samples) == ([[0, 4, 10]], 36, 40)


@pytest.mark.parametrize("samples", [30, 32])
def test_a_run_resumed_inside_a_batch_is_opened(samples: int) -> None:
    """The steps made need not be divided by its ranks."""
    make_lock(
        data_path=["data/web"], sequence_length=8, train_samples=samples, global_batch_size=4,
        consumed_samples=6, eval_iters=0, micro_batch_size=2, data_parallel_size=2,
    ).write(f"inside{samples}.lock")  # fmt: skip
    loader = open_run(f"inside{samples}.lock")
    assert loader.consumed_samples == 6
    assert sum(batch["tokens"].shape[0] for batch in loader) == (samples - 6) // 4 * 2
    assert loader.consumed_samples == 6 + (samples - 6) // 4 * 4


def of_recipe(name: str, **ranks: Any) -> Loader:
    return loader_of_recipe(open_recipe(read_recipe(RECIPES[name])), **ranks)


def of_lock(name: str, **ranks: Any) -> Loader:
    return open_run(f"{name}.lock", **ranks)


MIXES: dict[str, list[tuple[dict[str, float], int | None]]] = {
    "recipe": [({"web": 1, "code": 3}, None), ({"code": 1, "web": 1}, 4)],
    "past": [({"web": 1, "code": 1}, None), ({"code": 1}, 5008)],
}


def cluster(make: Any, name: str, ranks: int, state: Any = None) -> list[Loader]:
    loaders = [
        make(name, data_parallel_rank=rank, data_parallel_size=ranks) for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def rows_of(loaders: Sequence[Loader], rounds: int | None = None) -> list[list[int]]:
    """Sorted tokens of the rows that all ranks serve."""
    found: list[list[int]] = []
    for batches in itertools.islice(zip(*loaders, strict=True), rounds):
        found += [row for batch in batches for row in batch["tokens"].tolist()]
    return sorted(found)


@pytest.mark.parametrize("first", [of_recipe, of_lock])
@pytest.mark.parametrize("name", MIXES)
def test_the_mix_changes_under_recipe_and_lock(name: str, first: Any) -> None:
    """States of one continue under the other, on other ranks, and serve what one loader would."""
    second = of_lock if first is of_recipe else of_recipe
    whole, parts = cluster(of_recipe, name, 1), cluster(first, name, 2)
    for mix in MIXES[name]:
        steps = {loader.set_mix(*mix) for loader in (*whole, *parts)}
        assert len(steps) == 1
    expected = rows_of(whole, 12)
    served = rows_of(parts, 4)
    assert {loader.identity for loader in parts} == {None}
    for make, ranks, rounds in ((second, 1, 2), (first, 2, 1)):
        state = json.loads(json.dumps(join_states([loader.state_dict() for loader in parts])))
        assert state["recipe"]["mix_changes"]["changes"] == 2
        parts = cluster(make, name, ranks, state)
        served += rows_of(parts, rounds)
    assert sorted(served) == expected
    assert check_receipts([loader.state_dict() for loader in parts], parts[0].index).equal
    assert parts[0].ledger.totals(6)[0].samples == whole[0].ledger.totals(6)[0].samples
    theirs, ours = (each.mix_statistics() for each in (whole[0], parts[0]))
    assert [s.weight for s in theirs] == [s.weight for s in ours]


def test_a_state_without_changes_undoes_those_of_the_loader() -> None:
    fresh, lock = of_lock("past", data_parallel_size=2), of_lock("past", data_parallel_size=2)
    for state in (of_recipe("past", data_parallel_size=2).state_dict(), fresh.state_dict()):
        lock.set_mix({"code": 1})
        assert lock.identity is None
        lock.load_state_dict(state)
        assert lock.identity == fresh.identity
        assert lock.state_dict() == fresh.state_dict()
    changed = of_recipe("past", data_parallel_size=2)
    changed.set_mix({"code": 1})
    changed.load_state_dict(fresh.state_dict())
    assert changed.identity == fresh.identity
    assert all(equal(a, b) for a, b in zip(changed, fresh, strict=True))


def test_a_controller_sets_the_mix_of_a_lock() -> None:
    loader = of_lock("past", data_parallel_size=2)
    loader.report_loss("code", 2.5, 4)
    (code,) = [each for each in loader.mix_statistics() if each.source == "code"]
    assert (code.reports, code.loss) == (1, 2.5)
    sent = loader.control_mix(lambda found: {found[0].source: 1}, broadcast=lambda each: each)
    assert sent == loader.next_step
    assert all(each.reports == 0 for each in loader.mix_statistics())
    assert next(each.weight for each in loader.mix_statistics()) == 1


def test_a_mix_that_the_lock_does_not_know_is_not_changed() -> None:
    """Of a framework, or of settings that give other samples than the lock."""
    with pytest.raises(InvalidArgument, match="the run must be that of a recipe"):
        open_run("flags.lock").set_mix({"web": 1})
    content = json.loads(json.dumps(read_lock("past.lock").content))
    content["settings"]["recipe"]["seed"] += 1
    Path("edited.lock").write_bytes(lock_text(content))
    loader = open_run("edited.lock", data_parallel_size=2)
    before = loader.state_dict()
    with pytest.raises(FormatError, match="edited.lock: its settings give the run of identity"):
        loader.set_mix({"web": 1})
    assert loader.state_dict() == before


def test_changes_of_the_mix_are_not_lost() -> None:
    """A loader of arrays knows no recipe in which the mix could change."""
    loader = of_recipe("past", data_parallel_size=1)
    loader.set_mix({"web": 1, "code": 1}, 5006)
    state = loader.state_dict()
    alone = Loader(loader.index, loader.sampler)
    with pytest.raises(InvalidArgument, match="mix_changes: the state changes the mix"):
        alone.load_state_dict(state)


def test_files_that_go_away_do_not_end_a_run(tmp_path: Path) -> None:
    """The identity is that of the files that were read when the recipe was opened."""
    ids = tmp_path / "ids.txt"
    ids.write_text("1 5 9")
    recipe = f"{Path('run.yaml').read_text()}skip: [{{documents: {ids}, source: web}}]\n"
    Path("skipping.yaml").write_text(recipe)
    lock = make_lock(read_recipe("skipping.yaml"))
    loader = loader_of_recipe(open_recipe(read_recipe("skipping.yaml")), data_parallel_size=2)
    ids.unlink()
    next(iter(loader))
    assert loader.state_dict()["identity"] == lock.identity


@pytest.mark.parametrize("name", ["identity", "targets", "evaluation"])
def test_the_lock_decides_what_is_trained_on(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: the lock decides it"):
        open_run("recipe.lock", **{name: None})


@pytest.mark.parametrize("name", RECIPES)
def test_what_was_served_is_counted_as_by_the_recipe(name: str) -> None:
    ours = open_run(f"{name}.lock", data_parallel_size=2)
    theirs = loader_of_recipe(open_recipe(read_recipe(RECIPES[name])), data_parallel_size=2)
    for loader in (ours, theirs):
        for _ in zip(range(9), loader, strict=False):
            pass
    assert ours.samples_consumed == theirs.samples_consumed > 0
    assert ours.tokens_consumed == theirs.tokens_consumed
    assert ours.recorder is not None
    assert theirs.recorder is not None
    assert ours.recorder.state_dict() == theirs.recorder.state_dict()
