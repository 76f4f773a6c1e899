"""Rows of all ranks: as in the frameworks, each sample once, on any cluster."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.loader import CyclicSampler, MicroBatchSampler
from megaindex.loader.sampler_state import RankLayout
from megaindex.loader.samplers import Step, assign_rows
from megaindex.plan import make_plan
from megaindex.settings.batch_schedule import ramp_up
from megaindex.settings.run_settings import BatchSchedule, Data, RunSettings, Target
from megaindex.settings.sources import Source

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/samplers.json").read_text())
Round = tuple[list[int | None], ...]


def cases(kind: str) -> list[Any]:
    return [pytest.param(case, id=str(k)) for k, case in enumerate(GOLDEN[kind])]


def rounds_of(size: int, **settings: Any) -> list[Round]:
    """The micro batches of all ranks, side by side."""
    samplers = [
        MicroBatchSampler(data_parallel_rank=rank, data_parallel_size=size, **settings)
        for rank in range(size)
    ]
    rounds = list(zip(*samplers, strict=True))
    assert {len(sampler) for sampler in samplers} == {len(rounds)}
    return rounds


def rows_of(rounds: list[Round]) -> list[int | None]:
    return [row for micro_batches in rounds for rows in micro_batches for row in rows]


def batches_of(case: dict[str, Any], sampler: Any, **more: Any) -> list[list[list[int]]]:
    return [
        list(
            sampler(
                num_samples=case["num_samples"], micro_batch_size=case["micro_batch_size"],
                data_parallel_rank=rank, data_parallel_size=len(case["ranks"]), **more,
            )
        )
        for rank in range(len(case["ranks"]))
    ]  # fmt: skip


@for_each("case", cases("single"))
def test_megatrons_single(case: dict[str, Any]) -> None:
    consumed = case["consumed_samples"]
    whole = batches_of(case, MicroBatchSampler, consumed_samples=consumed)
    if case["drop_last"]:
        assert whole == case["ranks"]
        return
    # theirs keeps the samples of a last round, and leaves ranks short of rows or of a micro batch
    padded = batches_of(case, MicroBatchSampler, consumed_samples=consumed, tail="pad")
    count = len(whole[0])
    assert all(theirs[:count] == ours for theirs, ours in zip(case["ranks"], whole, strict=True))
    last = [row for rank in case["ranks"] for batch in rank[count:] for row in batch]
    assert [r for rank in padded for rows in rank[count:] for r in rows if r is not None] == last


@pytest.mark.parametrize("case", cases("neox"))
def test_neox(case: dict[str, Any]) -> None:
    consumed = case["start_iter"] * case["micro_batch_size"] * len(case["ranks"])
    assert batches_of(case, MicroBatchSampler, consumed_samples=consumed) == case["ranks"]


@for_each("case", cases("cyclic"))
def test_megatrons_cyclic(case: dict[str, Any]) -> None:
    size, count = len(case["resumed"]), len(case["resumed"][0])
    stride = case["micro_batch_size"] * size
    ours = batches_of(
        {**case, "ranks": case["resumed"]}, CyclicSampler,
        consumed_samples=case["consumed_samples"], data_sharding=case["data_sharding"],
        train_samples=case["consumed_samples"] + count * stride + stride - 1,
    )  # fmt: skip
    assert ours == case["resumed"]
    if case["data_sharding"] or case["num_samples"] % stride == 0:
        assert ours == case["unbroken"]


def test_cyclic_ranks_agree_on_epochs_where_megatrons_differ() -> None:
    """5 samples on 2 ranks: unbroken, Megatron's rank 0 has a third micro batch in each epoch."""
    (case,) = [
        case for case in GOLDEN["cyclic"] if case["num_samples"] == 5 and not case["data_sharding"]
    ]
    unbroken, resumed = case["unbroken"][0], case["resumed"][0]
    assert [k for k in range(8) if unbroken[k] != resumed[k]] == [2, 4, 6]
    assert case["unbroken"][1] == case["resumed"][1]


@given(
    samples=st.integers(0, 60), micro=st.integers(1, 4), size=st.integers(1, 5),
    rounds=st.integers(1, 5), data=st.data(),
)  # fmt: skip
def test_a_step_is_spread_evenly_and_can_be_cut_anywhere(
    samples: int, micro: int, size: int, rounds: int, data: st.DataObject
) -> None:
    rows = rounds * micro * size
    samples = min(samples, rows)

    def dealt(step: Step, size: int, micro: int) -> list[list[list[int | None]]]:
        ranks = [
            RankLayout(micro_batch_size=micro, data_parallel_rank=k, data_parallel_size=size)
            for k in range(size)
        ]
        return [list(assign_rows(step, rank)) for rank in ranks]

    step = Step(first=7, samples=samples, rows=rows)
    whole = dealt(step, size, micro)
    order = rows_of(list(zip(*whole, strict=True)))
    assert [row for row in order if row is not None] == list(range(7, 7 + samples))
    held = [[micro - batch.count(None) for batch in rank] for rank in whole]
    assert max(map(max, held)) - min(map(min, held)) <= 1
    assert max(map(sum, held)) - min(map(sum, held)) <= 1
    cut = data.draw(st.integers(0, rounds))
    begin = step.begin(cut * size, micro)
    rest = Step(first=begin, samples=7 + samples - begin, rows=rows - cut * micro * size)
    assert dealt(rest, size, micro) == [rank[cut:] for rank in whole]


@st.composite
def schedules(draw: st.DrawFn, unit: int = 1) -> BatchSchedule:
    if draw(st.booleans()):
        return BatchSchedule.constant(unit * draw(st.integers(1, 6)))
    if draw(st.booleans()):
        start, steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        final = unit * (start + steps)
        return ramp_up(start * unit, unit, draw(st.integers(1, 90)), final, "schedule")
    firsts = sorted(draw(st.sets(st.integers(1, 80), max_size=3)))
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(firsts) + 1, max_size=len(firsts) + 1))
    return BatchSchedule(
        stages=tuple(zip([0, *firsts], [unit * size for size in sizes], strict=True))
    )


@given(
    tokens=st.integers(20, 900), micro=st.integers(1, 3), size=st.integers(1, 4),
    kind=st.sampled_from(["samples", "epochs"]), data=st.data(),
)  # fmt: skip
def test_samplers_serve_what_was_planned(
    tokens: int, micro: int, size: int, kind: Any, data: st.DataObject
) -> None:
    """Every tail: iterations, samples consumed, dropped, masked and repeated."""
    batch = data.draw(schedules(unit=micro * size))
    value = data.draw(st.integers(1, 150 if kind == "samples" else 2))
    plan = make_plan(
        RunSettings(
            order="epoch", sequence_length=8, data=Data(train=(Source(tokens=tokens),)),
            batch=batch, target=Target(kind=kind, value=Fraction(value)), coverage="none",
            data_parallel_size=size, micro_batch_size=micro,
        )
    )  # fmt: skip
    drop = plan.tails[0]
    wanted = drop.samples_consumed + drop.samples_dropped
    for tail in plan.tails:
        order = data.draw(st.sampled_from([wanted, wanted + 3, wanted + 1000]))  # samples it holds
        rounds = rounds_of(
            size, num_samples=order, micro_batch_size=micro, global_batch_size=batch,
            train_samples=wanted, tail=tail.policy,
        )  # fmt: skip
        rows = rows_of(rounds)
        served = [row for row in rows if row is not None]
        assert len(rows) == batch.samples_after(tail.train_iters)
        assert served == [position % order for position in range(tail.samples_consumed)]
        assert rows.count(None) == tail.samples_masked
        assert len(served) - wanted == tail.samples_repeated - tail.samples_dropped
        # whole steps: no rank is ahead of another
        steps = [
            batch.samples_after(k + 1) - batch.samples_after(k) for k in range(tail.train_iters)
        ]
        assert len(rounds) * micro * size == sum(steps)


@given(data=st.data(), tail=st.sampled_from(["drop", "pad", "wrap"]), count=st.integers(0, 150))
def test_every_sample_once_whatever_the_clusters(
    data: st.DataObject, tail: Any, count: int
) -> None:
    """Ranks, micro batch and batch schedule change at any step, and inside steps where they fit."""
    state, seen, over = None, list[int | None](), False
    for _ in range(10):
        micro, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        settings = {
            "num_samples": count, "micro_batch_size": micro, "tail": tail,
            "global_batch_size": data.draw(schedules(unit=micro * size)),
        }  # fmt: skip
        samplers = [
            MicroBatchSampler(data_parallel_rank=rank, data_parallel_size=size, **settings)
            for rank in range(size)
        ]
        if state is not None:
            if state["rows_left"] % (micro * size):
                with pytest.raises(InvalidArgument, match="rows left of the current step"):
                    samplers[0].load_state_dict(state)
                continue
            for sampler in samplers:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        stop = data.draw(st.integers(0, 12))
        iterators = [iter(sampler) for sampler in samplers]
        taken = list(itertools.islice(zip(*iterators, strict=True), stop))
        seen += rows_of(taken)
        states = [sampler.state_after(len(taken)) for sampler in samplers]
        assert states == [states[0]] * size
        state = states[0]
        over = len(taken) == len(samplers[0]) and stop > len(taken)
    samples = [row for row in seen if row is not None]
    if tail == "wrap":
        assert samples == [position % count for position in range(len(samples))]
    else:
        assert samples == list(range(len(samples)))
    if over and tail != "drop":
        assert len(samples) >= count
