"""Draws of a blend, and how far it runs, against a count of one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaindex.index import blending as draws_module
from megaindex.index.blended_index import MOST_SOURCES
from megaindex.index.blending import (
    DivisorDraws,
    Draws,
    GreedyDraws,
    SingleDraws,
    blend_weights,
    divisor_weights,
    request_weights,
)
from megaindex.index.frameworks import framework_rules
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


def greedy(weights: list[float]) -> GreedyDraws:
    return GreedyDraws(blend_weights(weights, framework_rules("megatron")))


@given(WEIGHTS, st.data())
@pytest.mark.parametrize("rule", ["greedy", "divisor"])
def test_longest_is_where_a_walk_stops(
    rule: str, weights: list[float], data: st.DataObject
) -> None:
    limits = data.draw(st.lists(st.integers(0, 60), min_size=len(weights), max_size=len(weights)))
    draws: Draws = greedy(weights) if rule == "greedy" else DivisorDraws(divisor_weights(weights))
    samples, exact = draws.longest(limits)
    assert exact
    assert samples == count_one_by_one(draws, limits)


@given(WEIGHTS, st.integers(0, 400))
def test_greedy_counts_are_the_reference_walk(weights: list[float], samples: int) -> None:
    normalized = blend_weights(weights, framework_rules("megatron"))
    expected = np.zeros(len(weights), np.int64)
    load("reference").blend_greedy(normalized, 0, samples, expected, None, None)
    draws = GreedyDraws(normalized)
    assert draws.counts(samples + 7) is not None
    assert draws.counts(samples) == expected.tolist()
    for count, (least, most) in zip(expected, draws.bounds(samples), strict=True):
        assert least >= 0
        assert most <= samples
        assert least <= count <= most


@given(WEIGHTS, st.data())
def test_uncounted_longest_is_a_safe_bound(weights: list[float], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(0, 60), min_size=len(weights), max_size=len(weights)))
    normalized = blend_weights(weights, framework_rules("megatron"))
    bound, exact = GreedyDraws(normalized, counting="bounds").longest(limits)
    assert not exact
    assert bound <= GreedyDraws(normalized, counting="exact").longest(limits)[0]


def test_a_long_walk_is_cut_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "_CHUNK_WORK", 100)
    told: list[tuple[int, int]] = []
    weights = blend_weights([1.0, 2.0], framework_rules("megatron"))
    counts = GreedyDraws(weights, progress=lambda *seen: told.append(seen)).counts(35)
    assert counts == [12, 23]
    assert told == [(10, 35), (20, 35), (30, 35), (35, 35)]


def test_beyond_the_free_work_only_bounds_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "FREE_WORK", 100)
    weights = blend_weights([1.0, 1.0], framework_rules("megatron"))
    assert GreedyDraws(weights).counts(11) is None
    assert GreedyDraws(weights).counts(10) == [5, 5]
    assert GreedyDraws(weights, counting="exact").counts(11) == [6, 5]


def test_one_source_is_drawn_every_time() -> None:
    assert SingleDraws().counts(9) == [9]
    assert SingleDraws().longest([4]) == (4, True)


def test_weights_are_normalized_as_each_framework_does() -> None:
    weights = [0.1, 0.2, 0.3, 0.15]
    once = np.array(weights) / np.sum(np.array(weights))
    assert request_weights(weights, framework_rules("megatron")) == once.tolist()
    assert request_weights(weights, framework_rules("neox")) == [w / sum(weights) for w in weights]
    twice = once / np.sum(once)
    np.testing.assert_array_equal(blend_weights(weights, framework_rules("megatron")), twice)
    np.testing.assert_array_equal(
        blend_weights([3, 5], framework_rules("megatron"), explicit=False), np.array([0.375, 0.625])
    )


def test_divisor_weights_are_exact_where_they_can_be() -> None:
    assert divisor_weights([0.5, 0.25, 0.25]).tolist() == [2, 1, 1]
    assert divisor_weights([0.1, 0.2, 0.7]).tolist() == [1, 2, 7]
    assert divisor_weights([1032175, 3]).tolist() == [1032175, 3]
    assert divisor_weights([2**52 - 1, 1]).tolist() == [2**52 - 1, 1]
    assert divisor_weights([2**52, 1]).tolist() == [2**52 - 1, 1]  # rounded
    wild = divisor_weights([0.123456789012345678, 1e-9, 7.7e12]).tolist()
    assert max(wild) < 2**53
    assert min(wild) >= 1


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
