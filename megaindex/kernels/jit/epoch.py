"""Passes over permuted documents in Numba; see reference/epoch.py for what they compute."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.kernels.jit.bijection import bijection_apply, bijection_range
from megaindex.kernels.types import I32, I64, U64

_BATCH = 1 << 18  # positions, rounded down to whole strides


@numba.njit(cache=True, nogil=True)
def _sum_strides(documents, lengths, stride, out):  # type: ignore[no-untyped-def]
    """out[j + 1] becomes out[0] plus the tokens of strides 0 ... j."""
    total = out[0]
    for k in range(documents.size):
        total += lengths[documents[k]]
        if (k + 1) % stride == 0:
            out[(k + 1) // stride] = total
    out[-1] = total


def epoch_starts(
    key: U64, lengths: I32, copies: int, stride: int, out: I64, num_threads: int = 1
) -> None:
    size = copies * lengths.size
    strides = max(1, _BATCH // stride)
    out[0] = 0
    for row in range(0, out.size - 1, strides):
        begin = row * stride
        documents = np.empty(min(strides * stride, size - begin), np.int64)
        bijection_range(key, size, begin, documents)
        if copies > 1:
            documents %= lengths.size
        _sum_strides(documents, lengths, stride, out[row : row + strides + 1])


@numba.njit(cache=True, nogil=True)
def _find(documents, first, stop, lengths, start, begins, ends, runs, splits):  # type: ignore[no-untyped-def]
    """The runs of every request, as many as there is room for, and how many there are.

    documents[first[k]:stop[k]] are those that request k may need.
    """
    found = 0
    for k in range(begins.size):
        at = start[k]
        for p in range(first[k], stop[k]):
            end = at + lengths[documents[p]]
            low, high = max(at, begins[k]), min(end, ends[k])
            if low < high:
                if found < runs.shape[1]:
                    runs[0, found] = documents[p]
                    runs[1, found] = low - at
                    runs[2, found] = high - low
                found += 1
            at = end
            if at >= ends[k]:
                break
        splits[k + 1] = found
    return found


def _documents(key: U64, size: int, low: I64, high: I64) -> tuple[I64, I64]:
    """Entries of the bijection at positions low[k] ... high[k] - 1, and where those of k begin.

    Stretches side by side share their documents; scattered ones have their own.
    """
    begin, end = int(low.min(initial=size)), int(high.max(initial=0))
    if end - begin <= (high - low).sum():
        documents = np.empty(max(0, end - begin), np.int64)
        bijection_range(key, size, begin, documents)
        return documents, low - begin
    first = np.cumsum(high - low) - (high - low)
    positions = np.arange((high - low).sum()) + np.repeat(low - first, high - low)
    return bijection_apply(key, size, positions), first


def epoch_spans(
    key: U64, lengths: I32, copies: int, stride: int, starts: I64, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    size = copies * lengths.size
    row = np.searchsorted(starts, begins, side="right") - 1
    last = np.searchsorted(starts, ends, side="left")  # a request ends before this stride
    low, high = row * stride, np.minimum(last * stride, size)
    documents, first = _documents(key, size, low, high)
    documents %= lengths.size
    given = (documents, first, first + (high - low), lengths, starts[row], begins, ends)
    splits = np.zeros(begins.size + 1, np.int64)
    runs = np.empty((3, 2 * begins.size + 16), np.int64)
    found = int(_find(*given, runs, splits))
    if found > runs.shape[1]:
        runs = np.empty((3, found), np.int64)
        _find(*given, runs, splits)
    return runs[0, :found].copy(), runs[1, :found].copy(), runs[2, :found].copy(), splits
