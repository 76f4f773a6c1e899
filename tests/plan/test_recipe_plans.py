"""Plans of recipes: the figures of plans of settings, counted in the index of the run."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.audit import run_of_settings
from megaindex.errors import InvalidArgument
from megaindex.index.skips import Skip
from megaindex.lock import make_lock
from megaindex.lock.opening import run_of_lock
from megaindex.plan import Plan, RecipePlan, Row, make_plan
from megaindex.plan.render import unseen_text
from megaindex.recipe import open_recipe, read_recipe
from megaindex.run.from_recipe import run_of_opened
from megaindex.settings import batch_schedule
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeEvaluation, RecipeSource, RecipeStage, Stream
from megaindex.settings.recipe_file import recipe_of, to_mapping
from megaindex.settings.run_settings import Target

FIGURES = (
    "order", "variance_buffer", "tail", "train_iters", "global_batch_size", "tokens_per_epoch",
    "samples_per_epoch", "samples_consumed", "tokens_consumed", "samples_built",
    "samples_left_over", "num_epochs_built", "max_train_iters_without_repeat",
    "max_train_iters_same_epochs",
)  # fmt: skip
ROW = (
    "split", "source", "path", "tokens_per_epoch", "samples_per_epoch", "requested", "drawn",
    "drawn_bounds", "drawn_by_blend", "built", "epochs", "distinct", "repeated", "coverage_method",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(1)
    for name, documents in (("web", 40), ("code", 70), ("books", 25)):
        write_corpus(path / name, rng.integers(1, 90, documents))
    return path


def run(folder: Path, *stages: RecipeStage, **settings: Any) -> Recipe:
    names = list(dict.fromkeys(stream.source for stage in stages for stream in stage.streams))
    own = settings.pop("own", {})
    sources = tuple(
        RecipeSource(name=name, path=str(folder / name), **own.get(name, {})) for name in names
    )
    values = {"sequence_length": 16, "batch": BatchSchedule.constant(4), **settings}
    return Recipe(sources=sources, stages=stages, **values)


def stage(name: str, length: tuple[Any, int | Fraction] | None, **shares: Any) -> RecipeStage:
    settings = shares.pop("settings", {})
    streams = tuple(
        Stream(source=source, **(share if isinstance(share, dict) else {"proportion": share}))
        for source, share in shares.items()
    )
    target = None if length is None else Target(kind=length[0], value=Fraction(length[1]))
    return RecipeStage(name=name, streams=streams, length=target, **settings)


def planned(recipe: Recipe, **options: Any) -> RecipePlan:
    return make_plan(recipe, **options)


@for_each("seed", range(40))
def test_a_recipe_of_one_stage_has_the_plan_of_its_flags(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    order, length, batch = (rng.choice(c) for c in (["epoch", "window", "packed"], [8, 31], [1, 4]))
    names = rng.sample(["web", "code", "books"], rng.choice([1, 1, 2, 3]))
    weights = [rng.choice([1, 2, 0.5]) for _ in names]
    kind, value = rng.choice(
        [
            ("epochs", Fraction(rng.randint(1, 2))),
            ("iterations", rng.randint(1, 300 // batch)),
            ("samples", rng.randint(batch, 400)),
            ("tokens", rng.randint(batch * length, 9000)),
        ]
    )
    if kind == "epochs" and len(names) == 1:
        value /= rng.choice([1, 2])
    tail = "drop" if kind == "iterations" else rng.choice(["drop", "pad", "wrap"])
    coverage = rng.choice(["auto", "exact", "expected", "none"])
    recipe = run(
        folder,
        stage("all", (kind, value), **dict(zip(names, map(Fraction, weights), strict=True))),
        own={name: {"order": order} for name in names},
        sequence_length=length, batch=BatchSchedule.constant(batch), tail=tail,
    )  # fmt: skip
    paths = [str(folder / name) for name in names]
    blend = [word for pair in zip(weights, paths, strict=True) for word in pair]
    keys = {"iterations": "train_iters", "samples": "train_samples", "tokens": "train_tokens"}
    flags = make_plan(
        data_path=paths if len(paths) == 1 else blend, order=order, sequence_length=length,
        global_batch_size=batch, tail=tail, coverage=coverage, **{keys.get(kind, kind): value},
    )  # fmt: skip
    plan = planned(recipe, coverage=coverage)
    ours, theirs = plan.to_json(), flags.to_json()
    assert {key: ours[key] for key in FIGURES} == {key: theirs[key] for key in FIGURES}
    for own, other in zip(ours["datasets"], theirs["datasets"], strict=True):
        assert {key: own[key] for key in ROW} == {key: other[key] for key in ROW}
        for key in ("coverage", "coverage_documents"):
            assert own[key] == pytest.approx(other[key], abs=1e-12)
    reasons = [text.replace(f"{folder}/", "") for text in flags.check_failures]
    assert list(plan.check_failures) == reasons


def drawn(recipe: Recipe) -> tuple[np.ndarray, np.ndarray, list[int], np.ndarray]:
    """Source and sample of each position, samples of an epoch of each source, bounds of steps."""
    opened = open_recipe(recipe)
    layout = opened.layout
    source, sample = opened.index.origin(np.arange(layout.num_samples))
    return source, sample, [size.samples for size in layout.sizes], layout.steps().bounds


def repeats(source: np.ndarray, sample: np.ndarray, per_epoch: list[int]) -> bool:
    pairs = list(zip(source.tolist(), sample.tolist(), strict=True))
    return len(set(pairs)) < len(pairs) or any(k >= per_epoch[s] for s, k in pairs)


LONGER = {
    "one stage": [stage("all", ("iterations", 20), web=Fraction(2), code=Fraction(1))],
    "beyond an epoch": [stage("all", ("iterations", 70), web=Fraction(2), code=Fraction(1))],
    "two stages": [
        stage("a", ("iterations", 9), web=Fraction(1)),
        stage("b", ("iterations", 9), web=Fraction(1), books=Fraction(3)),
    ],
    "repeats before the last stage": [
        stage("a", ("iterations", 41), web=Fraction(1), code=Fraction(1, 9)),
        stage("b", ("iterations", 3), code=Fraction(1)),
    ],
    "restart": [
        stage("a", ("iterations", 5), web=Fraction(1), code=Fraction(1)),
        stage("b", ("iterations", 5), code=Fraction(3), web={"restart": True, "proportion": 1}),
    ],
    "batches of one source": [
        stage(
            "a",
            ("iterations", 9),
            web=Fraction(1),
            code=Fraction(2),
            settings={"batching": "per_stream"},
        )
    ],
    "random": [
        stage(
            "a",
            ("iterations", 9),
            web={"repeat": Fraction(1, 2)},
            code={"choose": 31},
            settings={"batching": "random"},
        )
    ],
    "epochs": [stage("a", ("epochs", 2), web={"repeat": Fraction(1)}, code={})],
}


@for_each("case", LONGER)
@for_each("exhaustion", ["repeat", "stop", "continue", "error"])
def test_limits_are_those_of_longer_and_shorter_runs(
    folder: Path, case: str, exhaustion: str
) -> None:
    recipe = run(folder, *LONGER[case], exhaustion=exhaustion)
    try:
        plan = planned(recipe)
    except InvalidArgument:  # a limit is reached
        assert exhaustion in ("error", "continue")
        return
    source, sample, per_epoch, _ = drawn(recipe)
    epochs = [max(1, -(-(sample[source == k].max(initial=-1) + 1) // n))
              for k, n in enumerate(per_epoch)]  # fmt: skip
    last = replace(recipe.stages[-1], length=Target(kind="iterations", value=Fraction(400)))
    longer = replace(
        recipe,
        stages=(*recipe.stages[:-1], last),
        exhaustion="stop" if exhaustion == "error" else exhaustion,
    )
    source, sample, per_epoch, bounds = drawn(longer)
    steps = bounds.size - 1

    def beyond(end: int) -> bool:
        many = [n * held for n, held in zip(epochs, per_epoch, strict=True)]
        return any(k >= many[s] for s, k in zip(source[:end], sample[:end], strict=True))

    once, same = plan.max_train_iters_without_repeat, plan.max_train_iters_same_epochs
    assert not repeats(source[: bounds[once]], sample[: bounds[once]], per_epoch)
    assert once == steps or repeats(
        source[: bounds[once + 1]], sample[: bounds[once + 1]], per_epoch
    )
    assert not beyond(bounds[same])
    assert same == steps or beyond(bounds[same + 1])


def test_draws_that_depend_on_the_length_have_no_limits(folder: Path) -> None:
    recipe = run(folder, LONGER["one stage"][0], exhaustion="redistribute")
    plan = planned(recipe)
    assert plan.max_train_iters_without_repeat is plan.max_train_iters_same_epochs is None
    assert plan.num_epochs_built == 1


def counted(recipe: Recipe) -> dict[tuple[str, int], Counter[int]]:
    """Times that each token is input, of each source in each piece of a stage."""
    opened = open_recipe(recipe)
    whole = run_of_opened(opened)
    found: dict[tuple[str, int], Counter[int]] = {}
    pieces = [range(p.first_sample, p.first_sample + p.num_samples) for p in opened.layout.stages]
    for number, piece in enumerate(pieces, 1):
        served = [np.zeros(int(source.lengths.sum()), np.int64) for source in whole.sources]
        starts = [np.concatenate(([0], np.cumsum(each.lengths))) for each in whole.sources]
        for block in whole.runs(piece.start, piece.stop):
            for source, document, offset, length in zip(*block[1:], strict=True):
                begin = int(starts[source][document]) + int(offset)
                served[source][begin : begin + int(length)] += 1
        for source, times in zip(whole.sources, served, strict=True):
            found[source.name, number] = Counter(times.tolist())
    return found


STAGED = {
    "epochs in turn": {"stages": [
        stage("a", ("iterations", 30), web=Fraction(1), code=Fraction(1)),
        stage("b", ("iterations", 40), web=Fraction(3), books=Fraction(1)),
    ]},
    "windows": {"own": {"web": {"order": "window"}}, "stages": [
        stage("a", ("iterations", 30), web=Fraction(1), code=Fraction(1)),
        stage("b", ("iterations", 40), web=Fraction(3), code=Fraction(1)),
    ]},
    "packed": {"own": {"web": {"order": "packed"}, "code": {"kind": "finetuning"}}, "stages": [
        stage("a", ("iterations", 30), web=Fraction(1), code=Fraction(1)),
        stage("b", ("iterations", 40), web=Fraction(3), code=Fraction(1)),
    ]},
    "lengths": {"stages": [
        stage("a", ("iterations", 20), web=Fraction(1), code=Fraction(2)),
        stage("b", ("iterations", 20), web=Fraction(1), settings={"sequence_length": 40}),
    ]},
    "steps left out": {"skip": (Skip(steps="3-7 25"),), "stages": [
        stage("a", ("iterations", 20), web=Fraction(1), code=Fraction(2)),
        stage("b", ("iterations", 20), web=Fraction(1)),
    ]},
}  # fmt: skip


@for_each("case", STAGED)
@for_each("coverage", ["auto", "exact"])
def test_rows_of_stages_have_counted_coverage(folder: Path, case: str, coverage: str) -> None:
    values = dict(STAGED[case])
    recipe = run(folder, *values.pop("stages"), **values)
    rows = planned(recipe, coverage=coverage).rows("train")
    times = counted(recipe)
    assert len(rows) >= 3
    for row in rows:
        found = times[row.label, row.phase]
        shares = [found[k] / row.tokens_per_epoch for k in range(max(found) + 1)]
        ours = list(row.coverage.tokens) + [0.0] * (len(shares) - len(row.coverage.tokens))
        assert ours == pytest.approx(shares + [0.0] * (len(ours) - len(shares)), abs=1e-12)
        assert row.coverage.method in ("closed-form", "built")
        assert {(row.stage, row.phase)} <= {("a", 1), ("b", 2)}


def test_rows_are_of_each_stage(folder: Path) -> None:
    a, b = (stage(name, ("iterations", 20), web=Fraction(1)) for name in "ab")
    plan = planned(run(folder, a, b))
    per_epoch = plan.samples_per_epoch
    assert per_epoch is not None
    assert per_epoch < 160
    first, second = plan.rows("train")
    assert (first.drawn, first.epochs, first.repeated) == (80, 1, 0)
    assert (second.drawn, second.epochs, second.repeated) == (80, 2, 160 - per_epoch)
    assert (plan.num_epochs_built, plan.samples_built) == (2, 2 * per_epoch)
    assert "phase" in plan.to_json()["datasets"][0]
    assert plan.to_json()["datasets"][1]["stage"] == "b"


def test_the_evaluation_has_a_row(folder: Path) -> None:
    source = RecipeSource(name="held", path=str(folder / "books"))
    one = stage("a", ("iterations", 20), web=Fraction(1))
    evaluation = RecipeEvaluation(source=source, interval=8, iterations=3)
    plan = planned(run(folder, one, evaluation=evaluation))
    (row,) = plan.rows("valid")
    assert isinstance(row, Row)
    assert (row.drawn, row.distinct, row.repeated) == (3 * 12, 12, 24)
    assert plan.evaluation_rounds == 3
    seen = 12 * 16 / row.tokens_per_epoch
    assert row.coverage.tokens == pytest.approx((1 - seen, 0, 0, seen))
    assert planned(run(folder, one)).rows("valid") == []


def test_coverage_of_sources_without_files(folder: Path) -> None:
    source = RecipeSource(name="web", tokens=16 * 50 + 1)
    recipe = replace(
        run(folder, stage("a", ("iterations", 10), web=Fraction(1))), sources=(source,)
    )
    assert planned(recipe).datasets[0].coverage.method == "closed-form"
    again = replace(recipe, stages=(stage("a", ("iterations", 20), web=Fraction(1)),))
    assert planned(again).datasets[0].coverage.method == "expected"
    assert planned(again, coverage="none").datasets[0].coverage.method == "none"
    with pytest.raises(InvalidArgument, match="--coverage"):
        planned(again, coverage="all")


def failures(folder: Path, *stages: RecipeStage, **settings: Any) -> tuple[str, ...]:
    return planned(run(folder, *stages, **settings)).check_failures


def test_check_allows_the_epochs_that_stages_ask_for(folder: Path) -> None:
    held = planned(run(folder, stage("a", ("epochs", 1), web=Fraction(1)))).samples_per_epoch
    assert held is not None
    steps = held // 4
    whole = stage("a", ("iterations", steps), web=Fraction(1))
    assert failures(folder, whole) == ()
    beyond = failures(folder, stage("a", ("iterations", steps + 1), web=Fraction(1)))[0]
    assert f"{steps + 1} iterations build 2 epochs; up to {steps} iterations repeat no" in beyond
    assert failures(folder, stage("a", ("epochs", 2), web=Fraction(1))) == ()
    assert failures(folder, stage("a", ("epochs", 1), web={"repeat": 2})) == ()
    twice = failures(folder, stage("a", ("epochs", 1), web={}), stage("b", ("epochs", 1), web={}))
    assert "build" not in "".join(twice)
    more = stage("b", ("iterations", 1), web={})
    assert "build 2 epochs; up to" in failures(folder, stage("a", ("epochs", 1), web={}), more)[0]
    restarted = stage("b", ("iterations", 3), web={"restart": True})
    assert "build 2 epochs" in failures(folder, whole, restarted)[0]


def test_check_names_samples_that_stay_unseen(folder: Path) -> None:
    held = planned(run(folder, stage("a", ("epochs", 1), web=Fraction(1)))).samples_per_epoch
    assert held is not None
    short = held // 4 - 1
    left = held - short * 4
    assert 4 < left < 8
    found = failures(folder, stage("a", ("iterations", short), web=Fraction(1)))
    assert found == (f"{left} samples stay unseen, more than one batch of 4",)
    assert failures(folder, stage("a", ("iterations", short + 1), web=Fraction(1))) == ()


def test_check_is_the_same_by_flags_and_by_recipe(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = make_plan(run(folder, stage("a", ("epochs", 1), web=Fraction(1)))).samples_per_epoch
    assert held is not None
    lengths = (
        ("epochs", 1, 0), ("epochs", 2, 0), ("steps", held // 4, 0), ("steps", held // 4 + 1, 1),
        ("steps", held // 4 - 1, 1),
    )  # fmt: skip
    flags = ["--data-path", folder / "web", "--seq-length", 16, "--global-batch-size", 4]
    for kind, length, status in lengths:
        Path("run.yaml").write_text(
            f"sequence_length: 16\nbatch: {{global_batch_size: 4}}\n"
            f"sources: {{web: {folder / 'web'}}}\n"
            f"stages: {{all: {{{kind}: {length}, mix: {{web: 1}}}}}}\n"
        )
        target = ["--epochs" if kind == "epochs" else "--train-iters", length]
        by_flags = cli("plan", *flags, "--order", "epoch", *target, "--check")
        by_recipe = cli("plan", "--recipe", "run.yaml", "--check")
        assert by_flags[0] == by_recipe[0] == status, (kind, length)
        assert by_flags[2] == by_recipe[2]


def test_a_recipe_is_printed_as_a_recipe_and_no_framework_has_its_order(folder: Path) -> None:
    recipe = run(folder, *LONGER["two stages"])
    path = folder / "two.yaml"
    path.write_text(json.dumps(to_mapping(recipe)))
    status, out, _ = cli("plan", "--recipe", path, "--print-config", "recipe")
    assert status == 0
    assert out == json.dumps(to_mapping(recipe), indent=2) + "\n"
    (folder / "again.yaml").write_text(out)
    assert read_recipe(folder / "again.yaml") == read_recipe(path)
    for framework, name in (("neox", "GPT-NeoX"), ("megatron", "Megatron")):
        status, _, err = cli("plan", "--recipe", path, "--print-config", framework)
        assert status == 2
        assert f"{name} has no settings for its 2 stages, nor order epoch" in err
        assert f"--order {framework}" in err
    assert cli("plan", "--recipe", path, "--print-config", "yaml")[0] == 2
    status, _, err = cli("plan", "--recipe", path, "--print-config", "recipe", "--json")
    assert (status, "exclude each other" in err) == (2, True)
    status, out, _ = cli("plan", "--recipe", path, "--coverage", "none", "--json")
    methods = {row["coverage_method"] for row in json.loads(out)["datasets"]}
    assert (status, methods) == (0, {"none"})


def test_moved_steps_of_a_decided_run_are_counted_once(folder: Path) -> None:
    settings: dict[str, Any] = {
        "data_path": str(folder / "web"), "order": "epoch", "sequence_length": 16,
        "global_batch_size": 2, "train_iters": 28,
    }  # fmt: skip
    for skip in ((), (Skip(steps="5-8", move=True),)):
        plan = make_plan(run_of_settings(**settings, skip=skip))
        assert (plan.train_iters, plan.samples_consumed) == (28, 56)
        assert sum(row.drawn or 0 for row in plan.datasets) == 56


@for_each(("size", "left"), [(16, True), (8, False)])
def test_samples_of_two_lengths_are_not_counted_together(
    folder: Path, size: int, left: bool
) -> None:
    own = {"sequence_length": size, "batch": BatchSchedule.constant(4)}
    made = run(
        folder,
        stage("a", ("iterations", 9), web=1),
        stage("b", ("epochs", 2), code=1, settings=own),
    )
    plan = planned(made)
    assert (plan.samples_left_over is not None) == left


@for_each("order", ["megatron", "neox", "epoch", "packed"])
@for_each("more", [{}, {"skip": (Skip(steps="2-4"),)}, {"consumed_samples": 40}])
def test_a_decided_run_is_counted(folder: Path, order: str, more: dict[str, Any]) -> None:
    data = [2, str(folder / "web"), 1, str(folder / "code")]
    settings = {
        "data_path": data, "order": order, "sequence_length": 16, "global_batch_size": 4,
        "train_iters": 60, **more,
    }  # fmt: skip
    settings["variance_buffer"] = "exact" if order in ("megatron", "neox") else None
    settings = {name: value for name, value in settings.items() if value is not None}
    theirs = make_plan(**settings, coverage="exact")
    plan = make_plan(run_of_settings(**settings))
    assert type(plan) is Plan
    assert plan.train_iters == theirs.train_iters
    assert plan.order == order
    figures = ("num_epochs_built", "samples_built", "samples_left_over", "samples_per_epoch",
               "max_train_iters_without_repeat", "max_train_iters_same_epochs")  # fmt: skip
    assert all(plan.to_json()[name] is None for name in (*figures, "variance_buffer", "tail"))
    assert plan.tokens_per_epoch == theirs.tokens_per_epoch
    if "skip" not in more:
        assert plan.tokens_consumed == theirs.tokens_consumed
        assert plan.samples_consumed == theirs.samples_consumed
    else:
        assert (plan.skip is not None, plan.skip) == (True, theirs.skip)
    for ours, other in zip(plan.datasets, theirs.datasets, strict=True):
        assert (ours.path, ours.drawn, ours.distinct) == (other.path, other.drawn, other.distinct)
        assert ours.coverage.tokens == pytest.approx(other.coverage.tokens, abs=1e-12)
        assert ours.coverage.method == "built"
        assert ours.epochs is ours.repeated is ours.samples_per_epoch is None
    told: list[tuple[int, int]] = []
    make_plan(run_of_settings(**settings), progress=lambda *counts: told.append(counts))
    consumed = more.get("consumed_samples", 0)
    assert told[-1] == (240 + consumed, 240 + consumed)
    assert sorted(told) == told
    again = any(sum(row.coverage.tokens[2:]) for row in theirs.datasets)
    unseen = sum(r.coverage.tokens[0] * (r.tokens_per_epoch or 0) for r in theirs.datasets)
    assert bool(plan.check_failures) == (again or round(unseen) > 4 * 16)
    assert f"train_iters {plan.train_iters}" in repr(plan)
    none = make_plan(run_of_settings(**settings), coverage="none")
    assert {row.coverage.method for row in none.datasets} == {"none"}
    assert [row.drawn for row in none.datasets] == [row.drawn for row in plan.datasets]
    assert none.tokens_consumed is none.datasets[0].distinct is None
    assert none.check_failures == ("its coverage was not counted; give --coverage exact",)
    with pytest.raises(InvalidArgument, match="a decided run has all settings, also epochs"):
        make_plan(run_of_settings(**settings), epochs=1)


def test_a_decided_run_shows_its_subsets(folder: Path) -> None:
    settings = {"data_path": str(folder / "web"), "sequence_length": 16, "global_batch_size": 4,
                "train_iters": 9, "order": "epoch"}  # fmt: skip
    subset = repr(make_plan(run_of_settings(**settings, document_subset="1/2")))
    assert subset.count("subset of") == 2
    assert "subset of" not in repr(make_plan(run_of_settings(**settings)))


@pytest.mark.parametrize(
    ("own", "policy", "step"),
    [({}, "repeat", 12), ({}, "continue", None), ({"max_epochs": 1}, "stop", None),
     ({"max_epochs": 2}, "stop", 12)],
)  # fmt: skip
def test_a_source_of_one_epoch_repeats_under_no_mix(
    own: dict[str, Any], policy: Any, step: int | None
) -> None:
    web = RecipeSource(name="web", tokens=50 * 16 + 1, **own)
    both = stage("all", ("iterations", 20), web=1, code=9)
    sources = (web, RecipeSource(name="code", tokens=9000))
    recipe = replace(run(Path(), both, exhaustion=policy), sources=sources)
    (bound, _) = planned(recipe, mix_bounds=True).mix_bounds
    assert bound.first_step == step


@for_each(("first", "step"), [({"web": 1, "code": 1}, 3), ({"code": {"choose": 40}}, None)])
def test_a_source_repeats_where_it_is_restarted(first: dict[str, Any], step: int | None) -> None:
    again = stage("again", ("iterations", 3), web={"proportion": 1, "restart": True})
    recipe = replace(
        run(Path(), stage("first", ("iterations", 3), **first), again),
        sources=tuple(RecipeSource(name=name, tokens=50 * 16 + 1) for name in ("web", "code")),
    )
    (bound, _) = planned(recipe, mix_bounds=True).mix_bounds
    assert (bound.source, bound.first_step) == ("web", step)


@for_each("consumed", [0, 40, 60])
def test_a_mix_that_is_fixed_repeats_at_a_step_wherever_the_run_is(consumed: int) -> None:
    both = stage("all", ("iterations", 40), web={"choose": 10}, code={"choose": 10})
    sources = (RecipeSource(name=name, tokens=50 * 16 + 1) for name in ("web", "code"))
    recipe = replace(run(Path(), both), sources=tuple(sources))
    bounds = planned(recipe, mix_bounds=True, consumed_samples=consumed).mix_bounds
    assert [bound.first_step for bound in bounds or ()] == [25, 25]


@pytest.mark.parametrize("sources", [24, 25])
def test_blocks_of_many_sources_fit_a_page(folder: Path, sources: int) -> None:
    names = [f"s{number}" for number in range(sources)]
    shares = {name: number + 1 for number, name in enumerate(names)}
    stages = (
        stage("short", ("iterations", 600), **shares),
        stage("long", ("iterations", 9), settings={"sequence_length": 32}, **shares),
    )
    own = tuple(RecipeSource(name=name, path=str(folder / "web")) for name in names)
    text = repr(planned(replace(run(folder, *stages), sources=own)))
    lines = text.split("first epoch")[1].splitlines()[2:]
    shown = [line.split()[0] for line in itertools.takewhile(str.strip, lines)]
    assert shown == (names if sources == 24 else [*names[:14:-1], "…"])


@pytest.mark.parametrize("sources", [24, 25])
def test_of_many_warnings_of_sources_the_first_are_shown(folder: Path, sources: int) -> None:
    shares = {f"s{number}": 1 for number in range(sources)}
    own = tuple(
        RecipeSource(name=name, path=str(folder / "web"), order="packed", long_documents="truncate")
        for name in shares
    )
    recipe = replace(run(folder, stage("all", ("iterations", 9), **shares)), sources=own)
    warnings = planned(recipe).warnings
    cut = [text.partition(": long_documents truncate leaves")[0] for text in warnings]
    if sources == 24:
        assert cut == list(shares)
    else:
        assert cut == ["s0", "s1", "s2", "so it is with 22 more sources"]


def test_a_locked_recipe_is_counted_from_its_lock(folder: Path, tmp_path: Path) -> None:
    recipe = run(folder, *STAGED["lengths"]["stages"])
    make_lock(recipe).write(tmp_path / "run.lock")
    plan, theirs = make_plan(run_of_lock(tmp_path / "run.lock")), make_plan(recipe)
    assert plan.samples_consumed == theirs.samples_consumed
    assert plan.tokens_consumed == theirs.tokens_consumed
    assert plan.sequence_length == 40
    words = "--lock", tmp_path / "run.lock", "--coverage", "none", "--json"
    rows = json.loads(cli("plan", *words)[1])["datasets"]
    assert {row["coverage_method"] for row in rows} == {"none"}
    drawn = Counter[str]()
    for row in theirs.rows("train"):
        drawn[row.label] += row.drawn or 0
    assert {row.label or Path(row.path).name: row.drawn for row in plan.datasets} == drawn


def test_settings_beside_a_recipe_are_refused(folder: Path) -> None:
    recipe = run(folder, *LONGER["one stage"])
    with pytest.raises(InvalidArgument, match="a recipe has all settings, also epochs"):
        make_plan(recipe, epochs=1)
    with pytest.raises(InvalidArgument, match="--mix-bounds is for recipes"):
        make_plan(data_path="web", mix_bounds=True)


def test_the_printed_plan_has_limits_and_coverage(folder: Path) -> None:
    plan = make_plan(run(folder, *STAGED["epochs in turn"]["stages"]))
    text = " ".join(repr(plan).split())
    assert f"up to {plan.max_train_iters_without_repeat} iterations repeat no sample" in text
    assert "b books tokens" in text
    without = make_plan(run(folder, LONGER["one stage"][0], exhaustion="redistribute"))
    assert "repeat no sample" not in repr(without)
    assert "share of" not in repr(make_plan(run(folder, *LONGER["one stage"]), coverage="none"))


def test_sources_of_which_all_is_seen_are_not_counted_as_unseen() -> None:
    assert unseen_text({"a": 0.0, "b": 0.5, "c": 0.25}).startswith("; of 2 some tokens stay unseen")
    assert unseen_text({"a": 0.0}) == ""


def test_rows_of_stages_are_counted_up_to_a_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two stages of order packed: samples served, and documents of each epoch."""
    settings = {"own": {"web": {"order": "packed"}}}
    stages = [stage(name, ("iterations", 20), web=Fraction(1)) for name in "ab"]
    recipe = run(folder, *stages, **settings)
    row = planned(recipe).rows("train")[1]
    assert row.coverage.method == "built"
    work = row.drawn + 40 * row.epochs
    for limit, method in ((work, "built"), (work - 1, "none")):
        monkeypatch.setattr("megaindex.plan.recipe_rows.BUILD_LIMIT", limit)
        assert planned(recipe).rows("train")[1].coverage.method == method


def test_a_plan_without_skips_lists_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where batch sizes change."""
    sources = {"web": {"tokens": 10**9}}
    batch = [{"global_batch_size": 4}, {"global_batch_size": 8}]
    stages = {f"s{k}": {"steps": 10**6, "mix": {"web": 1}, "batch": batch[k]} for k in range(2)}
    content = {"sequence_length": 16, "batch": batch[0], "sources": sources, "stages": stages}
    recipe = recipe_of(content, "run.yaml", Path())
    monkeypatch.delattr(batch_schedule, "_step_starts")
    assert make_plan(recipe, coverage="none").train_iters == 2 * 10**6
    with pytest.raises(NameError):
        make_plan(replace(recipe, skip=(Skip(steps="1"),)), coverage="none")
