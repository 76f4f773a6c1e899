"""Stretches of a .bin in Numba; see reference/windows.py for what it computes."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, I64


@numba.njit(cache=True, nogil=True)
def _sequence_at(pointers, first, stop, byte):  # type: ignore[no-untyped-def]
    """The last sequence that begins at or before a byte, or the first."""
    low, high = first, stop
    while high - low > 1:
        middle = (low + high) >> 1
        if pointers[middle] <= byte:
            low = middle
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def _meets_next(pointers, lengths, size, stop, sequence):  # type: ignore[no-untyped-def]
    """Whether a sequence ends where the next one begins, or is the last."""
    end = pointers[sequence] + lengths[sequence] * size
    return sequence + 1 == stop or pointers[sequence + 1] == end


@numba.njit(cache=True, nogil=True)
def _find(pointers, lengths, size, first, stop, begins, ends, runs, splits):  # type: ignore[no-untyped-def]
    """Fills splits, and runs where there is room for them; the first damaged sequence, or -1."""
    found = 0
    for k in range(begins.size):
        at, end = begins[k] * size, ends[k] * size
        sequence = _sequence_at(pointers, first, stop, at)
        if sequence > first and not _meets_next(pointers, lengths, size, stop, sequence - 1):
            return sequence - 1
        while at < end:
            low = pointers[sequence]
            high = low + lengths[sequence] * size
            to = min(high, end)
            fits = low <= at and (at - low) % size == 0
            if fits and at < to:
                if found < runs.shape[1]:
                    runs[0, found] = sequence
                    runs[1, found] = (at - low) // size
                    runs[2, found] = (to - at) // size
                found += 1
                at = to
            if not _meets_next(pointers, lengths, size, stop, sequence):
                return sequence
            if at < end:
                if not fits or sequence + 1 == stop:
                    return sequence
                sequence += 1
        splits[k + 1] = found
    return -1


def window_spans(
    pointers: I64, lengths: I32, item_size: int, first: int, stop: int, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    given = (pointers, lengths, item_size, first, stop, begins, ends)
    splits = np.zeros(begins.size + 1, np.int64)
    runs = np.empty((3, 2 * begins.size + 16), np.int64)
    damaged = int(_find(*given, runs, splits))
    if damaged >= 0:
        low = int(pointers[damaged])
        raise InvalidArgument(
            f"sequence {damaged} fills bytes {low} to {low + int(lengths[damaged]) * item_size} of "
            "the .bin, and the next one does not begin there"
        )
    if splits[-1] > runs.shape[1]:
        runs = np.empty((3, int(splits[-1])), np.int64)
        _find(*given, runs, splits)
    found = int(splits[-1])
    return runs[0, :found], runs[1, :found], runs[2, :found], splits
