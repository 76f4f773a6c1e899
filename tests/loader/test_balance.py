"""Balanced steps: the same samples as without, evenly spread work, exact continuation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex._types import I64
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.spans import Spans
from megaindex.loader import (
    CostModel,
    CyclicSampler,
    Loader,
    MicroBatchSampler,
    RandomAccessSampler,
    Recorder,
    check_receipts,
)
from megaindex.loader.receipts import rounds_of
from megaindex.settings.batch_schedule import BatchSchedule, ramp_up

COST = CostModel(linear=57_256, attention=1)
WIDTH = 64


class Rows:
    """An index of which only the lengths of documents matter."""

    num_epochs = 1
    sequence_length = WIDTH
    add_extra_token = 1
    tokens_per_epoch = 0

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self.num_samples = num_samples
        generator = np.random.default_rng(seed)
        self._lengths = []
        for _ in range(num_samples):
            cuts = np.unique(generator.integers(1, WIDTH, generator.integers(0, 6)))
            self._lengths.append(np.diff([0, *cuts, WIDTH + 1]))

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        rows = [self._lengths[k] for k in np.asarray(sample_ids).tolist()]
        length = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
        splits = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        zero = np.zeros(length.size, np.int64)
        return Spans.of_one_source(zero, zero, length, splits)

    def squares(self) -> I64:
        """By hand: the last token of a sample is only a label."""
        each = [(*lengths[:-1], lengths[-1] - 1) for lengths in self._lengths]
        return np.array([sum(int(n) ** 2 for n in row) for row in each], np.int64)


def ranks_of(size: int, state: Any = None, **settings: Any) -> list[MicroBatchSampler]:
    samplers = [
        MicroBatchSampler(data_parallel_rank=rank, data_parallel_size=size, **settings)
        for rank in range(size)
    ]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


def rounds(samplers: list[MicroBatchSampler]) -> list[list[list[int | None]]]:
    """The micro batches of all ranks, side by side."""
    found = [list(each) for each in zip(*samplers, strict=True)]
    assert {len(sampler) for sampler in samplers} == {len(found)}
    return found


def steps_of(
    served: list[list[list[int | None]]], schedule: BatchSchedule, consumed: int = 0
) -> Iterator[Counter[int | None]]:
    """The rows of each step."""
    rows: Counter[int | None] = Counter()
    for batches in served:
        rows.update(row for batch in batches for row in batch)
        size = schedule.samples_after(1, consumed) - consumed
        if rows.total() == size:
            yield rows
            consumed += size
            rows = Counter()
    assert not rows


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    """Number of ranks, seed of the rows, and settings of the sampler."""
    ranks, micro = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    unit = ranks * micro
    batch = draw(
        st.sampled_from(
            [
                BatchSchedule.constant(unit * 3),
                BatchSchedule(stages=((0, unit), (unit * 3, unit * 4), (unit * 12, unit * 2))),
                ramp_up(unit, unit, unit * 7, unit * 4, "batch"),
            ]
        )
    )
    samples = draw(st.integers(1, 60))
    tail = draw(st.sampled_from(["drop", "pad", "wrap"]))
    settings = {
        "num_samples": samples, "micro_batch_size": micro, "global_batch_size": batch, "tail": tail,
        "train_samples": draw(st.integers(1, samples)),
    }  # fmt: skip
    return ranks, draw(st.integers(0, 99)), settings


@given(run=runs())
def test_every_step_has_the_samples_it_has_without(run: tuple[int, int, dict[str, Any]]) -> None:
    ranks, seed, settings = run
    index = Rows(settings["num_samples"], seed)
    plain = rounds(ranks_of(ranks, **settings))
    served = rounds(ranks_of(ranks, **settings, balance=COST, index=index))
    schedule = settings["global_batch_size"]
    assert list(steps_of(served, schedule)) == list(steps_of(plain, schedule))
    held = [[batch.count(None) for batch in batches] for batches in served]
    assert [sorted(row) for row in held] == [
        sorted(batch.count(None) for batch in batches) for batches in plain
    ]  # padding stays spread over the micro batches


@given(run=runs(), cut=st.integers(0, 30), again=st.integers(0, 6), data=st.data())
def test_a_run_continues_between_any_two_rounds_with_other_ranks(
    run: tuple[int, int, dict[str, Any]], cut: int, again: int, data: st.DataObject
) -> None:
    ranks, seed, settings = run
    index = Rows(settings["num_samples"], seed)
    settings |= {"balance": COST, "index": index}
    first = ranks_of(ranks, **settings)
    whole = rounds(first)
    cut = min(cut, len(whole))
    state = first[0].state_after(cut)
    assert all(sampler.state_after(cut) == state for sampler in first)
    # the same ranks go on as if nothing had happened
    assert rounds(ranks_of(ranks, state, **settings)) == whole[cut:]
    # other ranks, twice
    unit = ranks * settings["micro_batch_size"]
    shapes = [(n, unit // n) for n in range(1, unit + 1) if unit % n == 0]
    served, left = whole[:cut], state
    for rounds_more in (again, None):
        size, micro = data.draw(st.sampled_from(shapes))
        samplers = ranks_of(size, left, **{**settings, "micro_batch_size": micro})
        more = rounds(samplers)[:rounds_more]
        served = served + more
        left = samplers[0].state_after(len(more))
    schedule = settings["global_batch_size"]
    assert list(steps_of(served, schedule)) == list(steps_of(whole, schedule))


@pytest.mark.slow
@for_each("samples", range(1, 9))
@for_each(("ranks", "micro"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_a_padded_balanced_step_continues_after_any_round(
    samples: int, ranks: int, micro: int
) -> None:
    """Rows of padding are not samples: 5 samples of 8 rows may all be served with 3 rows left."""
    num_samples = 8 + samples
    settings: dict[str, Any] = {
        "num_samples": num_samples, "global_batch_size": 8, "tail": "pad", "balance": COST,
        "index": Rows(num_samples),
    }  # fmt: skip
    first = ranks_of(ranks, micro_batch_size=micro, **settings)
    whole = rounds(first)
    for cut in range(len(whole)):
        state = first[0].state_after(cut)
        assert rounds(ranks_of(ranks, state, micro_batch_size=micro, **settings)) == whole[cut:]
        for size in (1, 2):
            if ranks * micro % size == 0:
                more = rounds(
                    ranks_of(size, state, micro_batch_size=ranks * micro // size, **settings)
                )
                rows = [row for batches in [*whole[:cut], *more] for b in batches for row in b]
                assert sorted(row for row in rows if row is not None) == [*range(num_samples)]
                assert rows.count(None) == 8 - samples


def test_the_smallest_balanced_step_continues_between_its_rows() -> None:
    settings: dict[str, Any] = {
        "num_samples": 4, "micro_batch_size": 1, "global_batch_size": 2, "balance": COST,
        "index": Rows(4),
    }  # fmt: skip
    first = ranks_of(1, **settings)
    assert rounds(ranks_of(1, first[0].state_after(1), **settings)) == rounds(first)[1:]


def test_a_balanced_step_is_not_finished_on_a_shorter_order() -> None:
    """15 samples are served, those with the most work of the step of samples 12 to 23."""
    settings = {"micro_batch_size": 1, "global_batch_size": 12, "balance": COST, "tail": "wrap"}
    (run,) = ranks_of(1, num_samples=40, index=Rows(40), **settings)
    state = run.state_after(15)
    (short,) = ranks_of(1, num_samples=20, index=Rows(20), **settings)
    with pytest.raises(InvalidArgument, match="the order must have 40 samples"):
        short.load_state_dict(state, allow=("train_samples",))


@given(run=runs())
def test_rounds_take_samples_of_falling_work(run: tuple[int, int, dict[str, Any]]) -> None:
    ranks, seed, settings = run
    index = Rows(settings["num_samples"], seed)
    squares = index.squares()
    served = rounds(ranks_of(ranks, **settings, balance=COST, index=index))
    schedule, consumed, rows = settings["global_batch_size"], 0, 0
    least: Any = None
    for batches in served:
        work = [squares[row] for batch in batches for row in batch if row is not None]
        assert least is None or not work or max(work) <= least
        least = min(work, default=least)
        rows += sum(map(len, batches))
        if rows == schedule.samples_after(1, consumed) - consumed:
            consumed, rows, least = consumed + rows, 0, None


def test_a_written_down_run() -> None:
    """Work of samples 0 ... 7 by hand; two ranks, micro batches of one row, steps of four."""
    index = Rows(8)
    index._lengths = [np.array(row) for row in (
        [64, 1], [32, 33], [8] * 7 + [9], [60, 5], [1] * 65, [64, 1], [40, 25], [48, 17],
    )]  # fmt: skip
    assert index.squares().tolist() == [4096, 2048, 512, 3616, 64, 4096, 2176, 2560]
    settings = {"num_samples": 8, "micro_batch_size": 1, "global_batch_size": 4}
    served = rounds(ranks_of(2, **settings, balance=COST, index=index))
    # 3616 < 4096, so rank 1 gets the larger of the second round
    assert served == [[[0], [3]], [[2], [1]], [[5], [7]], [[4], [6]]]


def test_receipts_count_samples_in_their_step() -> None:
    index = Rows(24)
    settings = {"num_samples": 24, "micro_batch_size": 2, "global_batch_size": 12, "index": index}
    sampler = ranks_of(2, **settings, balance=COST)[0]
    ours = rounds_of(sampler)
    assert [next(ours)[:2] for _ in range(6)] == [(0, 12)] * 3 + [(12, 24)] * 3
    assert next(ours) is None
    assert [each[:2] for each in (rounds_of(sampler, 4), rounds_of(sampler, 4)) for each in [
        next(each)]] == [(12, 24)] * 2  # fmt: skip
    # a step of one round
    sampler = ranks_of(2, **{**settings, "global_batch_size": 4}, balance=COST)[0]
    ours = rounds_of(sampler)
    assert [next(ours)[:2] for _ in range(3)] == [(0, 4), (4, 8), (8, 12)]


def begun(**changes: Any) -> dict[str, Any]:
    """A state within the second step, and the settings of its run."""
    settings = {"num_samples": 40, "micro_batch_size": 2, "global_batch_size": 12, **changes}
    return ranks_of(2, **settings)[0].state_after(4)


def test_a_state_records_the_balance() -> None:
    state = begun(balance=COST)
    assert state["version"] == 2  # which releases without balance refuse
    assert state["balance"] == {"linear": 57_256, "attention": 1}
    assert state["step"] == {"first": 12, "samples": 12, "rows": 12}
    assert (state["consumed_samples"], state["rows_left"]) == (16, 8)
    between = ranks_of(2, num_samples=40, micro_batch_size=2, global_batch_size=12, balance=COST)
    assert between[0].state_after(3)["version"] == 1
    assert "step" not in between[0].state_after(3)
    assert "balance" not in begun()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (None, COST),
        (COST, None),
        (COST, CostModel(linear=57_255, attention=1)),
    ],
)
def test_balance_may_change_between_steps_only(
    theirs: CostModel | None, ours: CostModel | None
) -> None:
    settings = {"num_samples": 40, "micro_batch_size": 2, "global_batch_size": 12}
    index = Rows(40)
    state = begun(balance=theirs)
    with pytest.raises(InvalidArgument, match="balance must be .* 8 rows left"):
        ranks_of(2, state, **settings, balance=ours, index=index)
    for count in (0, 3, 6):
        state = ranks_of(2, **settings, balance=theirs)[0].state_after(count)
        samplers = ranks_of(2, state, **settings, balance=ours, index=index)
        expected = rounds(ranks_of(2, **settings, balance=ours, index=index))
        assert rounds(samplers) == expected[count:]


def test_other_samplers_refuse_a_begun_step() -> None:
    cyclic = CyclicSampler(
        num_samples=40, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2,
        train_samples=80,
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="within a balanced step"):
        cyclic.load_state_dict(begun(balance=COST), allow=("kind",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_samples": 20, "tail": "pad"}, "past the end of this run"),
        ({"num_samples": 20}, "num_samples|past the end"),
    ],
)
def test_a_begun_step_must_fit_the_run(change: dict[str, Any], message: str) -> None:
    settings = {"num_samples": 40, "micro_batch_size": 2, "global_batch_size": 12, **change}
    with pytest.raises(InvalidArgument, match=message):
        ranks_of(2, begun(balance=COST), **settings, balance=COST)


@for_each(
    "change",
    [
        {"version": 1},
        {"version": 3},
        {"step": None},
        {"step": {"first": 12, "samples": 12}},
        {"step": {"first": 17, "samples": 12, "rows": 12}},
        {"step": {"first": 13, "samples": 12, "rows": 12}},  # 9 samples left in 8 rows
        {"step": {"first": 12, "samples": 13, "rows": 12}},
        {"step": {"first": 12, "samples": 3, "rows": 12}},
        {"step": {"first": 9, "samples": 12, "rows": 12}},
        {"step": {"first": 12, "samples": 12, "rows": 2**31 + 1}},
        {"step": {"first": 12, "samples": 12, "rows": 8}},
        {"rows_left": 0},
        {"balance": None},
        {"balance": 3},
        {"balance": {"linear": 1}},
        {"balance": {"linear": -1, "attention": 1}},
        {"balance": {"linear": float("nan"), "attention": 1}},
        {"balance": {"linear": True, "attention": 1}},
        {"balance": {"linear": 0, "attention": 0}},
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        ranks_of(
            2, {**begun(balance=COST), **change},
            num_samples=40, micro_batch_size=2, global_batch_size=12, balance=COST,
        )  # fmt: skip


def test_wrong_arguments() -> None:
    settings = {"num_samples": 40, "micro_batch_size": 2, "global_batch_size": 12}
    with pytest.raises(InvalidArgument, match="balance must be a CostModel"):
        ranks_of(2, **settings, balance="llama3-8b")
    with pytest.raises(InvalidArgument, match="balance needs the lengths"):
        next(iter(ranks_of(2, **settings, balance=COST)[0]))
    with pytest.raises(InvalidArgument, match="must have the 40 samples"):
        ranks_of(2, **settings, balance=COST, index=Rows(39))
    index = Rows(40)
    sampler = ranks_of(2, **settings, balance=COST, index=index)[0]
    sampler.balance_by(index)
    with pytest.raises(InvalidArgument, match="another index"):
        sampler.balance_by(Rows(40))
    index.sequence_length = 2**31 - 2
    with pytest.raises(InvalidArgument, match=r"less than 2\*\*63"):
        ranks_of(2, **settings, balance=COST, index=index)


def test_a_model_without_attention_is_assigned_in_order() -> None:
    settings = {"num_samples": 40, "micro_batch_size": 2, "global_batch_size": 12}
    flat = CostModel(linear=1, attention=0)
    assert rounds(ranks_of(2, **settings, balance=flat)) == rounds(ranks_of(2, **settings))


def test_random_access_stays_in_order() -> None:
    hosts = RandomAccessSampler(
        num_samples=40, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2
    )
    assert hosts[1] == [4, 5]


def test_a_loader_balances_by_its_index(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    corpus = write_corpus(tmp_path / "c", np.random.default_rng(3).integers(1, 40, 150))
    index = megaindex.build_index(corpus, sequence_length=16)
    fingerprints = [corpus_fingerprint(corpus)]

    def loader(balance: CostModel | None) -> Loader:
        sampler = MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=2, data_parallel_rank=0,
            data_parallel_size=1, global_batch_size=12, balance=balance,
        )  # fmt: skip
        return Loader(index, sampler, recorder=Recorder(fingerprints), content=None)

    plain, balanced = loader(None), loader(COST)
    ours = torch.cat([batch["tokens"] for batch in balanced])
    theirs = torch.cat([batch["tokens"] for batch in plain])
    assert not torch.equal(ours, theirs)
    for first in range(0, len(ours), 12):
        rows = [sorted(side[first : first + 12].tolist()) for side in (ours, theirs)]
        assert rows[0] == rows[1]
    for each in (plain, balanced):
        assert check_receipts([each.state_dict()], index).equal
    # within a step the samples of the whole step must stay
    begun = loader(COST)
    batches = iter(begun)
    next(batches)
    state = begun.state_dict()
    assert state["sampler"]["step"] == {"first": 0, "samples": 12, "rows": 12}
    shorter = megaindex.build_index(corpus, sequence_length=16, seed=5)
    other = Loader(
        shorter,
        MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=2, data_parallel_rank=0,
            data_parallel_size=1, global_batch_size=12, balance=COST,
        ),
        content=None,
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="serves other samples"):
        other.load_state_dict(state)
    again = loader(COST)
    again.load_state_dict(state)
    assert torch.equal(torch.cat([batch["tokens"] for batch in again]), ours[2:])
