"""The least-seen order in Numba; reference/counts.py documents the function."""

from __future__ import annotations

import heapq

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def _score(begins, ends, first, last, widths, counts):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for run in range(first, last):
        for segment in range(begins[run], ends[run]):
            total += counts[segment] * widths[segment]
    return total


@numba.njit(cache=True, nogil=True)
def least_seen(begins, ends, row_splits, widths, counts, num_samples):  # type: ignore[no-untyped-def]
    """Take samples from a heap of scores, which are computed again: scores only grow."""
    order = np.empty(num_samples, np.int64)
    heap = [
        (_score(begins, ends, row_splits[k], row_splits[k + 1], widths, counts), k)
        for k in range(row_splits.size - 1)
    ]
    heapq.heapify(heap)
    taken = 0
    while taken < order.size:
        sample = heapq.heappop(heap)[1]
        first, last = row_splits[sample], row_splits[sample + 1]
        now = (_score(begins, ends, first, last, widths, counts), sample)
        if len(heap) > 0 and now > heap[0]:
            heapq.heappush(heap, now)
            continue
        for run in range(first, last):
            counts[begins[run] : ends[run]] += 1
        order[taken] = sample
        taken += 1
    return order
