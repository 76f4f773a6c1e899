"""Draws of a blend, and how far it runs, against a count of one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaindex.errors import FormatError, InvalidArgument
from megaindex.index import blended_index
from megaindex.index import draws as draws_module
from megaindex.index.blend import divisor_weights, normalized
from megaindex.index.blended_index import MOST_SOURCES, blend_index
from megaindex.index.draws import BlendDraws, Draws, ExhaustiveDraws, GreedyDraws, SingleDraws
from megaindex.index.mixing import Stratified
from megaindex.kernels import load

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=7)


def count_one_by_one(draws: Draws, limits: Sequence[int]) -> int:
    """Samples until a source would be drawn more often than its limit."""
    samples = 0
    while True:
        counts = draws.counts(samples + 1)
        assert counts is not None
        if any(count > limit for count, limit in zip(counts, limits, strict=True)):
            return samples
        samples += 1


def greedy(weights: list[float], **settings: Any) -> GreedyDraws:
    return GreedyDraws(normalized(weights), **settings)


def divisor(weights: list[float]) -> Stratified:
    return Stratified(shares=tuple(divisor_weights(weights)))


@given(WEIGHTS, st.data())
@pytest.mark.parametrize("rule", ["greedy", "divisor"])
def test_longest_is_where_a_walk_stops(
    rule: str, weights: list[float], data: st.DataObject
) -> None:
    limits = data.draw(st.lists(st.integers(0, 60), min_size=len(weights), max_size=len(weights)))
    draws: Draws = greedy(weights) if rule == "greedy" else divisor(weights)
    samples, exact = draws.longest(limits)
    assert exact
    assert samples == count_one_by_one(draws, limits)


@given(WEIGHTS, st.integers(0, 400))
def test_greedy_counts_are_the_reference_walk(weights: list[float], samples: int) -> None:
    expected = np.zeros(len(weights), np.int64)
    load("reference").blend_greedy(normalized(weights), 0, samples, expected, None, None)
    draws = greedy(weights)
    assert draws.counts(samples + 7) is not None
    np.testing.assert_array_equal(draws.counts(samples), expected)
    for count, (least, most) in zip(expected, draws.bounds(samples), strict=True):
        assert least >= 0
        assert most <= samples
        assert least <= count <= most


@given(WEIGHTS, st.data())
def test_uncounted_longest_is_a_safe_bound(weights: list[float], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(0, 60), min_size=len(weights), max_size=len(weights)))
    draws = greedy(weights, counting="bounds")
    bound, exact = draws.longest(limits)
    assert not exact
    assert draws.certain(limits) == bound <= greedy(weights, counting="exact").longest(limits)[0]


def test_a_long_walk_is_cut_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "_CHUNK_WORK", 100)
    told: list[tuple[int, int]] = []
    counts = greedy([1.0, 2.0], progress=lambda *seen: told.append(seen)).counts(35)
    np.testing.assert_array_equal(counts, [12, 23])
    assert told == [(10, 35), (20, 35), (30, 35), (35, 35)]


def test_beyond_the_free_work_only_bounds_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "FREE_WORK", 100)
    assert greedy([1.0, 1.0]).counts(11) is None
    np.testing.assert_array_equal(greedy([1.0, 1.0]).counts(10), [5, 5])
    np.testing.assert_array_equal(greedy([1.0, 1.0], counting="exact").counts(11), [6, 5])


def test_one_source_is_drawn_every_time() -> None:
    assert SingleDraws().counts(9).tolist() == [9]
    assert SingleDraws().bounds(9) == [(9, 9)]
    assert SingleDraws().longest([4]) == (4, True)


def test_an_index_of_sources_is_as_wide_as_the_frameworks() -> None:
    assert np.iinfo(np.int16).max == MOST_SOURCES


@pytest.mark.parametrize(
    ("weights", "samples", "bounds"),
    [
        ([0.5, 0.5], 2, [(1, 1), (1, 1)]),
        ([0.5, 0.5], 3, [(1, 2), (1, 2)]),
        ([0.4, 0.4, 0.2], 3, [(0, 2), (0, 2), (0, 1)]),
        ([0.25] * 4, 9, [(0, 3)] * 4),
        ([1.0, 1e-300], 2**53 + 3, [(2**53 + 2, 2**53 + 3), (0, 1)]),  # float64 rounds up
    ],
)
def test_bounds_are_the_share_rounded_up_and_what_the_others_leave(
    weights: list[float], samples: int, bounds: list[tuple[int, int]]
) -> None:
    assert GreedyDraws(np.array(weights)).bounds(samples) == bounds


RULES: dict[str, BlendDraws] = {
    "greedy": greedy([0.2, 0.5, 0.3]),
    "exhaustive": ExhaustiveDraws(np.array([8, 20, 12])),
    "divisor": divisor([2, 5, 3]),
}


@pytest.mark.parametrize("rule", RULES)
def test_arrays_go_on_where_others_end(rule: str) -> None:
    draws = RULES[rule]
    which, samples, counts = draws.arrays(40)
    np.testing.assert_array_equal(np.bincount(which, minlength=3), counts)
    head = draws.arrays(25)
    index, numbers = np.empty(15, np.int16), np.empty(15, np.int64)
    after = draws.fill(index, numbers, 25, head.counts.copy())
    np.testing.assert_array_equal(np.append(head.dataset_index, index), which)
    np.testing.assert_array_equal(np.append(head.dataset_sample_index, numbers), samples)
    np.testing.assert_array_equal(after, counts)
    assert draws.bounds(40) == list(zip(counts, counts, strict=True)) or rule == "greedy"


@given(WEIGHTS, st.integers(1, 400), st.data())
def test_the_end_is_before_the_first_draw_beyond_a_source(
    weights: list[float], size: int, data: st.DataObject
) -> None:
    draws = greedy(weights)
    arrays = draws.arrays(size)
    less = data.draw(st.lists(st.integers(-1, 3), min_size=len(weights), max_size=len(weights)))
    sizes = np.maximum(arrays.counts - less, 0)
    beyond = arrays.dataset_sample_index >= sizes[arrays.dataset_index]
    assert draws.end(arrays, sizes) == (int(beyond.argmax()) if beyond.any() else size)


def test_the_end_is_found_in_later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "_COMPARED", 7)
    draws = greedy([1.0, 0.0, 1.0])  # a weight of 0: no bound is known
    arrays = draws.arrays(60)
    assert draws.certain([20, 0, 20]) == 0
    assert draws.end(arrays, arrays.counts) == 60
    assert draws.end(arrays, arrays.counts - [0, 0, 1]) == 59


@pytest.mark.parametrize("rule", RULES)
def test_found_arrays_are_compared(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RULES[rule]
    which, samples, counts = draws.arrays(40)
    np.testing.assert_array_equal(draws.check(which, samples, 40), counts)
    for found, message in (
        ((which.astype(np.int32), samples), "must be int16 and int64, are int32 and int64"),
        ((which, samples[:-1]), "must be int16 and int64"),
        ((which[:-1], samples[:-1]), r"must have shape \(40,\), have \(39,\)"),
        ((which + np.int16(1), samples), "must draw from 3 sources"),
        ((which - np.int16(1), samples), "must draw from 3 sources"),
        ((which, samples + 1), "are not the draws"),
        ((np.roll(which, 1), samples), "are not the draws"),
    ):
        with pytest.raises(FormatError, match=message):
            draws.check(*found, 40)
    monkeypatch.setattr(draws_module, "_COMPARED", 39)
    which[39] = (which[39] + 1) % 3
    if rule == "exhaustive":  # all are counted
        with pytest.raises(FormatError, match="are not the draws"):
            draws.check(which, samples, 40)
    else:
        draws.check(which, samples, 40)


@pytest.mark.parametrize(
    ("draws", "size"),
    [(greedy([1.0]), 5), (greedy([0.0, 1.0]), 5), (ExhaustiveDraws(np.array([5])), 5),
     (divisor([2, 5, 3]), 1), (greedy([0.5, 0.5]), 0)],
)  # fmt: skip
def test_found_arrays_may_draw_from_one_source_alone(draws: BlendDraws, size: int) -> None:
    which, samples, counts = draws.arrays(size)
    np.testing.assert_array_equal(draws.check(which, samples, size), counts)


def test_a_blend_has_as_many_sources_as_its_index_can_number(monkeypatch: Any) -> None:
    index: Any = SimpleNamespace(num_samples=10)
    monkeypatch.setattr(blended_index, "MOST_SOURCES", 3)
    for count in (3, 4):
        draws = GreedyDraws(np.full(count, 1 / count))
        if count == 3:
            assert len(blend_index(draws, [index] * 3, 9, 0).indices) == 3
            continue
        with pytest.raises(InvalidArgument, match="a blend has at most 3 sources, got 4"):
            blend_index(draws, [index] * 4, 9, 0)


@pytest.mark.parametrize("rule", RULES)
def test_no_source_is_drawn_above_its_limit(rule: str) -> None:
    limits = [11, 5, 2]
    certain = RULES[rule].certain(limits)
    assert 0 < certain <= RULES[rule].longest(limits)[0]
    assert (RULES[rule].arrays(certain).counts <= limits).all()
