"""Blends, on every backend, against megatron-core's compiled helpers."""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex._types import F64, I64, U64
from megaindex.errors import InvalidArgument
from megaindex.kernels import load
from megaindex.kernels.reference.blending import check_fill

REFERENCE = load("reference")


def equal(rng: np.random.Generator, n: int) -> F64:
    return np.ones(n)


def nearly_equal(rng: np.random.Generator, n: int) -> F64:
    return 1 + rng.random(n) * 10.0 ** -rng.integers(6, 16)


def neighbours(rng: np.random.Generator, n: int) -> F64:
    """Weights one unit in the last place apart."""
    return 1 + rng.permutation(n) * np.finfo(np.float64).eps


def lognormal(rng: np.random.Generator, n: int) -> F64:
    return rng.lognormal(0, rng.choice([0.5, 1.0, 2.0]), n)


def zipf(rng: np.random.Generator, n: int) -> F64:
    return 1 / np.arange(1, n + 1)


def dominated(rng: np.random.Generator, n: int) -> F64:
    weights = 1 + rng.random(n)
    weights[rng.integers(n)] = 9.0 * n
    return weights


def integers(rng: np.random.Generator, n: int) -> F64:
    """Many equal weights, and many exact ties between others."""
    return rng.integers(1, 6, n).astype(np.float64)


def ramp(rng: np.random.Generator, n: int) -> F64:
    """All are equally far behind whenever the draws are a multiple of the sum."""
    return np.arange(1.0, n + 1)


def with_zeros(rng: np.random.Generator, n: int) -> F64:
    weights = rng.random(n) * (rng.random(n) < 0.5)
    weights[rng.integers(n)] = 1
    return weights


def lopsided(rng: np.random.Generator, n: int) -> F64:
    """Some so light that they are drawn once in thousands of draws, or never."""
    weights: F64 = rng.dirichlet(np.full(n, 0.1)) + 1e-6
    return weights


def two_sizes(rng: np.random.Generator, n: int) -> F64:
    """Nearly equal ones among very light ones."""
    return np.where(rng.random(n) < 0.5, 1 + rng.random(n) * 1e-9, 1e-4 * rng.random(n))


FAMILIES = (
    equal,
    nearly_equal,
    neighbours,
    lognormal,
    zipf,
    dominated,
    integers,
    ramp,
    with_zeros,
    two_sizes,
)

# what the weights sum to; the frameworks' own sum to 1 but for rounding
SUMS = (1.0, 0.5, 2.0, 100.0, 1e-12)


def make_weights(family: Any, n: int, total: float, seed: int) -> F64:
    weights: F64 = family(np.random.default_rng(seed), n)
    return weights / weights.sum() * total


def blend(kernel: Any, what: F64 | I64, begin: int, end: int, counts: I64) -> tuple[Any, Any]:
    index, samples = np.full(end - begin, -1, np.int16), np.full(end - begin, -1, np.int64)
    kernel(what, begin, end, counts, index, samples)
    return index, samples


def peers_greedy(helpers: ModuleType, weights: F64, size: int) -> tuple[Any, Any]:
    index, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(index, samples, weights, len(weights), size, False)
    return index, samples


@functools.cache
def their_greedy(helpers: ModuleType, family: Any, n: int, size: int) -> tuple[Any, Any]:
    """As `peers_greedy`, of weights by the seed n, once for all backends."""
    return peers_greedy(helpers, make_weights(family, n, 1.0, n), size)


def peers_exhaustive(helpers: ModuleType, sizes: I64) -> tuple[Any, Any]:
    index, samples = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
    helpers.build_exhaustive_blending_indices(index, samples, sizes, len(sizes))
    return index, samples


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@given(
    family=st.sampled_from(FAMILIES),
    n=st.integers(1, 20) | st.integers(60, 150),
    total=st.sampled_from(SUMS),
    size=st.integers(0, 200) | st.integers(1025, 1500),
    seed=st.integers(0, 2**32),
)
def test_greedy_is_the_peers(
    backend: Any,
    megatron_helpers: ModuleType,
    family: Any,
    n: int,
    total: float,
    size: int,
    seed: int,
) -> None:
    weights = make_weights(family, n, total, seed)
    counts = np.zeros(n, np.int64)
    index, samples = blend(backend.blend_greedy, weights, 0, size, counts)
    assert_same((index, samples), peers_greedy(megatron_helpers, weights, size))
    np.testing.assert_array_equal(counts, np.bincount(index, minlength=n))


# where the native core changes its ways: lanes, windows, two levels of windows
@pytest.mark.slow_cases("reference")
@for_each("n", [1, 2, 4, 5, 8, 9, 17, 33, 49, 64, 65, 257])
@for_each("family", FAMILIES)
def test_greedy_of_any_number_of_datasets(
    backend: Any, megatron_helpers: ModuleType, family: Any, n: int
) -> None:
    # windows begin after 1024 draws; the reference has one way for all
    compare_greedy(backend, megatron_helpers, family, n, 400 if backend is REFERENCE else 5000)


@for_each("n", [1501, 4000, 17000])
@for_each("family", FAMILIES)
def test_greedy_of_thousands_of_datasets(
    compiled: Any, megatron_helpers: ModuleType, family: Any, n: int
) -> None:
    compare_greedy(compiled, megatron_helpers, family, n, min(5000, 15_000_000 // n))


def compare_greedy(kernels: Any, helpers: ModuleType, family: Any, n: int, size: int) -> None:
    weights = make_weights(family, n, 1.0, n)
    actual = blend(kernels.blend_greedy, weights, 0, size, np.zeros(n, np.int64))
    assert_same(actual, their_greedy(helpers, family, n, size))


@for_each("n", [3, 70])
@for_each("magnitude", [5e-324, 1e-300, 1e-17, 1e17, 1e307])
def test_weights_at_the_ends_of_the_doubles(
    backend: Any, megatron_helpers: ModuleType, n: int, magnitude: float
) -> None:
    weights = np.random.default_rng(n).integers(0, 9, n) * magnitude
    actual = blend(backend.blend_greedy, weights, 0, 2000, np.zeros(n, np.int64))
    assert_same(actual, peers_greedy(megatron_helpers, weights, 2000))


@for_each("n", [3, 70, 300])
def test_a_negative_zero_is_a_weight_of_0(
    compiled: Any, megatron_helpers: ModuleType, n: int
) -> None:
    weights = make_weights(lognormal, n, 1.0, n)
    weights[[0, n // 2, n - 1]] = 0.0
    expected = peers_greedy(megatron_helpers, weights, 20_000)
    weights[[0, n // 2]] = -0.0
    assert_same(blend(compiled.blend_greedy, weights, 0, 20_000, np.zeros(n, np.int64)), expected)


@for_each("total", [1.0, 0.3, 2.0])
@for_each("n", [2, 3, 4, 5, 100, 128])
@for_each("family", [lopsided, equal, ramp, lognormal])
def test_greedy_drawn_in_stretches(
    compiled: Any, megatron_helpers: ModuleType, family: Any, n: int, total: float
) -> None:
    """The native core draws far apart at once, from counts that it guesses and then checks."""
    weights = make_weights(family, n, total, n)
    size = 100_003 if n <= 5 else 20_001
    expected = peers_greedy(megatron_helpers, weights, size)
    counts = np.zeros(n, np.int64)
    index, samples = np.zeros(size, np.uint8), np.zeros(size, np.int64)
    for begin, end in ((0, size // 3), (size // 3, size)):
        compiled.blend_greedy(weights, begin, end, counts, index[begin:end], samples[begin:end])
    np.testing.assert_array_equal(index, expected[0])
    np.testing.assert_array_equal(samples, expected[1])
    np.testing.assert_array_equal(counts, np.bincount(index, minlength=n))


@for_each("ahead", [3, 5000, 2**51])
def test_stretches_from_counts_that_no_blend_reaches(compiled: Any, ahead: int) -> None:
    weights, counts = make_weights(lognormal, 6, 1.0, 6), np.full(6, 40)
    counts[2] += ahead
    expected_counts = counts.copy()
    actual = blend(compiled.blend_greedy, weights, 300, 4000, counts)
    expected = blend(REFERENCE.blend_greedy, weights, 300, 4000, expected_counts)
    assert_same((*actual, counts), (*expected, expected_counts))


@pytest.mark.slow_cases("reference")
@given(
    family=st.sampled_from(FAMILIES),
    n=st.integers(1, 10) | st.integers(60, 150),
    cuts=st.lists(st.integers(0, 1500), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_a_blend_goes_on_from_its_counts(
    backend: Any, family: Any, n: int, cuts: list[int], seed: int
) -> None:
    weights = make_weights(family, n, 1.0, seed)
    whole_counts, counts = np.zeros(n, np.int64), np.zeros(n, np.int64)
    whole = blend(backend.blend_greedy, weights, 0, 1500, whole_counts)
    bounds = [0, *sorted(cuts), 1500]
    parts = [
        blend(backend.blend_greedy, weights, begin, end, counts)
        for begin, end in itertools.pairwise(bounds)
    ]
    assert_same(tuple(np.concatenate(part) for part in zip(*parts, strict=True)), whole)
    np.testing.assert_array_equal(counts, whole_counts)


@for_each("end", [40, 700])  # which takes another way than a few draws
@for_each("ahead", [None, 0, 1])
@for_each(
    "weights", [[3.0, 0.5], [0.3, 2.5, 0.2], [2.0, 1.5, 0.1], [1e307, 1e308], [1.2, 0.3, 0.2]]
)
def test_a_weight_far_above_the_others(
    compiled: Any, weights: list[float], ahead: int | None, end: int
) -> None:
    """It is drawn alone, unless it is ahead of its share."""
    counts = np.zeros(len(weights), np.int64)
    if ahead is not None:
        counts[ahead] = 20
    expected = blend(REFERENCE.blend_greedy, np.array(weights), 3, end, counts.copy())
    assert_same(blend(compiled.blend_greedy, np.array(weights), 3, end, counts), expected)


@for_each("turn", ["last", "middle", "falling", "rising", "random"])
def test_equal_weights_go_on_from_counts_out_of_turn(compiled: Any, turn: str) -> None:
    """Datasets of equal weight are drawn in turn only if they were so before."""
    for equal in (slice(70, 80), slice(10)):  # the last that are entered, and the first
        _check_equal_weights_out_of_turn(compiled, turn, equal)


def _check_equal_weights_out_of_turn(compiled: Any, turn: str, equal: slice) -> None:
    counts = np.zeros(80, np.int64)
    counts[equal] = {
        "last": [0] * 9 + [1], "middle": [0] * 4 + [3] + [0] * 5, "falling": [1] * 5 + [0] * 5,
        "rising": [0] * 5 + [1] * 5, "random": [1, 0, 1, 1, 0, 0, 1, 0, 1, 0],
    }[turn]  # fmt: skip
    weights = np.arange(1.0, 81)
    weights[equal] = 100
    weights /= weights.sum()
    begin, end = int(counts.sum()), 1400
    expected = blend(REFERENCE.blend_greedy, weights, begin, end, counts.copy())
    assert_same(blend(compiled.blend_greedy, weights, begin, end, counts), expected)


@given(
    family=st.sampled_from(FAMILIES),
    n=st.integers(2, 10) | st.integers(65, 150),
    begin=st.integers(0, 2**40),
    seed=st.integers(0, 2**32),
    off=st.booleans(),
)
def test_products_and_differences_are_rounded_apart(
    compiled: Any, family: Any, n: int, begin: int, seed: int, off: bool
) -> None:
    """Far from the start, a fused multiply-add would choose differently again and again."""
    weights = make_weights(family, n, 1.0, seed)
    start = (weights * begin).astype(np.int64)
    if off:  # counts that no blend has reached
        start += np.random.default_rng(seed).integers(0, 3, n)
    counts, expected_counts = start.copy(), start.copy()
    actual = blend(compiled.blend_greedy, weights, begin, begin + 1500, counts)
    expected = blend(REFERENCE.blend_greedy, weights, begin, begin + 1500, expected_counts)
    assert_same((*actual, counts), (*expected, expected_counts))


@for_each("n", [3, 20, 90])
def test_limits_met_from_counts_that_no_blend_has_reached(compiled: Any, n: int) -> None:
    """The last draws of each dataset, of which some are far behind their shares."""
    left = np.resize([1, 15, 16, 17, 63, 100, 255, 257, 0, 40], n)
    sizes = 2000 + 300 * np.arange(n)
    counts, expected_counts = sizes - left, sizes - left
    draws = int(counts.sum()), int(sizes.sum())
    actual = blend(compiled.blend_exhaustive, sizes, *draws, counts)
    expected = blend(REFERENCE.blend_exhaustive, sizes, *draws, expected_counts)
    assert_same((*actual, counts), (*expected, expected_counts))
    np.testing.assert_array_equal(counts, sizes)


def test_ties_among_very_many(compiled: Any) -> None:
    """The native core gives its windows up for a stretch of plain scanning."""
    weights = np.random.default_rng(5).integers(1, 50, 100).astype(np.float64)
    weights /= weights.sum()
    counts, expected_counts = np.zeros((2, 100), np.int64)
    actual = blend(compiled.blend_greedy, weights, 0, 6000, counts)
    expected = blend(REFERENCE.blend_greedy, weights, 0, 6000, expected_counts)
    assert_same((*actual, counts), (*expected, expected_counts))


@for_each("n", [3, 80])
def test_outputs_are_optional_and_an_index_may_be_one_byte(backend: Any, n: int) -> None:
    weights = make_weights(lognormal, n, 1.0, 3)
    counts = np.zeros(n, np.int64)
    index, samples = blend(backend.blend_greedy, weights, 0, 2000, counts)
    small, alone = np.zeros(2000, np.uint8), np.zeros(2000, np.int64)
    for outputs in ((small, None), (None, alone), (None, None)):
        again = np.zeros(n, np.int64)
        backend.blend_greedy(weights, 0, 2000, again, *outputs)
        np.testing.assert_array_equal(again, counts)
    np.testing.assert_array_equal(small, index)
    np.testing.assert_array_equal(alone, samples)


def test_the_first_draws_of_unequal_datasets(backend: Any) -> None:
    """At position 1 as at 0: the second has 1/5, the first 4/5 and a draw."""
    for draw, what in (("exhaustive", np.array([8, 2])), ("greedy", np.array([0.8, 0.2]))):
        kernel = getattr(backend, f"blend_{draw}")
        index, samples = blend(kernel, what, 0, 5, np.zeros(2, np.int64))
        assert index.tolist() == [0, 1, 0, 0, 0]
        assert samples.tolist() == [0, 0, 1, 2, 3]


@given(
    family=st.sampled_from(FAMILIES),
    n=st.integers(1, 20) | st.integers(60, 300),
    size=st.integers(1, 4000),
    seed=st.integers(0, 2**32),
    split=st.floats(0, 1),
)
def test_exhaustive_is_the_peers_on_what_is_not_empty(
    backend: Any,
    megatron_helpers: ModuleType,
    family: Any,
    n: int,
    size: int,
    seed: int,
    split: float,
) -> None:
    """The peer never strikes out an empty dataset, and draws samples from it that do not exist."""
    sizes = np.round(make_weights(family, n, size, seed)).astype(np.int64)
    sizes[seed % n] += 1
    filled = np.flatnonzero(sizes)
    packed, samples = peers_exhaustive(megatron_helpers, sizes[filled])
    total = int(sizes.sum())
    middle, counts = int(split * total), np.zeros(n, np.int64)
    parts = [
        blend(backend.blend_exhaustive, sizes, begin, end, counts)
        for begin, end in ((0, middle), (middle, total))
    ]
    actual = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
    assert_same(actual, (filled[packed].astype(np.int16), samples))
    np.testing.assert_array_equal(counts, sizes)


@for_each("n", [2, 3, 4, 5, 100])
@for_each("family", [lopsided, equal, lognormal])
def test_exhaustive_drawn_in_stretches(
    compiled: Any, megatron_helpers: ModuleType, family: Any, n: int
) -> None:
    compare_exhaustive(compiled, megatron_helpers, family, n, 30_000)


@for_each("n", [64, 65])
@for_each("family", [equal, nearly_equal, lognormal, integers])
def test_exhaustive_of_many_datasets(
    backend: Any, megatron_helpers: ModuleType, family: Any, n: int
) -> None:
    compare_exhaustive(backend, megatron_helpers, family, n, 3000)


@pytest.mark.slow
@for_each("n", [1501, 4000])
@for_each("family", [equal, nearly_equal, lognormal, integers])
def test_exhaustive_of_thousands_of_datasets(
    compiled: Any, megatron_helpers: ModuleType, family: Any, n: int
) -> None:
    compare_exhaustive(compiled, megatron_helpers, family, n, 3 * n)


def compare_exhaustive(kernels: Any, helpers: ModuleType, family: Any, n: int, size: int) -> None:
    sizes = np.ceil(make_weights(family, n, size, n)).astype(np.int64)
    actual = blend(kernels.blend_exhaustive, sizes, 0, int(sizes.sum()), np.zeros(n, np.int64))
    assert_same(actual, peers_exhaustive(helpers, sizes))


divisor_weights = st.lists(
    st.integers(0, 8) | st.integers(0, 2**53 - 1) | st.integers(2**53 - 4, 2**53 - 1),
    min_size=1,
    max_size=12,
).filter(any)


def webster(weights: list[int], size: int) -> list[int]:
    """Datasets in the order of their draws' times, (2k + 1) / weight."""
    times = [
        (Fraction(2 * k + 1, weight), i)
        for i, weight in enumerate(weights)
        if weight
        for k in range(size)
    ]
    return [i for _, i in sorted(times)[:size]]


@given(weights=divisor_weights, size=st.integers(0, 60), cut=st.integers(0, 60))
def test_divisor_draws_the_largest_quotient(
    backend: Any, weights: list[int], size: int, cut: int
) -> None:
    words, counts = np.array(weights, np.uint64), np.zeros(len(weights), np.int64)
    bounds = (0, min(cut, size), size)
    parts = [
        blend(backend.divisor_fill, words, begin, end, counts)
        for begin, end in itertools.pairwise(bounds)
    ]
    index, samples = (np.concatenate(part) for part in zip(*parts, strict=True))
    expected = webster(weights, size)
    assert index.tolist() == expected
    assert samples.tolist() == [expected[:k].count(i) for k, i in enumerate(expected)]
    for position in range(size + 1):
        at = backend.divisor_counts(words, position)
        assert at.dtype == np.int64
        np.testing.assert_array_equal(at, np.bincount(index[:position], minlength=len(weights)))


@given(weights=divisor_weights, position=st.integers(0, 2**60 - 300), ahead=st.integers(0, 300))
def test_divisor_counts_anywhere_are_reached_by_filling(
    backend: Any, weights: list[int], position: int, ahead: int
) -> None:
    words = np.array(weights, np.uint64)
    counts = backend.divisor_counts(words, position)
    assert counts.sum() == position
    # every draw that is over comes before every draw that is not
    over, left = [], []
    for i, (weight, count) in enumerate(zip(weights, counts.tolist(), strict=True)):
        over += [(Fraction(2 * count - 1, weight), i)] if count else []
        left += [(Fraction(2 * count + 1, weight), i)] if weight else []
    assert not over or max(over) < min(left)
    backend.divisor_fill(words, position, position + ahead, counts, None, None)
    np.testing.assert_array_equal(counts, backend.divisor_counts(words, position + ahead))


@for_each("size", [3000, 3001])
def test_divisor_of_weights_whose_products_pass_64_bits(backend: Any, size: int) -> None:
    words, counts = np.array([2**52, 2**51, 2**51], np.uint64), np.zeros(3, np.int64)
    index, _ = blend(backend.divisor_fill, words, 0, size, counts)
    assert index.tolist() == webster(words.tolist(), size)


@pytest.mark.slow
@for_each("n", [300, 9000])
def test_divisor_of_many_datasets(compiled: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    words: U64 = rng.integers(0, 1000, n).astype(np.uint64)
    counts = np.zeros(n, np.int64)
    index, _ = blend(compiled.divisor_fill, words, 0, 20_000, counts)
    held = [(Fraction(2 * k + 1, int(words[i])), i) for i in range(n) for k in range(counts[i])]
    assert index.tolist() == [i for _, i in sorted(held)]
    np.testing.assert_array_equal(counts, compiled.divisor_counts(words, 20_000))


@for_each("counts", [[0, 0, 0], [1, 0, 0], [0, 2, 0], [3, 0, 0], [2, 1, 1], [-1, 1, 1]])
def test_divisor_counts_of_another_blend_are_refused(backend: Any, counts: list[int]) -> None:
    words = np.array([2, 3, 0], np.uint64)
    with pytest.raises(InvalidArgument, match="divisor_counts"):
        backend.divisor_fill(words, 1, 9, np.array(counts, np.int64), None, None)


@for_each("position", [1, 6, 7, 80])
def test_one_draw_of_another_dataset_is_noticed(backend: Any, position: int) -> None:
    """Counts whose sum is right, and each is one from its place."""
    words = np.array([3, 3, 1], np.uint64)
    right = backend.divisor_counts(words, position)
    backend.divisor_fill(words, position, position + 1, right.copy(), None, None)
    for less, more in itertools.permutations(range(3), 2):
        counts = right.copy()
        counts[[less, more]] += [-1, 1]
        with pytest.raises(InvalidArgument, match="divisor_counts"):
            backend.divisor_fill(words, position, position + 9, counts, None, None)


@for_each("weights", [[0, 0], [2**53, 1], [2**53 - 1] * 1025])
def test_divisor_weights_out_of_range_are_refused(backend: Any, weights: list[int]) -> None:
    words, counts = np.array(weights, np.uint64), np.zeros(len(weights), np.int64)
    with pytest.raises(InvalidArgument, match=r"below 2\*\*53"):
        backend.divisor_fill(words, 0, 1, counts, None, None)
    with pytest.raises(InvalidArgument, match=r"below 2\*\*53"):
        backend.divisor_counts(words, 1)


def test_divisor_positions_out_of_range_are_refused(backend: Any) -> None:
    words = np.array([1, 2], np.uint64)
    with pytest.raises(InvalidArgument, match=r"2\*\*60"):
        backend.divisor_counts(words, 2**60 + 1)


def test_positions_to_fill_begin_with_the_first_share() -> None:
    check_fill(np.array([3, 7]), 3, 2)
    for starts, begin, message in (
        ([], 0, "shares: must have at least one row"),
        ([3, 3], 3, "starts: must increase"),
        ([3, 7], 2, "begin: must be from the first start to"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            check_fill(np.array(starts, np.int64), begin, 2)


@for_each("bad", [np.nan, np.inf, -1.0])
def test_the_native_core_refuses_weights_without_an_order(bad: float) -> None:
    weights = np.array([1.0, bad, 2.0])
    native = load("native")
    with pytest.raises(InvalidArgument, match="weights: must be finite and >= 0"):
        native.blend_greedy(weights, 0, 10, np.zeros(3, np.int64), None, None)
