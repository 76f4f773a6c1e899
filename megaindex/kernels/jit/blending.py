"""Blending in Numba; see reference/blending.py for what it computes."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.kernels.jit.blending_window import MAX_LANES, load, make_pools, walk
from megaindex.kernels.jit.divisor import divisor_counts, divisor_fill
from megaindex.kernels.types import F64, I64, DatasetIndex

__all__ = [
    "blend_checkpoints",
    "blend_exhaustive",
    "blend_greedy",
    "divisor_counts",
    "divisor_fill",
]

_NO_LIMIT = np.iinfo(np.int64).max
_SLICE = 1 << 20  # draws between two looks at signals
_FEW_DRAWS = 1024  # not worth setting up windows for
_MOST_BEHIND, _LEAST = 2.0**50, 1e-270  # see fits_windows in csrc/megaindex/blending.hpp


@numba.njit(cache=True, nogil=True)
def _scan(weights, limits, n, end, counts, origin, index, samples):  # type: ignore[no-untyped-def]
    """Looks at every dataset for every draw. Empty outputs are not filled."""
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
    windows = len(weights) > MAX_LANES and end - begin > _FEW_DRAWS and _fits_windows(weights, end)
    if windows:
        pools = make_pools(weights + 0.0, limits)  # one zero
        turn = np.empty(len(pools[1]), np.int64)
        windows = load(pools, limits, counts, turn)
    n, stretch = begin, 64
    while n < end:
        stop = min(end, n + _SLICE)
        if not windows:
            _scan(weights, limits, n, stop, *out)
            n = stop
            continue
        reached = walk(pools, limits, turn, n, stop, *out)
        if reached - n > 64 * stretch:
            stretch = 64
        n = reached
        if n < stop:  # very many are equally far behind
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


def blend_checkpoints(weights: F64, size: int, stride: int) -> I64:
    rows = np.zeros((size // stride + 1, len(weights)), np.int64)
    for k in range(1, len(rows)):
        rows[k] = rows[k - 1]
        blend_greedy(weights, (k - 1) * stride, k * stride, rows[k], None, None)
    return rows
