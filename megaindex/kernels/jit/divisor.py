"""Webster's divisor rule in Numba.

A 128-bit integer is a pair of words: the high one signed, the low one unsigned.
"""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I64, U64, DatasetIndex
from megaindex.kernels.reference.blending import check_divisor, wrong_divisor_counts

_STRETCH = 4096
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@numba.njit(cache=True, nogil=True, inline="always")
def _multiply(a, b):  # type: ignore[no-untyped-def]
    """Return the 128-bit product of two unsigned words, by halves as on paper."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low, cross, other, high = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    middle = (low >> _HALF) + (cross & _LOW) + (other & _LOW)
    high += (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)
    return high, (middle << _HALF) | (low & _LOW)


@numba.njit(cache=True, nogil=True, inline="always")
def _subtract(a_high, a_low, b_high, b_low):  # type: ignore[no-untyped-def]
    low = a_low - b_low
    borrow = np.uint64(1) if a_low < b_low else np.uint64(0)
    return a_high - b_high - borrow, low


@numba.njit(cache=True, nogil=True, inline="always")
def _to_float(high, low):  # type: ignore[no-untyped-def]
    """Convert a signed 128-bit value; a negative one is negated first to keep its low bits."""
    if np.int64(high) < 0:
        high, low = _subtract(np.uint64(0), np.uint64(0), high, low)
        return -(np.float64(high) * 18446744073709551616.0 + np.float64(low))
    return np.float64(high) * 18446744073709551616.0 + np.float64(low)


@numba.njit(cache=True, nogil=True, inline="always")
def _odd(count):  # type: ignore[no-untyped-def]
    return np.uint64(2) * np.uint64(count) + np.uint64(1)


@numba.njit(cache=True, nogil=True)
def _exactly_before(weights, i, count_a, j, count_b):  # type: ignore[no-untyped-def]
    a_high, a_low = _multiply(_odd(count_a), weights[j])
    b_high, b_low = _multiply(_odd(count_b), weights[i])
    if a_high != b_high:
        return a_high < b_high
    if a_low != b_low:
        return a_low < b_low
    return i < j


@numba.njit(cache=True, nogil=True)
def _reaches(weights, position, counts):  # type: ignore[no-untyped-def]
    """Return whether `counts` are those of the divisor rule before `position`."""
    last = first = -1
    drawn = np.int64(0)
    for i in range(len(weights)):
        if counts[i] < 0 or counts[i] > position - drawn or (weights[i] == 0 and counts[i] > 0):
            return False
        drawn += counts[i]
        if weights[i] == 0:
            continue
        if first < 0 or _exactly_before(weights, i, counts[i], first, counts[first]):
            first = i
        if counts[i] > 0 and (
            last < 0 or _exactly_before(weights, last, counts[last] - 1, i, counts[i] - 1)
        ):
            last = i
    if drawn != position:
        return False
    return last < 0 or _exactly_before(weights, last, counts[last] - 1, first, counts[first])


@numba.njit(cache=True, nogil=True)
def _before(weights, time_a, i, count_a, time_b, j, count_b, apart):  # type: ignore[no-untyped-def]
    if abs(time_a - time_b) > apart:
        return time_a < time_b
    return _exactly_before(weights, i, count_a, j, count_b)


@numba.njit(cache=True, nogil=True)
def _collect(weights, total, begin, end, counts, times, datasets, nths):  # type: ignore[no-untyped-def]
    """Collect the draws before time `end`, unsorted; return how many."""
    found = 0
    for i in range(len(weights)):
        weight = weights[i]
        if weight == 0:
            continue
        next_high, next_low = _multiply(_odd(counts[i]), total)
        high, low = _multiply(np.uint64(begin), weight)
        high, low = _subtract(next_high, next_low, high, low)
        over_weight = 1 / np.float64(weight)
        first = _to_float(high, low) * over_weight
        step = 2 * np.float64(total) * over_weight
        high, low = _multiply(np.uint64(end), weight)
        high, low = _subtract(high, low, next_high, next_low)
        k = 0
        while np.int64(high) >= 0:
            times[found] = first + k * step
            datasets[found] = i
            nths[found] = counts[i] + k
            found += 1
            k += 1
            high, low = _subtract(high, low, np.uint64(0), np.uint64(2) * total)
    return found


@numba.njit(cache=True, nogil=True)
def _sort(weights, length, found, times, datasets, nths, order):  # type: ignore[no-untyped-def]
    """Sort the first `found` draws into `order`: by buckets, then exactly among neighbours."""
    starts = np.zeros(length + 1, np.int64)
    buckets = np.empty(found, np.int64)
    largest = 0.0
    for k in range(found):
        buckets[k] = np.int64(min(max(times[k] / 2, 0.0), np.float64(length - 1)))
        starts[buckets[k] + 1] += 1
        largest = max(largest, abs(times[k]))
    starts = np.cumsum(starts)
    for k in range(found):
        order[starts[buckets[k]]] = k
        starts[buckets[k]] += 1
    apart = 16 * 2.220446049250313e-16 * largest
    for k in range(1, found):
        a, to = order[k], k
        while to > 0:
            b = order[to - 1]
            if not _before(
                weights, times[a], datasets[a], nths[a], times[b], datasets[b], nths[b], apart
            ):
                break
            order[to] = b
            to -= 1
        order[to] = a


@numba.njit(cache=True, nogil=True)
def _fill(weights, begin, end, counts, index, samples):  # type: ignore[no-untyped-def]
    total = np.uint64(weights.sum())
    longest = max(_STRETCH, 2 * len(weights))
    room = longest + len(weights) + 1
    times, datasets = np.empty(room), np.empty(room, np.int64)
    nths, order = np.empty(room, np.int64), np.empty(room, np.int64)
    n = begin
    while n < end:
        length = max(min(_STRETCH, end - n), 2 * len(weights))
        found = _collect(weights, total, 2 * n, 2 * (n + length), counts, times, datasets, nths)
        _sort(weights, length, found, times, datasets, nths, order)
        for k in order[: min(found, end - n)]:
            if len(index) > 0:
                index[n - begin] = datasets[k]
            if len(samples) > 0:
                samples[n - begin] = nths[k]
            counts[datasets[k]] = nths[k] + 1
            n += 1


def divisor_fill(
    weights: U64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    index = np.empty(0, np.int16) if dataset_index is None else dataset_index
    samples = np.empty(0, np.int64) if dataset_sample_index is None else dataset_sample_index
    check_divisor(weights, end)
    if not _reaches(weights, begin, counts):
        raise wrong_divisor_counts()
    _fill(weights, begin, end, counts, index, samples)


def divisor_counts(weights: U64, position: int) -> I64:
    check_divisor(weights, position)
    exact = weights.astype(object)
    total = int(exact.sum())
    time = max(2 * position - len(weights), 0)
    counts = ((exact * time + total) // (2 * total)).astype(np.int64)
    divisor_fill(weights, int(counts.sum()), position, counts, None, None)
    return counts
