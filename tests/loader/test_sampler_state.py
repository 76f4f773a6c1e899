"""States of samplers: exact continuation, and refusals."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from support.inputs import for_each

from megaindex.errors import FormatError, InvalidArgument
from megaindex.loader import CyclicSampler, MicroBatchSampler
from megaindex.settings.batch_schedule import BatchSchedule

torch = pytest.importorskip("torch")

STEPS = {"global_batch_size": 12, "train_samples": 61}
KINDS = {"single": MicroBatchSampler, "cyclic": CyclicSampler}


def sampler(kind: str = "single", rank: int = 0, **changes: Any) -> Any:
    settings = {
        "num_samples": 100, "train_samples": 96, "micro_batch_size": 2, "data_parallel_rank": rank,
        "data_parallel_size": 2, "fingerprint": "order 1",
    }  # fmt: skip
    return KINDS[kind](**{**settings, **changes})


@for_each(
    ("kind", "settings"),
    [
        ("single", {}),
        ("single", {**STEPS, "tail": "pad"}),
        ("single", {**STEPS, "tail": "wrap", "num_samples": 62}),
        ("single", {"global_batch_size": BatchSchedule(stages=((0, 4), (10, 12), (40, 8)))}),
        ("cyclic", {"train_samples": 400}),
        ("cyclic", {"train_samples": 400, "data_sharding": False}),
    ],
)  # fmt: skip
def test_a_state_at_any_place_goes_on_exactly(kind: str, settings: dict[str, Any]) -> None:
    whole = list(sampler(kind, rank=1, **settings))
    running = sampler(kind, rank=0, **settings)
    assert len(whole) == len(running)
    initial = running.state_dict()
    for count, _ in enumerate(running, 1):
        state = running.state_dict()
        assert state == running.state_after(count)
        assert len(json.dumps(state)) < 250
        resumed = sampler(kind, rank=1, **settings)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert len(resumed) == len(whole) - count
        assert list(resumed) == whole[count:]
        # and from there once more
        half = len(resumed) // 2
        second = sampler(kind, rank=1, **settings)
        second.load_state_dict(resumed.state_after(half))
        assert list(second) == whole[count + half :]
    assert count == len(whole)
    assert running.state_after(0) == initial
    iter(running)
    assert running.state_dict() == initial  # a new iteration starts where the first did


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_is_known_of_one_rank_alone(kind: str) -> None:
    assert sampler(kind, data_parallel_size=1).batch_size == 2
    with pytest.raises(InvalidArgument, match="rank 0 of 2"):
        _ = sampler(kind).batch_size


def test_torch_checkpoints_hold_a_state() -> None:
    for kind in KINDS:
        running = sampler(kind)
        next(iter(running))
        file = io.BytesIO()
        torch.save({"sampler": running.state_dict()}, file)
        file.seek(0)
        assert torch.load(file, weights_only=True)["sampler"] == running.state_dict()


@for_each(
    ("kind", "changes", "name", "reason"),
    [
        (
            "single",
            {"fingerprint": "order 2"},
            "fingerprint",
            "must be 'order 1', as in the checkpoint",
        ),
        ("single", {"fingerprint": None}, "fingerprint", "as in the checkpoint"),
        (
            "single",
            {"train_samples": 30},
            "train_samples",
            "is at 32 samples .* past the end of this run, 30",
        ),
        ("cyclic", {"fingerprint": "order 2"}, "fingerprint", "fingerprint of the order must be"),
        ("cyclic", {"data_parallel_size": 4}, "world_size", "world_size must be 2"),
        (
            "cyclic",
            {"micro_batch_size": 1},
            "micro_batch_size",
            "micro_batch_size must be 2",
        ),
        ("cyclic", {"num_samples": 101}, "num_samples", "num_samples must be 100"),
        (
            "cyclic",
            {"data_sharding": False},
            "data_sharding",
            "data_sharding must be True",
        ),
        (
            "cyclic",
            {"train_samples": 28},
            "train_samples",
            "is at 32 samples, past the end of this run, 28",
        ),
    ],
)
def test_states_of_other_orders_are_refused(
    kind: str, changes: dict[str, Any], name: str, reason: str
) -> None:
    state = sampler(kind).state_after(8)
    assert state["consumed_samples"] == 32
    other = sampler(kind, **changes)
    before = other.state_dict()
    with pytest.raises(InvalidArgument, match=f'{reason}.*allow=\\("{name}",\\)'):
        other.load_state_dict(state)
    assert other.state_dict() == before
    other.load_state_dict(state, allow=(name,))
    expected = 0 if name == "train_samples" else 64 // other._ranks.rows_per_round
    assert len(list(other)) == len(other) == expected


def test_a_shorter_order_is_refused() -> None:
    state = sampler().state_after(8)
    for size in (30, 31):
        short = sampler(num_samples=size, train_samples=size)
        with pytest.raises(InvalidArgument, match="order must have 100 samples"):
            short.load_state_dict(state)
    ended = sampler(num_samples=32, train_samples=32)
    ended.load_state_dict(state)
    assert list(ended) == []
    short.load_state_dict(state, allow=("num_samples", "train_samples"))
    assert list(short) == []
    longer = sampler(num_samples=500, train_samples=400)
    longer.load_state_dict(state)  # the same beginning
    assert next(iter(longer)) == [32, 33]


def test_a_step_begun_has_to_fit_a_shorter_run() -> None:
    """32 samples are served and 4 are left of their step: a run of 34 would drop all four."""
    state = sampler(**STEPS).state_after(8)
    with pytest.raises(InvalidArgument, match="at 32 samples with 4 rows left .* this run, 34"):
        sampler(**{**STEPS, "train_samples": 34}).load_state_dict(state)
    padded = sampler(**{**STEPS, "train_samples": 34}, tail="pad")
    padded.load_state_dict(state)
    assert list(padded) == [[32, None]]


def test_a_wrapped_run_does_not_continue_on_a_longer_order() -> None:
    """After 0 … 59 and again 0 … 11, an order of 100 would have had 60 … 71 there."""
    ended = sampler(num_samples=60, train_samples=60, global_batch_size=24, tail="wrap")
    state = ended.state_after(len(ended))
    assert state["consumed_samples"] == 72
    ended.load_state_dict(state)
    assert list(ended) == []
    with pytest.raises(InvalidArgument, match="the order must have 60 samples"):
        sampler(global_batch_size=24, tail="wrap").load_state_dict(state)


def test_another_kind_is_refused() -> None:
    state = sampler("single").state_after(8)
    with pytest.raises(InvalidArgument, match="of kind 'single'"):
        sampler("cyclic").load_state_dict(state)
    changed = sampler("cyclic")
    changed.load_state_dict(state, allow=["kind"])
    assert changed.state_dict()["consumed_samples"] == 32
    within = sampler("single", **STEPS).state_after(8)
    assert (within["consumed_samples"], within["rows_left"]) == (32, 4)
    changed = sampler("cyclic", train_samples=61)
    changed.load_state_dict(within, allow=["kind"])
    after = changed.state_dict()
    assert (after["consumed_samples"], after["rows_left"]) == (32, 0)  # rows of the other's step
    changed = sampler("single")
    changed.load_state_dict(sampler("cyclic").state_after(8), allow=["kind"])
    assert changed.state_dict()["consumed_samples"] == 32


def test_a_cyclic_run_of_single_rows_continues_anywhere() -> None:
    one = dict.fromkeys(("num_samples", "micro_batch_size", "data_parallel_size"), 1)
    settings = {**one, "train_samples": 3}
    whole = sampler("cyclic", **settings)
    assert list(whole) == [[0]] * 3
    for count in range(4):
        state = whole.state_after(count)
        resumed = sampler("cyclic", **settings)
        with pytest.raises(FormatError, match="rows_left must be a whole number from 0 to 0"):
            resumed.load_state_dict({**state, "rows_left": 1})
        resumed.load_state_dict(state)
        assert list(resumed) == [[0]] * (3 - count)


def test_a_cyclic_run_continues_between_rounds_only() -> None:
    state = sampler("cyclic").state_after(7)
    with pytest.raises(InvalidArgument, match="whole rounds of 8 samples"):
        sampler("cyclic", data_parallel_size=4).load_state_dict(state, allow=("world_size",))


def test_states_of_something_else_are_refused() -> None:
    state = sampler().state_dict()
    damaged: list[Any] = [
        {}, None, [], {**state, "consumed_samples": -1}, {**state, "rows_left": None},
        {name: value for name, value in state.items() if name != "train_samples"},
    ]  # fmt: skip
    for wrong in damaged:
        with pytest.raises(FormatError, match="not the state of a sampler"):
            sampler().load_state_dict(wrong)
    with pytest.raises(FormatError, match="has version 4"):
        sampler().load_state_dict({**state, "version": 4})
    for names in ("kind", ["micro_batch_size"]):
        with pytest.raises(InvalidArgument, match="allow must hold names among kind, skip, f"):
            sampler().load_state_dict(state, allow=names)


@for_each(
    ("kind", "changes", "message"),
    [
        ("single", {"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ("single", {"data_parallel_rank": 2}, "data_parallel_rank must be 0 or 1"),
        (
            "single",
            {"train_samples": 101},
            "train_samples must be from 0 to 100, num_samples",
        ),
        (
            "single",
            {"global_batch_size": 6},
            "6 must be a multiple of micro batch x data-parallel size = 4",
        ),
        ("single", {"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ("single", {"tail": "repeat"}, "tail must be one of"),
        ("single", {"consumed_samples": 97}, "consumed_samples must be from 0 to 96"),
        (
            "single",
            {"tail": "wrap", "global_batch_size": 36, "consumed_samples": 132},
            "from 0 to 131, the end of this run",
        ),
        (
            "cyclic",
            {"num_samples": 3},
            "num_samples must be at least 4, a micro batch on every rank, got 3",
        ),
        ("cyclic", {"consumed_samples": 97}, "from 0 to 96, train_samples"),
        ("cyclic", {"consumed_samples": 6}, "whole rounds of 4 samples"),
    ],
)
def test_wrong_settings_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        sampler(kind, **changes)
    with pytest.raises(InvalidArgument, match="micro_batches must be from 0 to 24"):
        sampler(kind).state_after(25)


def test_micro_batches_change_where_a_step_begins() -> None:
    one: dict[str, Any] = {"num_samples": 12, "data_parallel_rank": 0, "data_parallel_size": 1}
    changing = {**one, "micro_batch_size": [(0, 1), (4, 2)], "global_batch_size": 2}
    assert list(MicroBatchSampler(**changing))[3:5] == [[3], [4, 5]]
    resumed = MicroBatchSampler(**changing, consumed_samples=2)
    resumed.load_state_dict({**resumed.state_dict(), "consumed_samples": 2})
    assert list(resumed)[:3] == [[2], [3], [4, 5]]
    with pytest.raises(InvalidArgument, match="from sample 1 on do not end at sample 4"):
        resumed.load_state_dict({**resumed.state_dict(), "consumed_samples": 1})
    for end in (12, 100):  # no step has to end there
        changing["micro_batch_size"] = [(0, 1), (end, 2)]
        last = MicroBatchSampler(**changing)
        last.load_state_dict({**last.state_dict(), "consumed_samples": 1})
        assert len(last) == 10
    some = MicroBatchSampler(**one, micro_batch_size=[(0, 2), (4, None)], global_batch_size=2)
    assert (len(some), next(iter(some))) == (2, [0, 1])
