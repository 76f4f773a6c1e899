"""Blends: the dataset and the dataset's sample of each position.

Arrays are C-contiguous and do not overlap. `counts[i]` is the number of draws from dataset i before
`begin`, and is advanced in place to `end`, so that a blend can be continued from any position.
Outputs hold the positions `begin … end - 1`, and either may be None.

Draws from streams whose weights change: the weights of a segment are integers that sum to UNIT.
After n draws a stream of weight w is owed w * n / UNIT draws; ``deficits`` holds, in units of
1 / UNIT, the draws owed and not made before the segment, so that small weights add up over segments
of any length. Within a segment, draw j of a stream with deficit f is at time
((2j + 1) * UNIT / 2 - f) / w, when the draws owed reach j + 1/2; the time before n draws is about
n. Draws follow each other in the order of time, equal ones in the order of streams. With weights
that stay the same and deficits 0 this is the divisor rule, and a segment with the weights of the
one before goes on with its draws.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from megaindex._types import F64, I16, I64, U32, U64, DatasetIndex
from megaindex.errors import InvalidArgument


def blend_greedy(
    weights: F64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    """Draw from the dataset that is furthest behind its weight, the lowest index among equals.

    A dataset is behind by `weights[i] * max(position, 1) - counts[i]` in float64, rounded after the
    product and after the difference, as in megatron-core 0.16.1 and GPT-NeoX. Weights are finite
    and >= 0, and need not sum to one.

    With weights 0.5, 0.25, 0.25 the datasets drawn are 0 1 2 0, 0 1 2 0, …
    """
    for position in range(begin, end):
        with np.errstate(over="ignore"):  # datasets that are infinitely behind are equals
            behind = weights * float(max(position, 1)) - counts
        _draw(int(np.argmax(behind)), position - begin, counts, dataset_index, dataset_sample_index)


def blend_exhaustive(
    sizes: I64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    """Draw as `blend_greedy` with weights `sizes / sizes.sum()`, at most `sizes[i]` times each.

    A dataset of size 0 is never drawn.
    `end` is at most `sizes.sum()`.
    """
    weights = sizes / float(sizes.sum())
    for position in range(begin, end):
        behind = weights * float(max(position, 1)) - counts
        behind[counts >= sizes] = -np.inf
        _draw(int(np.argmax(behind)), position - begin, counts, dataset_index, dataset_sample_index)


def divisor_fill(
    weights: U64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    """Draw argmax weights[i] / (2 * counts[i] + 1), the lowest index among equals.

    This is Webster's divisor rule; quotients are compared exactly, by cross-multiplication.

    With weights 2, 1, 1 the first four are 0 1 2 0: the quotients are 2 1 1, then 2/3 1 1, then
    2/3 1/3 1, then 2/3 1/3 1/3.

    Raises:
        InvalidArgument: a weight of 2**53 or more, a sum that is 0 or reaches 2**63, an `end` above
            2**60, or counts that are not what `divisor_counts` gives for `begin`.
    """
    check_divisor(weights, end)
    shares = [int(weight) for weight in weights]
    _check_divisor_counts(shares, begin, [int(count) for count in counts])
    odd = [2 * int(count) + 1 for count in counts]
    for position in range(begin, end):
        best = 0
        # strictly greater: of equal quotients the first stays
        for i in range(1, len(shares)):
            if shares[i] * odd[best] > shares[best] * odd[i]:
                best = i
        odd[best] += 2
        _draw(best, position - begin, counts, dataset_index, dataset_sample_index)


def divisor_counts(weights: U64, position: int) -> I64:
    """Return the counts of `divisor_fill` before `position` (at most 2**60), in O(datasets).

    The draw that takes dataset i from k to k + 1 happens at "time" (2k + 1) / weights[i], so at
    time m / sum exactly floor((weights[i] * m + sum) / (2 * sum)) draws of i have happened: that is
    weights[i] * m / (2 * sum) rounded. Rounding changes each count by at most a half: at
    m = 2 * position - n, between position - n and position draws have happened, and at most n
    remain to be drawn one by one.

    Raises:
        InvalidArgument: weights or a position out of the range of `divisor_fill`.
    """
    check_divisor(weights, position)
    total = sum(int(weight) for weight in weights)
    # early enough that no count is already beyond `position`
    time = max(2 * position - len(weights), 0)
    counts = np.array(
        [(int(weight) * time + total) // (2 * total) for weight in weights], dtype=np.int64
    )
    divisor_fill(weights, int(counts.sum()), position, counts, None, None)
    return counts


def check_divisor(weights: U64, position: int) -> None:
    total = sum(int(weight) for weight in weights)
    if max(map(int, weights)) >= 2**53 or not 0 < total < 2**63:
        raise InvalidArgument(
            "weights: each must be below 2**53, and their sum positive and below 2**63"
        )
    if not 0 <= position <= 2**60:
        raise InvalidArgument(f"position: must be from 0 to 2**60, got {position}")


def wrong_divisor_counts() -> InvalidArgument:
    return InvalidArgument(
        "counts: must be those of the divisor rule before `begin`; take them from divisor_counts"
    )


def _check_divisor_counts(shares: list[int], position: int, counts: list[int]) -> None:
    drawn, ahead = [], []  # times of each dataset's last and next draw
    for i, (share, count) in enumerate(zip(shares, counts, strict=True)):
        if count < 0 or (share == 0 and count > 0):
            raise wrong_divisor_counts()
        if count > 0:
            drawn.append((Fraction(2 * count - 1, share), i))
        if share > 0:
            ahead.append((Fraction(2 * count + 1, share), i))
    if sum(counts) != position or (drawn and max(drawn) > min(ahead)):
        raise wrong_divisor_counts()


def _draw(
    best: int,
    at: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    if dataset_index is not None:
        dataset_index[at] = best
    if dataset_sample_index is not None:
        dataset_sample_index[at] = counts[best]
    counts[best] += 1


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
    # deficits move the time by an amount that has no formula, so it is searched for
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
    # several draws may share the time after `low`; those that remain are drawn one by one
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
