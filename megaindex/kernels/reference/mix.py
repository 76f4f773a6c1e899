"""Draws from streams whose weights change.

The weights of a segment are integers that sum to UNIT. After n draws a stream of weight w is owed
w * n / UNIT draws; ``deficits`` holds, in units of 1 / UNIT, the draws owed and not made before the
segment, so that small weights add up over segments of any length.

Within a segment, draw j of a stream with deficit f is at time ((2j + 1) * UNIT / 2 - f) / w, when
the draws owed reach j + 1/2; the time before n draws is about n. Draws follow each other in the
order of time, equal ones in the order of streams. With weights that stay the same and deficits 0
this is the divisor rule, and a segment with the weights of the one before goes on with its draws.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from megaindex._types import I16, I64, U32
from megaindex.errors import InvalidArgument

UNIT = 2**31
MOST_DEFICIT = 2**48
MOST_POSITION = 2**60


def mix_table(shares: U32, lengths: I64, deficits: I64, counts: I64) -> None:
    """Compute the state at the end of each segment from that at its start.

    Args:
        shares: uint32[segments, streams]: the weights; each row sums to UNIT.
        lengths: int64[segments]: number of draws of each segment.
        deficits: int64[segments + 1, streams]: row 0 holds the deficits at the start of the first
            segment; the others are written.
        counts: int64[segments + 1, streams]: likewise, the draws of each stream.

    Raises:
        InvalidArgument: a row does not sum to UNIT, or a deficit or length is out of range.
    """
    check_lengths(lengths)
    for k, length in enumerate(lengths.tolist()):
        weights, owed = _segment(shares[k], deficits[k])
        drawn = _counts(weights, owed, length)
        for i, (weight, deficit) in enumerate(zip(weights, owed, strict=True)):
            deficits[k + 1, i] = deficit + weight * length - UNIT * drawn[i]
            counts[k + 1, i] = counts[k, i] + drawn[i]


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
    """Write stream and draw of the stream of positions from ``begin`` on.

    Args:
        shares: uint32[segments, streams]: the weights; each row sums to UNIT.
        starts: int64[segments]: first position of each segment; the last one has no end.
        deficits: int64[segments, streams]: those at the start of each segment.
        counts: int64[segments, streams]: draws before each segment.
        begin: first position, not before the first segment.
        streams: int16[n] output.
        ordinals: int64[n] output.
        num_threads: number of threads.

    Raises:
        InvalidArgument: as `mix_table`; or starts do not increase, or a position is out of range.
    """
    check_fill(starts, begin, streams.size)
    k = int(np.searchsorted(starts, begin, "right")) - 1
    at, end = begin, begin + streams.size
    while at < end:
        stop = min(end, int(starts[k + 1])) if k + 1 < starts.size else end
        weights, owed = _segment(shares[k], deficits[k])
        drawn = _counts(weights, owed, at - int(starts[k]))
        for position in range(at, stop):
            stream = _next(weights, owed, drawn)
            streams[position - begin] = stream
            ordinals[position - begin] = counts[k, stream] + drawn[stream]
            drawn[stream] += 1
        at, k = stop, k + 1


def check_lengths(lengths: I64) -> None:
    if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= MOST_POSITION:
        raise InvalidArgument("lengths: must be from 0 to 2**60")


def check_fill(starts: I64, begin: int, size: int) -> None:
    if starts.size == 0:
        raise InvalidArgument("shares: must have at least one row")
    if (np.diff(starts) <= 0).any():
        raise InvalidArgument("starts: must increase")
    if not 0 <= int(starts[0]) <= begin <= MOST_POSITION - size:
        raise InvalidArgument("begin: must be from the first start to 2**60")


def _segment(shares: U32, deficits: I64) -> tuple[list[int], list[int]]:
    weights, owed = shares.tolist(), deficits.tolist()
    if sum(weights) != UNIT:
        raise InvalidArgument("shares: each row must sum to 2**31")
    if any(abs(deficit) > MOST_DEFICIT for deficit in owed):
        raise InvalidArgument("deficits: must be from -2**48 to 2**48")
    return weights, owed


def _drawn(weights: list[int], deficits: list[int], time: int) -> list[int]:
    """Return the draws of each stream until a time."""
    return [
        max(0, (f + w * time + UNIT // 2) // UNIT) if w else 0
        for w, f in zip(weights, deficits, strict=True)
    ]


def _counts(weights: list[int], deficits: list[int], draws: int) -> list[int]:
    """Return the draws of each stream among the first ``draws``."""
    low, high, step = draws, draws + 1, 1
    while sum(_drawn(weights, deficits, low)) > draws:
        high, low, step = low, low - step, 2 * step
    step = 1
    while sum(_drawn(weights, deficits, high)) <= draws:
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if sum(_drawn(weights, deficits, middle)) <= draws:
            low = middle
        else:
            high = middle
    drawn = _drawn(weights, deficits, low)
    for _ in range(draws - sum(drawn)):
        drawn[_next(weights, deficits, drawn)] += 1
    return drawn


def _next(weights: list[int], deficits: list[int], drawn: list[int]) -> int:
    """Return the stream that is drawn next."""
    times = (
        (Fraction((2 * j + 1) * (UNIT // 2) - f, w), i)
        for i, (w, f, j) in enumerate(zip(weights, deficits, drawn, strict=True))
        if w
    )
    return min(times)[1]
