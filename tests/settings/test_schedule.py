"""Batch schedules against megatron-core's own calculator, iteration by iteration."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.settings.batch_schedule import (
    BatchSchedule,
    ListedSteps,
    Steps,
    parse_count,
    parse_schedule,
    ramp_up,
    steps_of,
)


@pytest.fixture(scope="module")
def megatron_calculator() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import num_microbatches_calculator
    return num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 20),
    steps=st.integers(1, 30),
    samples=st.integers(1, 5000),
)
def test_ramp_up_is_megatrons(
    megatron_calculator: Any, start: int, increment: int, steps: int, samples: int
) -> None:
    final = start + increment * steps
    theirs = megatron_calculator(final, 1, 1, False, 1, start, increment, samples)
    ours = ramp_up(start, increment, samples, final, "--rampup-batch-size")
    consumed = 0
    for iteration in range(200):
        assert ours.samples_after(iteration) == consumed
        theirs.update(consumed, False)
        consumed += theirs.get_current_global_batch_size()
    assert ours.final == final


STAGES = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=0, max_size=4,
    unique_by=lambda s: s[0],
)  # fmt: skip


@given(STAGES, st.integers(1, 30), st.integers(0, 60), st.integers(0, 500))
def test_iterations_and_samples_are_inverse(
    later: list[tuple[int, int]], first: int, start: int, samples: int
) -> None:
    schedule = BatchSchedule(stages=((0, first), *sorted(later)))
    assume(samples >= start)
    iterations = schedule.iterations_within(samples, start)
    assert schedule.samples_after(iterations, start) <= samples
    assert schedule.samples_after(iterations + 1, start) > samples


def test_samples_of_a_schedule_step_by_step() -> None:
    schedule = BatchSchedule(stages=((0, 2), (5, 3), (10, 7)))
    assert [schedule.samples_after(n) for n in range(6)] == [0, 2, 4, 6, 9, 12]
    assert schedule.samples_after(1, start=12) == 19
    assert [schedule.sizes(0, end) for end in (5, 6, 10, 11)] == [[2], [2, 3], [2, 3], [2, 3, 7]]
    assert [schedule.sizes(begin) for begin in (4, 5, 9, 10)] == [[2, 3, 7], [3, 7], [3, 7], [7]]


@pytest.mark.parametrize("consumed", [0, 4, 6, 12])
def test_bounds_of_steps_that_are_listed(consumed: int) -> None:
    listed = ListedSteps(bounds=np.array([0, 4, 6, 12, 15]), batch_sizes=(4, 2, 6, 3))
    for steps in (3, 4, 5, 6):  # behind the last one steps have more samples than any run
        samples = listed.samples_after(steps)
        assert (listed.batches_within(samples), listed.batches_within(samples - 1)) == (
            steps, steps - 1)  # fmt: skip
    schedule = BatchSchedule(stages=((0, listed),))
    steps, past = steps_of(schedule, consumed, 15)
    assert steps.bounds.tolist() == [0, 4, 6, 12, 15]
    assert past == steps.bounds.tolist().index(consumed)
    with pytest.raises(InvalidArgument, match="sample 5 is not the first of a step"):
        steps_of(schedule, 5, 15)


def test_thresholds_are_tokens_as_in_megatron() -> None:
    schedule = parse_schedule("0:768 250B:1536, 1.5T:3072", 4096, "--batch-schedule")
    assert schedule.stages == ((0, 768), (61035156, 1536), (366210937, 3072))
    assert parse_schedule("1.5T:3072 0:768 250B:1536", 4096, "--batch-schedule") == schedule


@for_each(
    ("text", "reason"),
    [
        ("", "start at 0"),
        ("0", "TOKENS:BATCH"),
        ("5B:3", "start at 0"),
        ("0:4 0:8", "differ by at least one sample"),
        ("0:4 10:8", "differ by at least one sample"),
        ("0:4 1023:8", "differ by at least one sample"),
        ("0:0", "at least 1"),
        ("0:x", "number"),
        ("0:4 1e999:8", "number"),
        ("0:-3", "at least 1"),
    ],
)
def test_bad_schedules_are_refused(text: str, reason: str) -> None:
    assert parse_schedule("0:1 1024:8", 1024, "--batch-schedule").stages == ((0, 1), (1, 8))
    with pytest.raises(InvalidArgument, match=f"--batch-schedule: .*{reason}"):
        parse_schedule(text, 1024, "--batch-schedule")


@pytest.mark.parametrize("ramp", [(0, 1, 10), (4, 0, 10), (4, 5, 10), (64, 4, 10), (4, 4, -1)])
def test_bad_ramp_ups_are_refused(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match=r"--rampup-batch-size: .*change start or increment"):
        ramp_up(*ramp, final=32, setting="--rampup-batch-size")


@pytest.mark.parametrize("ramp", [(4, 4, 0), (32, 4, 100)])
def test_a_ramp_up_without_samples_or_steps_divides_by_zero(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match="Megatron-LM divides by zero"):
        ramp_up(*ramp, 32, "--rampup-batch-size")


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("250B", 250 * 10**9), ("1.5m", 1_500_000), ("2_000", 2000), (" 3K ", 3000)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--train-tokens") == count


@for_each("text", ["1.5", "0.0001K", "-1", "-1K", "K"])
def test_counts_that_are_not_whole_are_refused(text: str) -> None:
    assert (parse_count("0", "--train-tokens"), parse_count("0.001K", "--train-tokens")) == (0, 1)
    with pytest.raises(InvalidArgument, match=f"--train-tokens: '{text}' is not a whole number"):
        parse_count(text, "--train-tokens")


@given(size=st.integers(1, 9), total=st.integers(1, 60), step=st.integers(0, 60))
def test_steps_of_one_size_are_those_listed(size: int, total: int, step: int) -> None:
    schedule = BatchSchedule.constant(size)
    steps, past = steps_of(schedule, min(step * size, total // size * size), total)
    listed = Steps.of(steps.bounds)
    assert (steps.size, past) == (size, min(step, total // size))
    assert (steps.count, steps.end) == (listed.count, listed.end)
    places = range(steps.count + 1)
    assert (
        [*map(steps.samples_after, places)]
        == [*map(listed.samples_after, places)]
        == [*steps.bounds]
    )
    assert [*map(steps.iterations_within, range(total + 2))] == [
        *map(listed.iterations_within, range(total + 2))
    ]


@for_each(
    "stages",
    [(), ((1, 4),), ((0, 4), (9, 8), (8, 16)), ((0, 4), (9, 0)), ((0, 4), (9, -1))],
)
def test_stages_out_of_order_or_without_samples_are_refused(
    stages: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(InvalidArgument, match="begin with sample 0, not fall, and have batches of"):
        BatchSchedule(stages=stages)


@pytest.mark.parametrize("stages", [((0, 1),), ((0, 4), (9, 8), (9, 1))])
def test_stages_may_begin_with_the_same_sample(stages: tuple[tuple[int, int], ...]) -> None:
    assert BatchSchedule(stages=stages).plain_stages == stages
