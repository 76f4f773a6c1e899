"""Plans and audits of runs with skips, against counts of their samples one by one."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex import InvalidArgument, Skip
from megaindex.audit import audit, documents_of, run_of_settings
from megaindex.loader import loader_of_recipe
from megaindex.plan import make_plan
from megaindex.recipe import open_recipe, plan_recipe, read_recipe
from megaindex.run.from_recipe import run_of_recipe
from megaindex.run.run import skipped_run
from megaindex.settings.batch_schedule import BatchSchedule

S = 16


def megaindex(*words: str, status: int = 0) -> str:
    """What the command prints."""
    found, out, err = cli(*words)
    assert found == status, err
    return err if status else out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skips")
    rng = np.random.default_rng(2)
    for name, count in (("web", 120), ("code", 60)):
        write_corpus(folder / name, rng.integers(1, 40, count))
    (folder / "bad").write_text("3 5 90")
    (folder / "run.yaml").write_text(
        f"sequence_length: {S}\n"
        "batch: {micro_batch_size: 2, data_parallel_size: 2, gradient_accumulation_steps: 2}\n"
        "sources: {web: web, code: code}\n"
        "stages: {main: {samples: 100, mix: {web: 2, code: 1}}}\n"
        "tail: pad\n"
    )
    return folder


def counted(stream: Any) -> tuple[list[int], int]:
    """Samples of each step that are served, and labels of masked documents, one by one."""
    index, skips = stream.index, stream.skips
    sizes, masked = [], 0
    for begin, end in itertools.pairwise(stream.step_bounds.tolist()):
        served = [p for p in range(begin, end) if not skips.is_hole(np.array([p]))[0]]
        sizes.append(len(served))
        for position in served:
            spans = index.locate([position])
            owners = np.repeat(np.arange(len(spans)), spans.length)[1 : S + 1]
            masked += int(spans.masked[owners].sum()) if spans.masked is not None else 0
    return sizes, masked


FLAGS = ["--skip-documents", "bad:web", "--skip-from-step", "5"]


def test_a_plan_and_an_audit_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    steps = ["--skip-steps", "2-3", "7", "--move-skipped"]
    plan = json.loads(megaindex("plan", "--recipe", "run.yaml", *steps, *FLAGS, "--json"))
    found = json.loads(megaindex("audit", "--recipe", "run.yaml", *steps, *FLAGS, "--json"))
    skip = [Skip(steps="2-3 7", move=True), Skip(documents="bad", source="web", from_step=5)]
    recipe = read_recipe("run.yaml")
    stream = skipped_run(run_of_recipe(recipe), skip, recipe.batch)
    sizes, masked = counted(stream)
    assert sizes == [8, 8, 0, 0, 8, 8, 8, 0, *[8] * 7, 4]  # the 12 samples left fill the batch
    assert masked > 0
    assert plan["skip"] == found["skip"]
    assert plan["skip"] | {"masked": None} == {
        "steps_dropped": 0, "samples_dropped": 0, "steps_moved": 3, "samples_moved": 24,
        "samples_left_over": 0, "steps_made": 13, "samples_to_read": 100, "samples_padded": 4,
        "first_masked_step": 5, "first_removed_step": None, "masked_documents": 3, "masked": None,
    }  # fmt: skip
    assert plan["skip"]["masked"] == [{"source": "web", "tokens": masked, "removed": 0}]
    assert plan["samples_per_rank"] == 52
    assert documents_of(stream, 2) == []
    moved = [s.document for s in documents_of(stream, 13)]
    plain = run_of_recipe(recipe)
    first = [s.document for s in documents_of(plain, 2)]
    assert moved != first
    served = [s.document for k in range(16) for s in documents_of(stream, k)]
    assert sorted(served) == sorted(s.document for k in range(13) for s in documents_of(plain, k))


def test_dropped_steps_are_not_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    settings: dict[str, Any] = {
        "data_path": [2, "web", 1, "code"], "sequence_length": S, "global_batch_size": 8,
        "micro_batch_size": 2, "data_parallel_size": 2, "train_iters": 12, "split": "100,0,0",
    }  # fmt: skip
    skip = [Skip(steps="3 8-9"), Skip(source="code", from_step=2)]
    stream = run_of_settings(skip=skip, **settings)
    sizes, masked = counted(stream)
    assert sizes == [0 if k in (3, 8, 9) else 8 for k in range(12)]
    result = audit(stream)
    assert result.exposure.step_tokens.tolist() == [S * n for n in sizes]
    assert result.skip is not None
    assert result.skip.tokens_masked == masked
    assert [*result.skip.lines()][:2] == ["3 steps dropped, 24 samples", "9 steps made in all"]
    plan = make_plan(skip=skip, **settings)
    assert plan.skip is not None
    assert (plan.skip.steps_dropped, plan.skip.steps_made) == (3, 9)
    assert plan.skip.masked is None  # make_plan reads no index
    assert plan.ranks is not None
    assert plan.ranks.samples_per_rank == 36
    assert make_plan(**settings).skip is None
    with pytest.raises(InvalidArgument, match="step 12 lies beyond the end"):
        make_plan(skip=Skip(steps=12), **settings)


ORDERS: list[dict[str, Any]] = [
    {},
    {"order": "neox", "variance_buffer": "exact"},
    {"order": "epoch"},
    {"order": "epoch", "left_over": "carry", "epochs_mixed": 2},
    {"order": "window"},
    {"order": "packed"},
]


def check_random(rng: np.random.Generator) -> None:
    """The rows and the coverage of a plan, and the audit of the same run."""
    batch, steps = int(rng.choice([4, 8])), int(rng.integers(8, 60))
    settings: dict[str, Any] = {
        "data_path": [2, "web", 1, "code"] if rng.integers(2) else "code",
        "sequence_length": S, "global_batch_size": batch, "train_iters": steps,
        "split": "100,0,0", "coverage": "exact", **ORDERS[int(rng.integers(len(ORDERS)))],
    }  # fmt: skip
    chosen = rng.permutation(steps)[: int(rng.integers(1, 6))].tolist()
    kinds = [Skip(steps=step, move=bool(rng.integers(2))) for step in chosen]
    plan = make_plan(**settings, skip=kinds)
    result = audit(run_of_settings(**settings, skip=kinds))
    rows = [row for row in plan.datasets if row.split == "train"]
    assert len(rows) == len(result.exposure.total.tokens)
    for row, tokens in zip(rows, result.exposure.total.tokens.tolist(), strict=True):
        assert row.coverage.method in ("built", "closed-form"), (settings, kinds)
        total = sum(tokens)
        expected = [count / total for count in tokens] + [0.0] * len(row.coverage.tokens)
        found = [*row.coverage.tokens] + [0.0] * len(expected)
        assert found[: len(tokens)] == pytest.approx(expected[: len(tokens)], abs=1e-12)
        if settings.get("order") != "packed":
            assert row.drawn * S == sum(times * count for times, count in enumerate(tokens))
    assert not any("skipped samples included" in text for text in plan.warnings)


def test_random_plans_count_what_the_audit_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for seed in range(8):
        check_random(np.random.default_rng(seed))


@pytest.mark.slow
def test_more_random_plans_count_what_the_audit_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for seed in range(8, 300):
        check_random(np.random.default_rng(seed))


def test_a_recipe_counts_the_samples_served_of_each_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "long.yaml").write_text(
        f"sequence_length: {S}\n"
        "batch: {micro_batch_size: 4, data_parallel_size: 1, gradient_accumulation_steps: 1}\n"
        "sources: {web: web, code: code, rest: code}\n"
        "stages:\n"
        "  one: {steps: 25, mix: {web: 3, code: 1}}\n"
        "  two: {steps: 25, batching: random, mix: {web: 1, code: 2, rest: 1}}\n"
    )
    recipe = read_recipe("long.yaml")
    for skip in (
        [Skip(steps="3-9 20-30")], [Skip(steps="0-4", move=True), Skip(steps="48-49")],
        [Skip(steps="0-48")],
    ):  # fmt: skip
        plan = plan_recipe(replace(recipe, skip=tuple(skip)))
        found = make_plan(plan)
        tokens = audit(run_of_recipe(replace(recipe, skip=tuple(skip)))).exposure.total.tokens
        for source, counts in zip(found.sources, tokens.tolist(), strict=True):
            assert source.drawn * S == sum(times * n for times, n in enumerate(counts))
            most = source.tokens_per_epoch - S * (source.samples_per_epoch - source.unseen)
            if any("first epoch of" in t and source.source in t for t in found.warnings):
                assert counts[0] <= most
            elif source.unseen or source.drawn <= source.samples_per_epoch:
                assert counts[0] == most


SKIPS = {
    "none": (),
    "dropped": (Skip(steps="3-5 9"),),
    "moved": (Skip(steps="1 8-9", move=True), Skip(steps="4")),
    "left over": (Skip(steps="0", move=True), Skip(source="web", from_step=0)),
}


@pytest.mark.parametrize("skip", SKIPS)
def test_a_state_in_mid_run_has_the_steps_of_the_whole_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, skip: str
) -> None:
    """In and between steps: those left are those that the loader goes on to serve."""
    monkeypatch.chdir(folder)
    recipe = replace(read_recipe("run.yaml"), tail="drop", skip=SKIPS[skip])
    if skip == "left over":
        recipe = replace(recipe, batch=BatchSchedule(stages=((0, 4), (8, 8))))
    opened = open_recipe(recipe)
    whole = audit(run_of_recipe(recipe))
    sizes, masked = counted(whole.run) if recipe.skip else ([8] * 12, 0)
    bounds, effect = np.cumsum([0, *sizes]), whole.skip
    if skip == "left over":
        assert effect is not None
        assert effect.samples_left_over == 4
        assert masked == effect.tokens_masked
    loader = loader_of_recipe(opened, data_parallel_size=1, micro_batch_size=2)
    batches = [(loader.consumed_samples, batch) for batch in loader]
    ends = [position for position, _ in batches]
    assert 2 * len(batches) == sum(sizes)
    for number, consumed in ((0, 0), *((k, ends[k - 1]) for k in (3, 8, 30, len(batches)))):
        found = make_plan(opened.layout, consumed_samples=consumed).remaining
        assert found is not None
        assert found.samples == sum(found.sources.values()) == sum(sizes) - 2 * number
        left = [k for k, size in enumerate(sizes) if size and bounds[k] >= 2 * number]
        assert (found.steps, found.first_step) == (len(left), left[0] if left else len(sizes))
        resumed = audit(run_of_recipe(recipe, consumed_samples=consumed))
        assert resumed.run.step_bounds.tolist() == whole.run.step_bounds.tolist()
        assert np.array_equal(resumed.exposure.total.tokens, whole.exposure.total.tokens)
        made = resumed.run.past_steps
        assert bounds[made] <= 2 * number
        assert made == len(sizes) or bounds[made + 1] > 2 * number or sizes[made] == 0


@pytest.mark.parametrize(("version", "first"), [("0.16.1", 0), ("0.17.1", 1), ("main", 1)])
def test_megatrons_iterations_to_skip(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, first: int
) -> None:
    """They count from 0, since 0.17 from 1, are read, and take the evaluation that follows."""
    monkeypatch.chdir(folder)
    words = (
        f"--data-path 2 web 1 code --split 80,10,10 --seq-length {S} --micro-batch-size 2 "
        "--global-batch-size 8 --train-iters 12 --eval-interval 4 --eval-iters 1"
    )
    other: dict[str, Any] = {"world_size": 2, "framework_version": version}

    def flags(*steps: int) -> str:
        return f"{words} --iterations-to-skip {' '.join(str(step + first) for step in steps)}"

    plain = make_plan(megatron_args=words, **other)
    plan = make_plan(megatron_args=flags(3, 4, 500), **other)
    assert plan.skip is not None
    assert (plan.skip.steps_dropped, plan.skip.samples_dropped) == (2, 16)
    assert plan.ranks == plain.ranks  # the samples are read
    assert plan.evaluation is not None
    assert plain.evaluation is not None
    assert plan.evaluation.rounds == plain.evaluation.rounds  # as many are built
    assert plan.evaluation.rounds_run == plain.evaluation.rounds_run - 1
    assert f"--iterations-to-skip {500 + first} lies beyond the end of the run" in plan.warnings
    ends = make_plan(megatron_args=flags(0, 11, 12), **other).skip
    assert ends is not None
    assert ends.steps_dropped == 2  # of 12 iterations
    stream = run_of_settings(megatron_args=flags(0, 3, 4), **other)
    assert [step for step in range(12) if not documents_of(stream, step)] == [0, 3, 4]
    for wrong, reason in (
        (flags(-1), f"counts from {first} in .*, got {first - 1}"),
        (f"{words} --iterations-to-skip x", "must be an integer"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            make_plan(megatron_args=wrong, **other)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        make_plan(megatron_args=flags(2), skip=Skip(steps=1), **other)


def test_evaluations_of_skipped_iterations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is left out where it would follow, which is not before --start-eval-at-iter."""
    monkeypatch.chdir(folder)
    words = (
        f"--data-path web --split 80,10,10 --seq-length {S} --micro-batch-size 2 --eval-iters 1 "
        "--global-batch-size 8 --train-iters 12 --eval-interval 4 --start-eval-at-iter 8"
    )
    late, at_4, at_8 = (
        make_plan(megatron_args=f"{words} {flag}", world_size=2).evaluation
        for flag in ("", "--iterations-to-skip 4", "--iterations-to-skip 8")
    )
    assert late is not None
    assert at_4 == late
    assert at_8 is not None
    assert at_8.rounds_run == late.rounds_run - 1
    for flag, plan in ("", late), ("--iterations-to-skip 8", at_8):
        args: dict[str, Any] = {"megatron_args": f"{words} {flag}", "world_size": 2}
        read = run_of_settings(subset="valid", **args).num_samples
        assert read == plan.valid_samples_read == 8 * plan.rounds_run
    with pytest.raises(InvalidArgument, match="a setting of order megatron"):
        make_plan(order="epoch", tokens_per_epoch=10**6, sequence_length=S, global_batch_size=8,
                  epochs=1, iterations_to_skip=[3])  # fmt: skip


def test_flags_and_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "more").mkdir(exist_ok=True)
    (folder / "more" / "ids").write_text("3 5 90")
    (folder / "more" / "skip.yaml").write_text(
        "- {steps: 2-3}\n- {documents: ids, source: web, from_step: 5}\n"
    )
    flags = ["plan", "--recipe", "run.yaml", "--json"]
    one = json.loads(megaindex(*flags, "--skip-steps", "2", "3", *FLAGS))
    assert json.loads(megaindex(*flags, "--skip", "more/skip.yaml")) == one
    (folder / "more" / "skip.yaml").write_text("skip: {steps: 2-3, moves: true}")
    tokens = ["plan", "--tokens-per-epoch", "9999", "--seq-length", "16", "--epochs", "1",
              "--global-batch-size", "8", "--order", "epoch"]  # fmt: skip
    planned = megaindex(*tokens, "--skip-steps", "4", "--skip-documents", "bad")
    assert "1 step dropped, 8 samples" in planned
    assert "loss masked from step 0 on; the tokens were not counted" in planned
    planned = megaindex(*tokens, "--skip-documents", "bad", "--remove-skipped")
    assert "documents removed from step 0 on; the tokens were not counted" in planned
    (folder / "more" / "twice.yaml").write_text("steps: 2-3\nsteps: 4-5\n")
    for wrong, reason in (
        (["--skip", "more/skip.yaml"], "unknown setting moves"),
        (["--skip", "more/twice.yaml"], "steps is given twice"),
        (["--skip", "run.yaml"], "unknown setting sequence_length"),
        (["--skip", "gone.yaml"], "does not exist"),
        (["--move-skipped"], "--move-skipped needs --skip-steps"),
        (["--skip-from-step", "3"], "--skip-from-step needs --skip-documents"),
        (["--skip-steps", "2-"], "steps must be numbers"),
        (["--skip-documents", "gone"], "gone does not exist"),
    ):
        assert reason in megaindex(*flags, *wrong, status=2)


def test_samples_served_from_any_position_on() -> None:
    """Moved ranges of several lengths, entered at each of their samples."""
    from megaindex.settings.batch_schedule import skip_steps, steps_of

    schedule = BatchSchedule(stages=((0, 2), (8, 4)))
    whole, _ = steps_of(schedule, 0, 32)
    skip = [Skip(steps="0 3 6-7", move=True), Skip(steps="1")]
    steps = skip_steps(skip, schedule, whole, num_samples=60)
    assert steps is not None
    skips = steps.skips
    served = np.concatenate([np.arange(begin, end) for begin, end in skips.segments()])
    for first in range(skips.run_end + 1):
        for end in range(first, skips.run_end + 1):
            ranges = list(skips.served_samples(end, first))
            assert all(begin < stop for begin, stop in ranges)
            found = [sample for begin, stop in ranges for sample in range(begin, stop)]
            chosen = served[(served >= first) & (served < end)]
            assert found == skips.samples_at(chosen).tolist()


def test_schedules_that_moved_samples_continue() -> None:
    """Moved samples of smaller batches do not fill the last one: left over, or padded."""
    from megaindex.settings.batch_schedule import skip_steps, steps_of

    schedule = BatchSchedule(stages=((0, 4), (8, 8)))
    whole, _ = steps_of(schedule, 0, 40)
    steps = skip_steps([Skip(steps="0 3", move=True)], schedule, whole, num_samples=60)
    assert steps is not None
    assert steps.steps.bounds.tolist() == [0, 4, 8, 16, 24, 32, 40, 48]
    assert steps.skips.run_end == 52
    whole, _ = steps_of(schedule, 0, 38)
    steps = skip_steps(
        [Skip(steps="0 3", move=True)], schedule, whole, num_samples=60, masked_rows=2
    )
    assert steps is not None
    assert (steps.steps.bounds.tolist()[-3:], steps.masked_rows) == ([40, 48, 50], 6)
