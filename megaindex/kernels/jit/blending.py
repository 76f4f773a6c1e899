"""Blends in Numba; reference/blending.py documents the functions.

The method is that of csrc/megaindex/blending_window.hpp. Pool 0 has all entries, and each further
pool those entries of the pool before that can be drawn within the next draws; draws are decided in
the last pool, the field. A pool is a row of `slope`, `count`, `parent`, `values`, of `floors`
(floats) and of `sizes` (integers). Draws from streams whose weights change use integers of 64 bits.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from megaindex._types import F64, I16, I64, U32, DatasetIndex
from megaindex.errors import InvalidArgument
from megaindex.kernels.reference.blending import MOST_DEFICIT, UNIT, check_fill, check_lengths

_NO_LIMIT = np.iinfo(np.int64).max
_SLICE = 1 << 20  # draws between two checks of signals
_FEW_DRAWS = 1024  # up to here, setting up windows takes longer than the scan
_MOST_BEHIND, _LEAST = 2.0**50, 1e-270  # see fits_windows in csrc/megaindex/blending.hpp


@numba.njit(cache=True, nogil=True)
def _scan(weights, limits, n, end, counts, origin, index, samples):  # type: ignore[no-untyped-def]
    """Compare all datasets for every draw; empty outputs are not filled."""
    behind = np.empty(len(weights))
    for position in range(n, end):
        # in two passes, because a branch on the best so far would be mispredicted
        draws = np.float64(max(position, 1))
        furthest = -np.inf
        for i in range(len(weights)):
            gap = weights[i] * draws - np.float64(counts[i])
            behind[i] = gap if counts[i] < limits[i] else -np.inf
            furthest = max(furthest, behind[i])
        best = 0
        while behind[best] != furthest:
            best += 1
        if len(index) > 0:
            index[position - origin] = best
        if len(samples) > 0:
            samples[position - origin] = counts[best]
        counts[best] += 1


def _fits_windows(weights: F64, end: int) -> bool:
    positive = weights[weights > 0]
    return (
        end <= _MOST_BEHIND
        and bool((positive >= _LEAST).all())
        and float(weights.max()) * end <= _MOST_BEHIND
    )


def _blend(
    weights: F64,
    limits: I64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    index = np.empty(0, np.int16) if dataset_index is None else dataset_index
    samples = np.empty(0, np.int64) if dataset_sample_index is None else dataset_sample_index
    out = (counts, begin, index, samples)
    # a scan of so few datasets costs no more than the upkeep of windows
    windows = len(weights) > MAX_LANES and end - begin > _FEW_DRAWS and _fits_windows(weights, end)
    if windows:
        pools = make_pools(weights + 0.0, limits)  # turns -0.0 into 0.0
        turn = np.empty(len(pools[1]), np.int64)
        windows = load(pools, limits, counts, turn)
    n, stretch = begin, 64
    while n < end:
        stop = min(end, n + _SLICE)
        if not windows:
            _scan(weights, limits, n, stop, *out)
            n = stop
            continue
        reached = draw_windows(pools, limits, turn, n, stop, *out)
        # windows went far, so the next scan is short again
        if reached - n > 64 * stretch:
            stretch = 64
        n = reached
        if n < stop:  # too many datasets are almost equally far behind
            _scan(weights, limits, n, min(end, n + stretch), *out)
            n, stretch = min(end, n + stretch), min(2 * stretch, 1 << 16)
            load(pools, limits, counts, turn)


def blend_greedy(
    weights: F64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    limits = np.full(len(weights), _NO_LIMIT)
    _blend(weights, limits, begin, end, counts, dataset_index, dataset_sample_index)


def blend_exhaustive(
    sizes: I64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    weights = sizes / float(max(sizes.sum(), 1))
    _blend(weights, sizes, begin, end, counts, dataset_index, dataset_sample_index)


MAX_LANES = 64
FIRST, LEVEL, RISE, LAST, SLOWEST, DEPTH = range(6)  # of floors
SIZE, WIDTH, FITTING = range(3)  # of sizes
_UNIT = float(np.finfo(np.float64).eps)


def make_pools(weights: F64, limits: I64) -> tuple[Any, ...]:
    """Return (member, start, slope, count, parent, values, floors, sizes) for `draw_windows`.

    8 or more datasets of equal weight and limit are one entry: member[start[e]:start[e + 1]].
    Entries are in the order of their first members.
    """
    alike = np.column_stack((weights.view(np.int64), limits))
    _, first, inverse, number = np.unique(
        alike, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    # a column in NumPy 2.0
    inverse = inverse.reshape(-1)
    datasets = np.arange(len(weights))
    # a small group saves few lanes and costs the look-up of its turn
    leader = np.where(number[inverse] < 8, datasets, first[inverse])
    member = np.lexsort((datasets, leader))
    start = np.append(np.flatnonzero(leader[member] == member), len(weights))
    entries = len(start) - 1
    if entries <= MAX_LANES:
        widths = []
    # one pool more costs passes over all entries, which few entries do not repay
    elif entries <= 1500:
        widths = [16 if entries <= 256 else 20]
    else:
        widths = [256 if entries <= 16384 else 512, 16]
    pools = len(widths) + 1
    slope = np.zeros((pools, entries))
    slope[0] = weights[member[start[:-1]]]
    floors = np.zeros((pools, 6))
    floors[:, LEVEL] = -np.inf
    floors[0, LAST] = np.inf
    sizes = np.zeros((pools, 3), np.int64)
    sizes[0, SIZE] = entries
    sizes[1:, WIDTH] = sizes[1:, FITTING] = widths
    parent = np.zeros((pools, entries), np.int64)
    return member, start, slope, np.empty_like(slope), parent, np.empty_like(slope), floors, sizes


@numba.njit(cache=True, nogil=True)
def load(pools, limits, counts, turn):  # type: ignore[no-untyped-def]
    """Load the counts of the datasets; return False if they are not those of members in turn."""
    member, start, _, count, _, _, floors, sizes = pools
    for e in range(sizes[0, SIZE]):
        low = counts[member[start[e + 1] - 1]]
        ahead = np.int64(1)
        turn[e] = start[e]
        for k in range(start[e], start[e + 1]):
            lead = counts[member[k]] - low
            if lead < 0 or lead > ahead:
                return False
            ahead = lead
            turn[e] += lead
        # an exhausted entry is infinitely far ahead, hence never drawn
        count[0, e] = np.inf if low >= limits[member[start[e]]] else np.float64(low)
    # no pool but the first holds for any draw: all are picked anew
    floors[1:, LAST] = -1.0
    return True


@numba.njit(cache=True, nogil=True, inline="always")
def _floor(floors, pool, d):  # type: ignore[no-untyped-def]
    return floors[pool, LEVEL] + floors[pool, RISE] * (d - floors[pool, FIRST])


@numba.njit(cache=True, nogil=True)
def _reached(slots, level):  # type: ignore[no-untyped-def]
    count = 0
    for slot in slots:
        count += slot >= level
    return count


@numba.njit(cache=True, nogil=True)
def _level(slots, wanted, guess):  # type: ignore[no-untyped-def]
    """Return a level that `wanted` to 1.5 * `wanted` slots reach, `guess` if it is one."""
    most = wanted + wanted // 2
    if wanted <= _reached(slots, guess) <= most:
        return guess
    low, high = np.inf, -np.inf
    for slot in slots:
        low = min(low, np.inf if slot == -np.inf else slot)
        high = max(high, slot)
    # values may be so unevenly spread that halving does not end; then they are sorted
    for _ in range(12):
        middle = low + (high - low) / 2
        count = _reached(slots, middle)
        if wanted <= count <= most:
            return middle
        if count > wanted:
            low = middle
        else:
            high = middle
    # rare, and exact for any spread of the values
    return np.sort(slots)[max(len(slots) - wanted, 0)]


@numba.njit(cache=True, nogil=True)
def _set_floor(floors, sizes, slots, pool, d):  # type: ignore[no-untyped-def]
    wanted = sizes[pool, FITTING] + 1
    best = slots.max()
    before = _floor(floors, pool, d)
    if not wanted <= _reached(slots, before) <= wanted + wanted // 2:
        before -= 1.2 * floors[pool, DEPTH]
    # the floor of entries that are all exhausted must stay finite: sums with -inf are NaN
    level = max(-1e300, _level(slots, wanted, before))
    floors[pool, DEPTH] = (best - level) * wanted / (_reached(slots, level) + 1)
    floors[pool, FIRST] = d
    floors[pool, LEVEL] = level
    floors[pool, RISE] = floors[pool, SLOWEST]
    floors[pool, LAST] = min(d + (sizes[pool, FITTING] - 1), floors[pool - 1, LAST])


@numba.njit(cache=True, nogil=True)
def _pick(slope, count, parent, values, floors, sizes, pool, most):  # type: ignore[no-untyped-def]
    """Pick the entries of the wider pool that reach the floor; return False if above `most`."""
    level, last = floors[pool, LEVEL], floors[pool, LAST]
    span = last - floors[pool, FIRST]
    # doubles round: an entry at the floor must not be left out by the last bit
    slack = 8 * _UNIT * (abs(level) + floors[pool, RISE] * span)
    reach0, least0 = 2 * _UNIT * last, level - slack
    reach1, least1 = span + 2 * _UNIT * last, _floor(floors, pool, last) - slack
    wide_slope, wide_count, wide_values = slope[pool - 1], count[pool - 1], values[pool - 1]
    slowest = np.inf
    found = 0
    for i in range(sizes[pool - 1, SIZE]):
        value, weight = wide_values[i], wide_slope[i]
        if value + weight * reach1 >= least1 or value + weight * reach0 >= least0:
            if found == most:
                return False
            slope[pool, found] = weight
            count[pool, found] = wide_count[i]
            parent[pool, found] = i
            found += 1
            if value >= level:
                slowest = min(slowest, weight)
    sizes[pool, SIZE] = found
    floors[pool, SLOWEST] = slowest
    return True


@numba.njit(cache=True, nogil=True)
def _narrow(slope, count, parent, values, floors, sizes, slots, pool, d, most):  # type: ignore[no-untyped-def]
    size, num_slots = sizes[pool - 1, SIZE], 3 * sizes[pool, WIDTH]
    slots = slots[:num_slots]
    slots[:] = -np.inf
    wide_slope, wide_count, wide_values = slope[pool - 1], count[pool - 1], values[pool - 1]
    for begin in range(0, size, num_slots):
        for i in range(begin, min(size, begin + num_slots)):
            value = wide_slope[i] * d - wide_count[i]
            wide_values[i] = value
            slots[i - begin] = max(slots[i - begin], value)
    # grows by one, so that a width that did not fit once is tried again soon
    sizes[pool, FITTING] = min(sizes[pool, WIDTH], sizes[pool, FITTING] + 1)
    while sizes[pool, FITTING] > 0:
        _set_floor(floors, sizes, slots, pool, d)
        if _pick(slope, count, parent, values, floors, sizes, pool, most):
            return True
        sizes[pool, FITTING] = sizes[pool, FITTING] * 3 // 4
    return False


@numba.njit(cache=True, nogil=True)
def _choose_field(slope, count, parent, values, floors, sizes, slots, top, d):  # type: ignore[no-untyped-def]
    """Pick entries anew if the field may lack the dataset drawn at d.

    ``top`` is how far behind the field's best entry was when a draw was not decided, else inf.
    Return the number of entries compared, or -1 if too many are close to each other.
    """
    field = len(sizes) - 1
    pool = 0
    # pools that hold for this draw need not be picked anew
    while pool < field and d <= floors[pool + 1, LAST] and top >= _floor(floors, pool + 1, d):
        pool += 1
    looked_at = 0
    while pool < field:
        pool += 1
        most = MAX_LANES if pool == field else sizes[0, SIZE]
        if not _narrow(slope, count, parent, values, floors, sizes, slots, pool, d, most):
            return -1
        looked_at += 3 * sizes[pool - 1, SIZE]
    return looked_at


@numba.njit(cache=True, nogil=True)
def _draw(  # type: ignore[no-untyped-def]
    member, start, slope, count, parent, floors, limits, turn, race, n, end, counts, origin, index,
    samples,
):  # fmt: skip
    """Draw while the field has the dataset to draw; return the position reached and `top` or inf.

    This is one function because Numba counts references to arrays at every call.
    """
    field = len(slope) - 1
    while n < end:
        d = np.float64(max(n, 1))
        if d > floors[field, LAST]:
            return n, np.inf
        # in two passes, because a branch on the best so far would be mispredicted
        top = -np.inf
        for lane in range(len(race)):
            race[lane] = slope[field, lane] * d - count[field, lane]
            top = max(top, race[lane])
        # an entry outside the field may be further behind
        if top < max(_floor(floors, field, d), _floor(floors, max(field - 1, 0), d)):
            return n, top
        best, leader = -1, 0
        for lane in range(len(race)):
            if race[lane] == top:
                e = lane
                for k in range(field, 0, -1):
                    e = parent[k, e]
                # of equally far datasets the frameworks draw the first
                if best < 0 or member[turn[e]] < member[turn[leader]]:
                    best, leader = lane, e
        i = member[turn[leader]]
        if len(index) > 0:
            index[n - origin] = i
        if len(samples) > 0:
            samples[n - origin] = counts[i]
        n += 1
        counts[i] += 1
        turn[leader] += 1
        if turn[leader] == start[leader + 1]:
            turn[leader] = start[leader]
            now = np.inf if counts[i] >= limits[i] else np.float64(counts[i])
            for k in range(field, -1, -1):
                count[k, best] = now
                best = parent[k, best]
    return n, np.inf


@numba.njit(cache=True, nogil=True)
def draw_windows(pools, limits, turn, n, end, counts, origin, index, samples):  # type: ignore[no-untyped-def]
    """Draw from n on, and fill outputs that are not empty.

    Return `end`, or the position from which windows are slower than the scan.
    """
    member, start, slope, count, parent, values, floors, sizes = pools
    slots = np.empty(3 * sizes[:, WIDTH].max())
    race = np.empty(MAX_LANES)
    mark, looked_at, top = n, 0, np.inf
    while n < end:
        d = np.float64(max(n, 1))
        looked = _choose_field(slope, count, parent, values, floors, sizes, slots, top, d)
        if looked < 0:
            return n
        looked_at += looked
        n, top = _draw(
            member, start, slope, count, parent, floors, limits, turn, race[: sizes[-1, SIZE]],
            n, min(end, mark + 1024), counts, origin, index, samples,
        )  # fmt: skip
        if n - mark >= 1024:
            # a scan would have compared fewer entries
            if looked_at > (n - mark) * len(counts):
                return n
            mark, looked_at = n, 0
    return n


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
    # deficits shift the time by an unknown amount, so the bounds are doubled outwards
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
    # counting sort by whole units: only draws within one unit are compared
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
