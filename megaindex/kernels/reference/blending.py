"""Which dataset each position of a blend is drawn from: the written specification.

Every function takes C-contiguous arrays that its caller has checked, and no two of the outputs
overlap. `counts[i]` is how often dataset i was drawn before `begin`; it is advanced in place to
`end`, so a blend can stop and go on anywhere. Outputs hold the positions `begin … end - 1` from
their first element on, and either may be None.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
DatasetIndex = npt.NDArray[np.int16] | npt.NDArray[np.uint8]


def blend_greedy(
    weights: F64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None:
    """Draw from the dataset that is furthest behind its weight, the lowest index among equals.

    "Behind" is `weights[i] * max(position, 1) - counts[i]` in float64, rounded after the product
    and after the difference, as the frameworks compute it. Weights are finite and >= 0, and need
    not sum to one.

    With weights 0.5, 0.25, 0.25 the datasets drawn are 0 1 2 0, 0 1 2 0, …
    """
    for position in range(begin, end):
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
    """As `blend_greedy` with weights `sizes / sizes.sum()`, leaving out datasets that are spent.

    Dataset i is spent once drawn `sizes[i]` times; an empty one is never drawn.
    `end` is at most `sizes.sum()`.
    """
    weights = sizes / float(sizes.sum())
    for position in range(begin, end):
        behind = weights * float(max(position, 1)) - counts
        behind[counts >= sizes] = -np.inf
        _draw(int(np.argmax(behind)), position - begin, counts, dataset_index, dataset_sample_index)


def blend_checkpoints(weights: F64, size: int, stride: int) -> I64:
    """The counts of `blend_greedy` before every `stride`-th position.

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
    """Webster's divisor rule: draw argmax weights[i] / (2 * counts[i] + 1), lowest index first.

    Compared exactly, by cross-multiplication. Each weight is below 2**53, their sum below 2**63
    and positive.

    With weights 2, 1, 1 the first four are 0 1 2 0: the quotients are 2 1 1, then 2/3 1 1, then
    2/3 1/3 1, then 2/3 1/3 1/3.
    """
    shares = [int(weight) for weight in weights]
    odd = [2 * int(count) + 1 for count in counts]
    for position in range(begin, end):
        best = 0
        for i in range(1, len(shares)):
            if shares[i] * odd[best] > shares[best] * odd[i]:
                best = i
        odd[best] += 2
        _draw(best, position - begin, counts, dataset_index, dataset_sample_index)


def divisor_counts(weights: U64, position: int) -> I64:
    """The counts of `divisor_fill` before `position` (at most 2**60), without the walk to it.

    The draw that takes dataset i from k to k + 1 happens at "time" (2k + 1) / weights[i], so at
    time m / sum exactly floor((weights[i] * m + sum) / (2 * sum)) draws of i are over. Rounding
    moves each of these by at most a half: at m = 2 * position - n, between position - n and
    position draws are over, and at most n are left to walk.
    """
    total = sum(int(weight) for weight in weights)
    time = max(2 * position - len(weights), 0)
    counts = np.array(
        [(int(weight) * time + total) // (2 * total) for weight in weights], dtype=np.int64
    )
    divisor_fill(weights, int(counts.sum()), position, counts, None, None)
    return counts


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
