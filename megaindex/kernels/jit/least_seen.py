"""Least-seen samples first, in Numba; see reference/least_seen.py for what it computes.

Scores only grow, so a heap of old scores does: its least sample is taken if its score, computed
again, still is the least.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from megaindex.kernels.types import I64

__all__ = ["least_seen"]


@numba.njit(cache=True, nogil=True)
def _score(begins, ends, first, last, widths, counts):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for run in range(first, last):
        for segment in range(begins[run], ends[run]):
            total += counts[segment] * widths[segment]
    return total


@numba.njit(cache=True, nogil=True)
def _least_seen(begins, ends, splits, widths, counts, order):  # type: ignore[no-untyped-def]
    heap = [
        (_score(begins, ends, splits[k], splits[k + 1], widths, counts), k)
        for k in range(splits.size - 1)
    ]
    heapq.heapify(heap)
    taken = 0
    while taken < order.size:
        sample = heapq.heappop(heap)[1]
        first, last = splits[sample], splits[sample + 1]
        now = (_score(begins, ends, first, last, widths, counts), sample)
        if len(heap) > 0 and now > heap[0]:
            heapq.heappush(heap, now)
            continue
        for run in range(first, last):
            counts[begins[run] : ends[run]] += 1
        order[taken] = sample
        taken += 1


def least_seen(
    begins: I64, ends: I64, row_splits: I64, widths: I64, counts: I64, num_samples: int
) -> I64:
    order = np.empty(num_samples, np.int64)
    _least_seen(begins, ends, row_splits, widths, counts, order)
    return order
