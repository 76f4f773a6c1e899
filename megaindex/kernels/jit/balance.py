"""Squared lengths, and the assignment of samples by their work, in Numba.

reference/balance.py documents the functions.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def squared_lengths(length, row_splits, width, out):  # type: ignore[no-untyped-def]
    for k in range(out.size):
        room = np.int64(width)
        total = np.int64(0)
        for at in range(row_splits[k], row_splits[k + 1]):
            inputs = min(length[at], room)
            total += inputs * inputs
            room -= inputs
        out[k] = total


@numba.njit(cache=True, nogil=True)
def _assign(samples, work, loads, size, out):  # type: ignore[no-untyped-def]
    ranks, batches = loads.size, out.size // size
    each, longer = samples.size // batches, samples.size % batches
    held = np.empty(ranks, np.int64)
    taken = 0
    for first in range(0, batches, ranks):
        larger = min(longer, ranks)
        longer -= larger
        held[:] = 0
        heap = [(loads[rank], rank) for rank in range(ranks)]
        heapq.heapify(heap)
        for sample in samples[taken : taken + each * ranks + larger]:
            _, rank = heapq.heappop(heap)
            while held[rank] == each and larger == 0:  # full since other ranks took one more
                _, rank = heapq.heappop(heap)
            if held[rank] == each:
                larger -= 1
            out[(first + rank) * size + held[rank]] = sample
            held[rank] += 1
            loads[rank] += work[sample]
            if held[rank] <= each:
                heapq.heappush(heap, (loads[rank], rank))
            taken += 1


@numba.njit(cache=True, nogil=True)
def balance_rows(work, served, rows_served, ranks, micro_batch_size, out):  # type: ignore[no-untyped-def]
    order = np.argsort(-work, kind="mergesort")
    loads = np.zeros(ranks, np.int64)
    if rows_served > 0:
        before = np.empty(rows_served, np.int64)
        _assign(order[:served], work, loads, micro_batch_size, before)
    out[:] = -1
    if out.size > 0:
        _assign(order[served:], work, loads, micro_batch_size, out)
