"""Blends: the dataset and the dataset's sample of each position.

Arrays are C-contiguous and do not overlap. `counts[i]` is the number of draws from dataset i before
`begin`, and is advanced in place to `end`, so that a blend can be continued from any position.
Outputs hold the positions `begin … end - 1`, and either may be None.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from megaindex._types import F64, I64, U64, DatasetIndex
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


def blend_checkpoints(weights: F64, size: int, stride: int) -> I64:
    """Return the counts of `blend_greedy` before every `stride`-th position.

    Returns int64 of shape (size // stride + 1, len(weights)): row k is the state before position
    k * stride, from which `blend_greedy` goes on.
    """
    rows = np.zeros((size // stride + 1, len(weights)), np.int64)
    for k in range(1, len(rows)):
        rows[k] = rows[k - 1]
        blend_greedy(weights, (k - 1) * stride, k * stride, rows[k], None, None)
    return rows


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
