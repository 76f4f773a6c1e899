"""Keyed bijections: one to one, the same on every backend, and as random as a fair shuffle."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import load

KEYS = np.random.default_rng(7).integers(0, 2**64, (9000, 2), np.uint64)
AROUND_POWERS = [2**k + d for k in range(12, 63) for d in (-1, 0, 1) if 2**k + d <= 2**62]
NO_NATIVE = os.environ.get("MEGAINDEX_NO_NATIVE") == "1"
FAST = "numba" if NO_NATIVE else "native"
native_only = pytest.mark.skipif(NO_NATIVE, reason="without the native core")


def permutation(backend: Any, key: np.ndarray, n: int, dtype: type = np.int64) -> np.ndarray:
    out = np.full(n, -1, dtype)
    backend.bijection_range(key, n, 0, out)
    return out


@functools.cache
def specified(n: int) -> np.ndarray:
    """The order of n by KEYS[n] of the reference."""
    return permutation(load("reference"), KEYS[n], n)


def is_permutation(values: np.ndarray) -> bool:
    n = values.size
    return bool(
        n == 0 or (values.min() >= 0 and values.max() < n and np.bincount(values).max() == 1)
    )


@pytest.mark.slow_cases("reference")
def test_every_small_size_is_a_bijection(backend: Any) -> None:
    for n in range(2 ** (9 if backend is load("reference") else 11) + 1):
        assert is_permutation(permutation(backend, KEYS[n], n)), n


@pytest.mark.slow_cases("reference")
@for_each("n", [4095, 4096, 4097, 4099, 4160, 5003, 6561, 8191, 8192, 8193])
def test_sizes_around_the_end_of_the_table_are_bijections(backend: Any, n: int) -> None:
    values = permutation(backend, KEYS[n], n, np.int32)
    assert is_permutation(values)
    np.testing.assert_array_equal(values, specified(n))


@native_only
@for_each("k", range(12, 21))
def test_sizes_around_powers_of_two_are_bijections(k: int) -> None:
    for n in (2**k - 1, 2**k, 2**k + 1):
        assert is_permutation(permutation(load("native"), KEYS[k], n, np.int32)), n


@native_only
def test_the_first_thousand_networks_are_bijections() -> None:
    for n in range(4096, 5096):
        assert is_permutation(permutation(load("native"), KEYS[n], n)), n


@native_only
@pytest.mark.slow
def test_every_size_up_to_2_to_the_17_is_a_bijection() -> None:
    native, out = load("native"), np.empty(2**17, np.int32)
    seen = np.zeros(2**17, np.int32)
    for n in range(1, 2**17 + 1):
        values = out[:n]
        native.bijection_range(KEYS[n % len(KEYS)], n, 0, values)
        assert 0 <= values.min() <= values.max() < n
        seen[values] = n  # n cells marked by n values: each by one
        assert np.count_nonzero(seen[:n] == n) == n, n


@native_only
@pytest.mark.slow
@pytest.mark.parametrize("k", range(21, 25))
def test_larger_sizes_around_powers_of_two_are_bijections(k: int) -> None:
    for n in (2**k - 1, 2**k, 2**k + 1):
        assert is_permutation(permutation(load("native"), KEYS[k], n)), n


@functools.cache
def some_indices(n: int) -> np.ndarray:
    spread = np.random.default_rng(n).integers(0, n, 80)
    return np.unique(np.concatenate([spread, np.arange(20), np.arange(n - 20, n)]))


@functools.cache
def specified_values(n: int) -> np.ndarray:
    return load("reference").bijection_apply(KEYS[5], n, some_indices(n))


@pytest.mark.slow_cases("reference")
@for_each("n", AROUND_POWERS)
def test_large_sizes_stay_inside_never_repeat_and_are_undone(backend: Any, n: int) -> None:
    indices = some_indices(n)
    given_as = np.uint64 if n % 2 else np.int64
    values = backend.bijection_apply(KEYS[5], n, indices.astype(given_as))
    assert values.dtype == np.int64
    assert values.min() >= 0
    assert values.max() < n
    assert np.unique(values).size == indices.size
    np.testing.assert_array_equal(backend.bijection_invert(KEYS[5], n, values), indices)
    np.testing.assert_array_equal(values, specified_values(n))


@given(
    n=st.one_of(st.integers(1, 9000), st.integers(1, 2**62)),
    key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    begin=st.floats(0, 1),
    count=st.integers(0, 130),
    wide=st.booleans(),
)
def test_ranges_are_what_is_applied(
    backend: Any, n: int, key: tuple[int, int], begin: float, count: int, wide: bool
) -> None:
    words = np.array(key, np.uint64)
    count = min(count, n)
    first = min(int(begin * n), n - count)
    out = np.empty(count, np.int64 if wide or n > 2**31 else np.int32)
    backend.bijection_range(words, n, first, out)
    indices = np.arange(first, first + count)
    expected = load("reference").bijection_apply(words, n, indices)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(backend.bijection_invert(words, n, expected), indices)


def test_each_bit_of_the_key_changes_the_order(backend: Any) -> None:
    for n in (50, 5000):
        orders = {permutation(backend, KEYS[0], n).tobytes()}
        for bit in (0, 1, 31, 32, 63):
            for word in (0, 1):
                key = KEYS[0].copy()
                key[word] ^= np.uint64(1 << bit)
                orders.add(permutation(backend, key, n).tobytes())
        assert len(orders) == 11


# ---- against a fair shuffle --------------------------------------------------------------------

Shuffle = Callable[[int, int], np.ndarray]
SIZES = (16, 23, 97, 1000, 4095, 4096, 4097, 5041, 16385)
LARGEST = 65537


def deviation(counts: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Chi squared, in standard deviations above its mean."""
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def statistics(shuffle: Shuffle, n: int, keys: int) -> dict[str, float]:
    """How far ``keys`` shuffles of n are from what fair ones are expected to be: in sigmas."""
    cells = min(n, 8)
    bucket = np.arange(n) * cells // n
    sizes = np.bincount(bucket)
    places, after = np.zeros(cells * cells), np.zeros(cells * cells)
    steps = np.zeros(cells)
    serial, ascents, firsts = 0.0, 0.0, np.zeros(cells)
    step_bucket = np.arange(n - 1) * cells // (n - 1)
    for k in range(keys):
        values = shuffle(k, n)
        found = bucket[values]
        places += np.bincount(cells * bucket + found, minlength=places.size)
        after += np.bincount(cells * found[:-1] + found[1:], minlength=after.size)
        steps += np.bincount(step_bucket[(values[1:] - values[:-1]) % n - 1], minlength=cells)
        middle = values - (n - 1) / 2
        serial += float((middle[1:] * middle[:-1]).sum() / (middle**2).sum())
        ascents += np.count_nonzero(values[1:] > values[:-1])
        firsts[found[0]] += 1
    pairs = np.outer(sizes, sizes) - np.diag(sizes)
    step_sizes = np.bincount(step_bucket, minlength=cells)
    # a fair shuffle of n: serial correlation -1/n, variance about 1/n; (n - 1)/2 ascents,
    # variance (n + 1)/12
    return {
        "first": deviation(firsts, keys * sizes / n, cells - 1),
        "places": deviation(places, keys * np.outer(sizes, sizes).ravel() / n, (cells - 1) ** 2),
        "pairs": deviation(after, keys * pairs.ravel() / n, (cells - 1) ** 2),
        "steps": deviation(steps, keys * step_sizes, cells - 1),
        "serial": abs(serial / keys + 1 / n) * math.sqrt(keys * n),
        "ascents": abs(ascents - keys * (n - 1) / 2) / math.sqrt(keys * (n + 1) / 12),
    }


def keyed(k: int, n: int) -> np.ndarray:
    return permutation(load(FAST), KEYS[k], n)


def fair(k: int, n: int) -> np.ndarray:
    return np.random.default_rng([k, n]).permutation(n)


def affine(k: int, n: int) -> np.ndarray:
    factor = next(f for f in range(n // 3 + k, 3 * n) if math.gcd(f, n) == 1)
    return (factor * np.arange(n) + k) % n


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [SIZES, pytest.param((LARGEST,), marks=pytest.mark.not_quick)], ids=["", "largest"]
)
@pytest.mark.parametrize("shuffle", [keyed, fair])
def test_orders_cannot_be_told_from_a_fair_shuffle(
    shuffle: Shuffle, sizes: tuple[int, ...]
) -> None:
    for n in sizes:
        found = statistics(shuffle, n, max(100, min(2000, 10**6 // n)))
        assert max(found.values()) < 4.5, (n, found)


@pytest.mark.parametrize("n", [97, 4097, pytest.param(LARGEST, marks=pytest.mark.not_quick)])
def test_the_statistics_tell_a_poor_shuffle(n: int) -> None:
    found = statistics(affine, n, 100)
    assert max(found.values()) > 10, found


@for_each("n", [2, 3, 4, 5])
def test_every_order_of_few_is_as_likely(n: int) -> None:
    orders = list(itertools.permutations(range(n)))
    counts = dict.fromkeys(orders, 0)
    for key in KEYS:
        counts[tuple(permutation(load(FAST), key, n).tolist())] += 1
    observed = np.array(list(counts.values()))
    expected = np.full(len(orders), len(KEYS) / len(orders))
    assert abs(deviation(observed, expected, len(orders) - 1)) < 4


@for_each("n", [4096, 4097, 16385])
def test_keys_that_differ_in_one_bit_give_independent_orders(n: int) -> None:
    for bit in range(0, 64, 9):
        other = KEYS[1].copy()
        other[bit % 2] ^= np.uint64(1 << bit)
        a = permutation(load(FAST), KEYS[1], n)
        b = permutation(load(FAST), other, n)
        assert np.count_nonzero(a == b) < 8  # of fair shuffles: 1 on average
        assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(n) < 5


@native_only
def test_the_native_core_refuses_what_it_cannot_use() -> None:
    native, key = load("native"), KEYS[0].copy()
    with pytest.raises(InvalidArgument, match="indices: must be from 0 to"):
        native.bijection_apply(key, 5, np.array([4, 5]))
    with pytest.raises(InvalidArgument, match="indices: must be from 0"):
        native.bijection_invert(key, 5, np.array([-1]))
    with pytest.raises(InvalidArgument, match=r"n: must be from 0 to 2\*\*62"):
        native.bijection_range(key, 2**62 + 1, 0, np.empty(1, np.int64))
    with pytest.raises(InvalidArgument, match="begin, out"):
        native.bijection_range(key, 10, 8, np.empty(3, np.int64))
    with pytest.raises(InvalidArgument, match="int32 holds values below"):
        native.bijection_range(key, 2**31 + 1, 0, np.empty(3, np.int32))
    with pytest.raises(InvalidArgument, match=r"key: expected uint64\[2\]"):
        native.bijection_apply(np.zeros(3, np.uint64), 5, np.array([4]))


# ---- passes over documents ---------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    copies=st.integers(1, 3),
    stride=st.sampled_from([1, 2, 7, 64]),
    seed=st.integers(0, 99),
)
def test_passes_are_the_references(
    backend: Any, lengths: list[int], copies: int, stride: int, seed: int
) -> None:
    rng, reference = np.random.default_rng(seed), load("reference")
    sizes, key = np.array(lengths, np.int32), KEYS[seed]
    entries = -(-copies * sizes.size // stride) + 1
    starts, expected = np.empty(entries, np.int64), np.empty(entries, np.int64)
    reference.epoch_starts(key, sizes, copies, stride, expected)
    backend.epoch_starts(key, sizes, copies, stride, starts, 3)
    np.testing.assert_array_equal(starts, expected)
    total = copies * sum(lengths)
    assert starts[-1] == total
    if total:
        begins = rng.integers(0, total, 9)
        ends = np.minimum(begins + rng.integers(1, 40, 9), total)
        ours = backend.epoch_spans(key, sizes, copies, stride, starts, begins, ends)
        theirs = reference.epoch_spans(key, sizes, copies, stride, starts, begins, ends)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == np.int64
            np.testing.assert_array_equal(mine, other)


@for_each("copies", [1, 2])
@for_each("stride", [1, 3, 64])
def test_long_passes_are_the_same_with_any_threads(compiled: Any, copies: int, stride: int) -> None:
    lengths = np.random.default_rng(3).integers(0, 2000, 300_001).astype(np.int32)
    lengths[::999] += 2**16  # no longer fit beside a row in 32 bits
    positions = permutation(load(FAST), KEYS[9], copies * lengths.size) % lengths.size
    ends = np.cumsum(lengths[positions], dtype=np.int64)
    rows = -(-ends.size // stride)
    expected = np.append(np.append(0, ends[stride - 1 :: stride]), ends[-1])[: rows + 1]
    for threads in (1, 2, 5):
        starts = np.empty(expected.size, np.int64)
        compiled.epoch_starts(KEYS[9], lengths, copies, stride, starts, threads)
        np.testing.assert_array_equal(starts, expected)


@native_only
def test_the_native_core_refuses_passes_it_cannot_make() -> None:
    native, lengths = load("native"), np.array([3, 0, 4], np.int32)
    starts = np.empty(3, np.int64)
    native.epoch_starts(KEYS[0], lengths, 1, 2, starts)
    with pytest.raises(InvalidArgument, match="starts: must hold 3 entries"):
        native.epoch_starts(KEYS[0], lengths, 1, 2, np.empty(4, np.int64))
    for begin, end in ((0, 8), (-1, 2), (3, 3)):
        with pytest.raises(InvalidArgument, match="0 <= begin < end <= tokens of the pass"):
            native.epoch_spans(KEYS[0], lengths, 1, 2, starts, np.array([begin]), np.array([end]))
    with pytest.raises(InvalidArgument, match="stride: must be from 1"):
        native.epoch_starts(KEYS[0], lengths, 1, 0, starts)
