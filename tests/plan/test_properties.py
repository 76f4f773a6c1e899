"""Laws every plan keeps."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megaindex.index.frameworks import FRAMEWORK_RULES
from megaindex.plan import Plan, make_plan
from megaindex.run.passes import ServedRange, loader_passes
from megaindex.settings.run_settings import BatchSchedule, Data, Evaluation, RunSettings, Target
from megaindex.settings.sources import Source

ORDERS = st.sampled_from(sorted(FRAMEWORK_RULES.keys() - {"packed"}))  # it needs the lengths
TOKENS = st.lists(st.integers(40, 4000), min_size=1, max_size=4)
BUFFERS = st.sampled_from([None, 1.0, 1.005, 1.1, 2.0, "exact"])


def sources(tokens: list[int], weights: list[float] | None) -> tuple[Source, ...]:
    held = weights or [None] * len(tokens)
    return tuple(Source(tokens=t, weight=w) for t, w in zip(tokens, held, strict=True))


def plan_of(
    order: str, tokens: list[int], kind: Any, value: Any, weights: list[float] | None = None,
    **changes: Any,
) -> Plan:  # fmt: skip
    settings = {
        "order": order,
        "sequence_length": 8,
        "data": Data(train=sources(tokens, weights)),
        "batch": BatchSchedule.constant(4),
        "target": Target(kind=kind, value=Fraction(value)),
        "coverage": "none",
    }
    return make_plan(RunSettings(**{**settings, **changes}))


@st.composite
def blends(draw: st.DrawFn) -> tuple[list[int], list[float] | None]:
    tokens = draw(TOKENS)
    weighted = draw(st.booleans())
    weight = st.floats(0.05, 20)
    count = len(tokens)
    return tokens, draw(st.lists(weight, min_size=count, max_size=count)) if weighted else None


@given(ORDERS, blends(), st.fractions("1/4", 3, max_denominator=8), BUFFERS)
def test_iterations_planned_from_epochs_plan_the_same(
    order: str, blend: Any, epochs: Fraction, buffer: Any
) -> None:
    tokens, weights = blend
    first = plan_of(order, tokens, "epochs", epochs, weights, variance_buffer=buffer)
    again = plan_of(order, tokens, "iterations", first.train_iters, weights, variance_buffer=buffer)
    for name in (
        "train_iters", "samples_consumed", "samples_built", "num_epochs_built",
        "max_train_iters_without_repeat", "max_train_iters_same_epochs", "neighbours",
    ):  # fmt: skip
        assert getattr(again, name) == getattr(first, name), name
    assert [row.requested for row in again.datasets] == [row.requested for row in first.datasets]
    if epochs == 1:
        assert again.samples_left_over == first.samples_left_over


@given(ORDERS, blends(), st.integers(0, 300), BUFFERS)
def test_limits_are_what_trying_every_number_finds(
    order: str, blend: Any, iterations: int, buffer: Any
) -> None:
    tokens, weights = blend

    def made(count: int) -> Plan:
        return plan_of(order, tokens, "iterations", count, weights, variance_buffer=buffer)

    def epochs(count: int) -> list[int | None]:
        return [row.epochs for row in made(count).datasets]

    plan = plan_of(order, tokens, "iterations", iterations, weights, variance_buffer=buffer)
    one_epoch_only = order == "megatron" and len(tokens) > 1 and not weights and buffer != "exact"
    assume(not one_epoch_only)
    now = [row.epochs for row in plan.datasets]
    once = [1] * len(tokens)
    last = plan.max_train_iters_without_repeat
    assert last == 0 or epochs(last) == once
    assert not starts_over(made(last)) or last == 0
    assert epochs(last + 1) != once or starts_over(made(last + 1))
    same = plan.max_train_iters_same_epochs
    assert all(a <= b for a, b in zip(epochs(same), now, strict=True)) or same == 0
    assert any(a > b for a, b in zip(epochs(same + 1), now, strict=True))


def starts_over(plan: Plan) -> bool:
    """Whether the loader does, as GPT-NeoX's after a sample less of each source than is built."""
    return any(loader.samples_read > loader.samples_counted for loader in plan.loaders)


@given(ORDERS, blends(), BUFFERS)
def test_more_iterations_never_ask_for_less(order: str, blend: Any, buffer: Any) -> None:
    tokens, weights = blend
    plans = [
        plan_of(order, tokens, "iterations", count, weights, variance_buffer=buffer)
        for count in range(0, 60, 4)
    ]
    for less, more in itertools.pairwise(plans):
        for a, b in zip(less.datasets, more.datasets, strict=True):
            assert (a.requested, a.epochs, a.built) <= (b.requested, b.epochs, b.built)
            assert a.drawn <= b.drawn or starts_over(less) or starts_over(more)


@given(ORDERS, st.integers(40, 3000), st.integers(1, 400), st.fractions("1/3", 3))
def test_more_tokens_never_mean_fewer_iterations(
    order: str, tokens: int, more: int, epochs: Fraction
) -> None:
    few = plan_of(order, [tokens], "epochs", epochs)
    many = plan_of(order, [tokens + more], "epochs", epochs)
    assert many.train_iters >= few.train_iters
    assert many.samples_per_epoch >= few.samples_per_epoch
    assert many.max_train_iters_without_repeat >= few.max_train_iters_without_repeat
    longer = plan_of(order, [tokens], "epochs", epochs + 1)
    assert longer.train_iters >= few.train_iters


@given(blends(), st.integers(0, 200), st.sampled_from([1.0, 1.005, 1.3]), st.floats(0, 1))
@pytest.mark.parametrize("order", ["megatron", "neox", "megatron-legacy", "paddlenlp"])
def test_a_larger_buffer_never_builds_less(
    order: str, blend: Any, iterations: int, buffer: float, more: float
) -> None:
    tokens, weights = blend
    small = plan_of(order, tokens, "iterations", iterations, weights, variance_buffer=buffer)
    large = plan_of(order, tokens, "iterations", iterations, weights, variance_buffer=buffer + more)
    for a, b in zip(small.datasets, large.datasets, strict=True):
        assert a.built <= b.built
    assert small.max_train_iters_without_repeat >= large.max_train_iters_without_repeat


@given(blends(), st.integers(1, 200))
@pytest.mark.parametrize("order", ["megatron", "neox", "epoch", "window"])
def test_the_exact_buffer_builds_what_is_drawn(order: str, blend: Any, iterations: int) -> None:
    tokens, weights = blend
    plan = plan_of(order, tokens, "iterations", iterations, weights, variance_buffer="exact")
    dead = any(loader.samples_counted == 0 for loader in plan.loaders)
    assert dead or sum(row.drawn for row in plan.datasets) == plan.samples_consumed
    for row in plan.datasets:
        least = 1 if order == "neox" else 0  # its datasets report one sample fewer than they hold
        assert row.requested == max(least, row.drawn) <= row.built or starts_over(plan)
        assert row.epochs == 1 or row.built - row.samples_per_epoch - 1 < row.drawn


@given(st.lists(st.fractions("1/4", 4, max_denominator=4), min_size=2, max_size=4), ORDERS)
def test_epochs_of_each_source_set_its_draws(epochs: list[Fraction], order: str) -> None:
    target = Target(kind="epochs", value=max(epochs), per_source=tuple(epochs))
    tokens = [4001] * len(epochs)
    plan = plan_of(
        order, tokens, "epochs", 1, target=target, batch=BatchSchedule.constant(1),
        variance_buffer="exact",
    )  # fmt: skip
    per_epoch = plan.datasets[0].samples_per_epoch
    for row, wanted in zip(plan.datasets, epochs, strict=True):
        assert abs(row.drawn - wanted * per_epoch) <= len(epochs) + 1


@given(st.integers(0, 5000), st.integers(1, 400), st.integers(1, 50))
def test_evaluations_are_counted_as_megatron_counts_them(
    iterations: int, interval: int, evals: int
) -> None:
    data = Data(train=sources([9000], None), valid=sources([900], None), test=sources([90], None))
    plan = plan_of(
        "megatron", [], "iterations", iterations, data=data,
        evaluation=Evaluation(interval=interval, iterations=evals, batch_size=6),
    )  # fmt: skip
    assert plan.evaluation is not None
    assert plan.evaluation.valid_samples == (iterations // interval + 1) * evals * 6
    assert plan.evaluation.test_samples == evals * 6
    assert [row.drawn for row in plan.datasets[1:]] == [
        plan.evaluation.valid_samples, plan.evaluation.test_samples,
    ]  # fmt: skip


def test_a_resumed_schedule_requests_what_the_whole_run_does() -> None:
    """Megatron builds for all iterations at the nominal batch, also those before a resume."""
    batch = BatchSchedule(stages=((0, 4), (40, 8), (120, 16)), stepped=True)
    settings: dict[str, Any] = {
        "batch": batch,
        "micro_batch_size": 2,
        "data_parallel_size": 2,
    }
    whole = plan_of("megatron", [5000], "iterations", 30, **settings)
    for made in (0, 7, 12, 25):
        rest = plan_of(
            "megatron", [5000], "iterations", 30 - made,
            consumed_samples=batch.samples_after(made), **settings,
        )  # fmt: skip
        assert rest.samples_consumed == whole.samples_consumed
        assert rest.datasets[0].requested == whole.datasets[0].requested


def test_a_source_that_is_not_drawn_is_built_for_a_sample() -> None:
    """A dataset of none would report a length of -1 to GPT-NeoX."""
    plan = plan_of(
        "neox", [900, 900], "iterations", 1, [10.0, 1.0], variance_buffer="exact",
        batch=BatchSchedule.constant(1),
    )  # fmt: skip
    assert [row.drawn for row in plan.datasets] == [1, 0]
    assert [row.requested for row in plan.datasets] == [1, 1]


def test_validation_of_a_resumed_neox_run_goes_on_by_micro_batches() -> None:
    """Its first batch is counted in micro batches of training, several for an iteration."""
    run = RunSettings(
        order="neox",
        sequence_length=8,
        data=Data(**{split: sources([900], None) for split in ("train", "valid", "test")}),
        batch=BatchSchedule.constant(16),
        micro_batch_size=2,
        data_parallel_size=2,
        gradient_accumulation_steps=4,
        target=Target(kind="iterations", value=Fraction(9)),
        evaluation=Evaluation(interval=3, iterations=2),
        consumed_samples=5 * 16,
    )
    passes = loader_passes(run, [100], "valid", 200)
    assert passes.limit == 96  # of 99, in micro batches of 4
    assert passes.before == 1 * 2 * 16  # an evaluation before the resume
    assert passes.resumed_at == 20 // 3 * 2 * 4  # 20 micro batches were trained on
    fewer = loader_passes(run, [100], "valid", 80)
    assert fewer.positions() == (ServedRange(0, 32, 1), ServedRange(48, 96, 1))
    train = loader_passes(run, [50], "train", 120)  # a loader of 48, resumed in its second pass
    assert (train.limit, train.before, train.resumed_at) == (48, 80, 32)
    assert sum(part.size for part in train.positions()) == 120
    assert max(part.end for part in train.positions()) == 48


@pytest.mark.parametrize(("start", "at"), [(0, [3, 6, 9]), (3, [3, 6, 9]), (5, [6, 9]), (10, [])])
def test_evaluations_of_a_run_are_those_of_its_iterations(start: int, at: list[int]) -> None:
    """At each interval from a start on, and one after training."""
    plan = plan_of(
        "megatron", [5000], "iterations", 10,
        evaluation=Evaluation(interval=3, iterations=2, start=start),
        data=Data(**{split: sources([5000], None) for split in ("train", "valid", "test")}),
    )  # fmt: skip
    assert plan.evaluation is not None
    assert plan.evaluation.rounds_run == len(at) + 1
    assert plan.evaluation.valid_samples_read == (len(at) + 1) * 2 * 4
