"""Draws from streams whose weights change, in Numba; all arithmetic is of 64 bits."""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I16, I64, U32
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.mix import MOST_DEFICIT, UNIT, check_fill, check_lengths

_WINDOW = 4096


@numba.njit(cache=True, nogil=True, inline="always")
def _drawn(weight, deficit, time):  # type: ignore[no-untyped-def]
    if weight == 0:
        return 0
    rest = deficit + weight * (time & (UNIT - 1)) + UNIT // 2
    return max(weight * (time >> 31) + (rest >> 31), 0)


@numba.njit(cache=True, nogil=True)
def _all_drawn(weights, deficits, time):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(len(weights)):
        total += _drawn(np.int64(weights[i]), deficits[i], time)
    return total


@numba.njit(cache=True, nogil=True)
def _is_sound(weights, deficits):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(len(weights)):
        total += np.int64(weights[i])
        if not -MOST_DEFICIT <= deficits[i] <= MOST_DEFICIT:
            return False
    return total == UNIT


@numba.njit(cache=True, nogil=True)
def _time_before(weights, deficits, draws):  # type: ignore[no-untyped-def]
    """Return the last time until which at most ``draws`` are drawn."""
    low, high, step = draws, draws + 1, 1
    while _all_drawn(weights, deficits, low) > draws:
        high, low, step = low, low - step, 2 * step
    step = 1
    while _all_drawn(weights, deficits, high) <= draws:
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = low + (high - low) // 2
        if _all_drawn(weights, deficits, middle) <= draws:
            low = middle
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def _find(weights, deficits, time, length):  # type: ignore[no-untyped-def]
    """Return streams and numbers of the draws in times (time, time + length], in order."""
    n = len(weights)
    starts = np.zeros(length + 1, np.int64)
    size = 0
    for i in range(n):
        weight = np.int64(weights[i])
        first = _drawn(weight, deficits[i], time)
        size += _drawn(weight, deficits[i], time + length) - first
    units, rests = np.empty(size, np.int64), np.empty(size, np.int64)
    streams, numbers = np.empty(size, np.int64), np.empty(size, np.int64)
    k = 0
    for i in range(n):
        weight = np.int64(weights[i])
        first = _drawn(weight, deficits[i], time)
        end = _drawn(weight, deficits[i], time + length)
        if first == end:
            continue
        # wraps around, as only the result is known to be small
        since = (2 * first + 1) * (UNIT // 2) - deficits[i] - weight * time
        whole, part = UNIT // weight, UNIT % weight
        unit = (since - 1) // weight
        rest = since - unit * weight
        for number in range(first, end):
            units[k], rests[k], streams[k], numbers[k] = unit, rest, i, number
            starts[unit + 1] += 1
            k += 1
            unit += whole
            rest += part
            if rest > weight:
                rest -= weight
                unit += 1
    for u in range(length):
        starts[u + 1] += starts[u]
    order = np.empty(size, np.int64)
    filled = starts[:-1].copy()
    for k in range(size):
        at = filled[units[k]]
        filled[units[k]] += 1
        weight = np.int64(weights[streams[k]])
        while at > starts[units[k]]:
            other = order[at - 1]
            # equal times stay in the order of streams
            if rests[k] * np.int64(weights[streams[other]]) >= rests[other] * weight:
                break
            order[at] = other
            at -= 1
        order[at] = k
    return streams[order], numbers[order]


@numba.njit(cache=True, nogil=True)
def _table(shares, lengths, deficits, counts):  # type: ignore[no-untyped-def]
    for k in range(len(lengths)):
        weights, owed, draws = shares[k], deficits[k], lengths[k]
        if not _is_sound(weights, owed):
            return k
        time = _time_before(weights, owed, draws)
        left = draws
        for i in range(len(weights)):
            drawn = _drawn(np.int64(weights[i]), owed[i], time)
            counts[k + 1, i] = drawn
            left -= drawn
        if left > 0:
            streams, _ = _find(weights, owed, time, 1)
            for at in range(left):
                counts[k + 1, streams[at]] += 1
        for i in range(len(weights)):
            drawn = counts[k + 1, i]
            deficits[k + 1, i] = owed[i] + np.int64(weights[i]) * draws - drawn * UNIT
            counts[k + 1, i] = drawn + counts[k, i]
    return -1


@numba.njit(cache=True, nogil=True)
def _fill(shares, starts, deficits, counts, k, begin, streams, ordinals):  # type: ignore[no-untyped-def]
    at, end = begin, begin + len(streams)
    while at < end:
        stop = min(end, starts[k + 1]) if k + 1 < len(starts) else end
        weights, owed = shares[k], deficits[k]
        if not _is_sound(weights, owed):
            return k
        first, last = at - starts[k], stop - starts[k]
        time = _time_before(weights, owed, first)
        drawn = _all_drawn(weights, owed, time)
        while drawn < last:
            length = min(_WINDOW, last - drawn)
            found, numbers = _find(weights, owed, time, length)
            for d in range(max(0, first - drawn), min(len(found), last - drawn)):
                streams[at - begin] = found[d]
                ordinals[at - begin] = counts[k, found[d]] + numbers[d]
                at += 1
            drawn += len(found)
            time += length
        k += 1
    return -1


def _check(shares: U32, deficits: I64, wrong: int) -> None:
    if wrong < 0:
        return
    if int(shares[wrong].sum(dtype=np.int64)) != UNIT:
        raise InvalidArgument("shares: each row must sum to 2**31")
    raise InvalidArgument("deficits: must be from -2**48 to 2**48")


def mix_table(shares: U32, lengths: I64, deficits: I64, counts: I64) -> None:
    check_lengths(lengths)
    _check(shares, deficits, _table(shares, lengths, deficits, counts))


def mix_fill(
    shares: U32,
    starts: I64,
    deficits: I64,
    counts: I64,
    begin: int,
    streams: I16,
    ordinals: I64,
    num_threads: int = 1,
) -> None:
    check_fill(starts, begin, streams.size)
    k = int(np.searchsorted(starts, begin, "right")) - 1
    _check(shares, deficits, _fill(shares, starts, deficits, counts, k, begin, streams, ordinals))
