"""Mixtures of streams: exact shares, passes in order, any position by itself."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.index import mixing as module
from megaindex.index.mixing import (
    ChangedMixing,
    FixedMixing,
    MixedPositions,
    Mixing,
    MixTable,
    PerStream,
    Random,
    Stratified,
    row_of_weights,
)
from megaindex.kernels.reference.blending import UNIT


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 positions, 16 shuffled together, so that short stages have many."""
    monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(module, "SHUFFLED", 16)


def mixing_of(kind: str, shares: tuple[int, ...], period: int) -> Mixing:
    if kind == "stratified":
        return Stratified(shares=shares)
    if kind == "per stream":
        return PerStream(shares=shares, batch_sizes=(3,) * len(shares))
    if kind == "own batches":
        return PerStream(shares=shares, batch_sizes=(20, 20, 20, 1, 1)[: len(shares)])
    return Random(shares=shares, seed=5, name="stage", period=period)


KINDS = ("stratified", "per stream", "own batches", "random")
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


def check_walk(mixing: Mixing, streams: int) -> MixedPositions:
    """Return the draws of 300 positions; counts are those of the draws before."""
    served = mixing.lookup(np.arange(300))
    counts = np.zeros(streams, int)
    for position in range(300):
        assert mixing.counts(position).tolist() == counts.tolist()
        assert served.ordinal[position] == counts[served.stream[position]]
        counts[served.stream[position]] += 1
    return served


@pytest.mark.slow_cases("own batches")
@pytest.mark.parametrize("kind", KINDS)
@given(shares=SHARES, positions=st.lists(st.integers(0, 299), max_size=40))
@example(shares=(1, 1, 1, 1, 1), positions=[])  # the first batches are the largest
def test_any_position_is_what_walking_there_gives(
    kind: str, shares: tuple[int, ...], positions: list[int]
) -> None:
    """Every stream serves its samples in order, and counts are those of the draws before."""
    mixing = mixing_of(kind, shares, sum(shares))
    served = check_walk(mixing, len(shares))
    found = mixing.lookup(np.array(positions, np.int64))
    assert found.stream.tolist() == served.stream[positions].tolist()
    assert found.ordinal.tolist() == served.ordinal[positions].tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(shares=SHARES, ends=st.tuples(st.integers(0, 150), st.integers(0, 150)))
def test_streams_of_a_range(kind: str, shares: tuple[int, ...], ends: tuple[int, int]) -> None:
    mixing, (begin, end) = mixing_of(kind, shares, sum(shares)), sorted(ends)
    streams, before = mixing.streams_between(begin, end)
    assert streams.tolist() == mixing.lookup(np.arange(begin, end)).stream.tolist()
    assert before.tolist() == mixing.counts(begin).tolist()


@for_each("shares", [(1,), (2, 3), (9, 1, 4, 0)])
@for_each("unit", [1, 3])
def test_weights_that_change(shares: tuple[int, ...], unit: int) -> None:
    """Twice, the second time to those in reverse; a unit of 3 are batches of one stream."""
    own = tuple(share for share in shares if share)
    first: FixedMixing = Stratified(shares=own)
    if unit == 3:
        first = PerStream(shares=own, batch_sizes=(3,) * len(own))
    table = MixTable(first, 39, len(shares), unit)
    weights = [[Fraction(k + 1) for k in range(len(shares))], [Fraction(n) for n in shares[::-1]]]
    table.add(np.array([39, 123]) // unit, np.array([row_of_weights(each) for each in weights]))
    mixing = ChangedMixing(table=table, size=2, rows=(0, 2), columns=tuple(range(len(shares))))
    served = check_walk(mixing, len(shares))
    assert served.stream[:39].tolist() == first.lookup(np.arange(39)).stream.tolist()
    batches = served.stream.reshape(-1, unit)
    assert (batches == batches[:, :1]).all()
    drawn = np.bincount(served.stream[39:123], minlength=len(shares))
    exact = 84 * np.arange(1, len(shares) + 1) / sum(range(len(shares) + 1))
    assert np.abs(drawn - exact).max() < 2 * unit
    for begin, end in ((0, 39), (5, 150), (38, 40), (124, 299)):
        streams, before = mixing.streams_between(begin, end)
        assert streams.tolist() == served.stream[begin:end].tolist()
        assert before.tolist() == mixing.counts(begin).tolist()
    for positions in ([3, 50, 5], [38, 38, 40], [40, 39, 38], [70], []):
        found = mixing.lookup(np.array(positions, np.int64))
        assert found.stream.tolist() == served.stream[positions].tolist()
        assert found.ordinal.tolist() == served.ordinal[positions].tolist()
    # the first weights are those of the first streams, the second of all
    assert mixing.streams_before(39) == list(range(len(own)))
    assert mixing.streams_before(40) == list(range(len(shares)))
    assert mixing.streams_between(2**60 - 1, 2**60)[0].size == 1
    with pytest.raises(InvalidArgument) as caught:
        mixing.streams_between(2**60, 2**60 + 1)
    assert str(caught.value) == f"a stage must have at most 2**60 positions, got {2**60 + 1}"


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_draws_that_lie_together(kind: str) -> None:
    """In few of the parts that are searched, the first, the last or both."""
    mixing = mixing_of(kind, (2, 3), 5)
    streams, ordinals = mixing.lookup(np.arange(300))
    for stream in (0, 1):
        own = np.flatnonzero(streams == stream)
        for chosen in (own[:2], own[-2:], own[[0, -1]], own[:0], own):
            found = mixing.positions(stream, ordinals[chosen], 300)
            assert found.tolist() == chosen.tolist()


@pytest.mark.parametrize("kind", ["stratified", "random"])
@given(shares=SHARES, periods=st.integers(1, 8))
def test_shares_are_exact_after_every_period(
    kind: str, shares: tuple[int, ...], periods: int
) -> None:
    mixing = mixing_of(kind, shares, sum(shares))
    counts = mixing.counts(periods * sum(shares))
    assert counts.tolist() == [periods * share for share in shares]


@given(shares=SHARES)
def test_batches_are_of_one_stream(shares: tuple[int, ...]) -> None:
    mixing = PerStream(shares=shares, batch_sizes=(3,) * len(shares))
    batches = mixing.lookup(np.arange(3 * sum(shares))).stream.reshape(-1, 3)
    assert (batches == batches[:, :1]).all()
    assert np.bincount(batches[:, 0], minlength=len(shares)).tolist() == list(shares)


def test_random_blocks_hold_their_share_in_another_order() -> None:
    shares = (8, 5, 3)
    spread, shuffled = Stratified(shares=shares), Random(shares=shares, seed=1, name="a")
    other = Random(shares=shares, seed=1, name="b")
    for begin in range(0, 160, 16):
        at = np.arange(begin, begin + 16)
        ours = shuffled.lookup(at).stream.tolist()
        assert sorted(ours) == sorted(spread.lookup(at).stream.tolist())
    streams = [m.lookup(np.arange(160)).stream.tolist() for m in (spread, shuffled, other)]
    assert streams[0] != streams[1] != streams[2] != streams[0]


@pytest.mark.parametrize("kind", KINDS)
@given(shares=SHARES, data=st.data())
def test_the_longest_stretch_within_limits(
    kind: str, shares: tuple[int, ...], data: st.DataObject
) -> None:
    mixing = mixing_of(kind, shares, sum(shares))
    limits = [data.draw(st.integers(0, 40)) for _ in shares]
    most = data.draw(st.integers(0, 120))
    streams = mixing.lookup(np.arange(most)).stream
    expected, counts = 0, np.zeros(len(shares), int)
    for stream in streams:
        counts[stream] += 1
        if counts[stream] > limits[stream]:
            break
        expected += 1
    assert mixing.longest(limits, most) == (expected, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixing_travels_to_another_process(kind: str) -> None:
    mixing = mixing_of(kind, (2, 3), 5)
    first = mixing.lookup(np.arange(40))
    copy = pickle.loads(pickle.dumps(mixing)).lookup(np.arange(40))
    assert [part.tolist() for part in copy] == [part.tolist() for part in first]


@pytest.mark.parametrize(
    ("shares", "says"),
    [((), "must have 1 to 32767 streams"), ((1, 0), "from 1 to"), ((2**53,), "from 1 to")],
)
def test_shares_are_checked(shares: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Stratified(shares=shares)
    assert Stratified(shares=(2**53 - 1,)).counts(3).tolist() == [3]
    module.check_streams(2**15 - 1)
    with pytest.raises(InvalidArgument, match="must have 1 to 32767 streams"):
        module.check_streams(2**15)
    with pytest.raises(InvalidArgument, match="batch_size must be from 1 to"):
        PerStream(shares=(1,), batch_sizes=(0,))
    with pytest.raises(InvalidArgument, match="each of 2 streams must have a batch size"):
        PerStream(shares=(1, 1), batch_sizes=(4,))
    with pytest.raises(InvalidArgument, match="period must be at least 1"):
        Random(shares=(1,), seed=0, name="", period=0)
    last = np.array([2**60 - 1])
    assert Stratified(shares=(1,)).lookup(last).ordinal.tolist() == last.tolist()
    with pytest.raises(InvalidArgument, match=r"at most 2\*\*60 positions"):
        Stratified(shares=(1,)).lookup(last + 1)


@pytest.mark.parametrize("small", [Fraction(1, 2**40), Fraction(1, 2**32), Fraction(1, 2**20)])
def test_every_weight_is_at_least_a_unit(small: Fraction) -> None:
    """However small, a source with a weight is drawn, at the cost of the heaviest."""
    weights = [small, Fraction(1), *[small] * 5, Fraction(0)]
    row = row_of_weights(weights).tolist()
    assert sum(row) == UNIT
    assert row[-1] == 0
    exact = small / sum(weights) * UNIT
    assert all(max(1, int(exact)) <= row[k] <= max(1, int(exact) + 1) for k in (0, 2, 3, 4, 5, 6))
