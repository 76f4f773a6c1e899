"""NumPy's legacy random stream in Numba; reference/shuffle.py documents the functions."""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I32, U32, IntArray
from megaindex.kernels.reference.shuffle import STATE_WORDS

_WORDS = STATE_WORDS - 1
_SHIFT = 397
_CHUNK = 4096


@numba.njit(cache=True, nogil=True, inline="always")
def _twist(upper, lower, far):  # type: ignore[no-untyped-def]
    y = (upper & np.uint32(0x80000000)) | (lower & np.uint32(0x7FFFFFFF))
    odd = np.uint32(0) - (y & np.uint32(1))
    return np.uint32(far ^ (y >> np.uint32(1)) ^ (odd & np.uint32(0x9908B0DF)))


@numba.njit(cache=True, nogil=True)
def _refill(key):  # type: ignore[no-untyped-def]
    for i in range(_WORDS - _SHIFT):
        key[i] = _twist(key[i], key[i + 1], key[i + _SHIFT])
    for i in range(_WORDS - _SHIFT, _WORDS - 1):
        key[i] = _twist(key[i], key[i + 1], key[i + _SHIFT - _WORDS])
    key[_WORDS - 1] = _twist(key[_WORDS - 1], key[0], key[_SHIFT - 1])
    key[_WORDS] = 0


@numba.njit(cache=True, nogil=True)
def _temper(key, words):  # type: ignore[no-untyped-def]
    for i in range(_WORDS):
        y = key[i]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        words[i] = y ^ (y >> np.uint32(18))


@numba.njit(cache=True, nogil=True)
def _next32(key, words):  # type: ignore[no-untyped-def]
    if key[_WORDS] == _WORDS:
        _refill(key)
        _temper(key, words)
    word = np.uint64(words[key[_WORDS]])
    key[_WORDS] += np.uint32(1)
    return word


@numba.njit(cache=True, nogil=True)
def _mask_for(step):  # type: ignore[no-untyped-def]
    mask = np.uint64(step)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    return mask


@numba.njit(cache=True, nogil=True)
def _draw_narrow(key, words, first, positions, count):  # type: ignore[no-untyped-def]
    """Draw for steps below 2**32; a rejected word is overwritten by the next one, not skipped."""
    done = np.int64(0)
    while done < count:
        step = first - done
        mask = np.int64(_mask_for(step))
        stop = min(count, done + step - (mask >> 1))
        while done < stop:
            if key[_WORDS] == _WORDS:
                _refill(key)
                _temper(key, words)
            at = np.int64(key[_WORDS])
            end = at + min(_WORDS - at, stop - done)
            for i in range(at, end):
                value = np.int64(words[i]) & mask
                positions[done] = value
                done += np.int64(value <= first - done)
            key[_WORDS] = end


@numba.njit(cache=True, nogil=True)
def _draw_wide(key, words, first, positions, count):  # type: ignore[no-untyped-def]
    for k in range(count):
        step = np.uint64(first - k)
        mask = _mask_for(step)
        while True:
            value = _next32(key, words)
            if step > np.uint64(0xFFFFFFFF):
                value = (value << np.uint64(32)) | _next32(key, words)
            value &= mask
            if value <= step:
                break
        positions[k] = np.int64(value)


@numba.njit(cache=True, nogil=True)
def _draw(key, words, first, positions, count):  # type: ignore[no-untyped-def]
    if first <= 0xFFFFFFFF:
        _draw_narrow(key, words, first, positions, count)
    else:
        _draw_wide(key, words, first, positions, count)


@numba.njit(cache=True, nogil=True)
def _shuffle(key, x):  # type: ignore[no-untyped-def]
    words = np.empty(_WORDS, np.uint32)
    _temper(key, words)
    positions = np.empty(_CHUNK + 1, np.int64)
    touched = np.int64(0)
    first = x.size - 1
    while first > 0:
        count = min(_CHUNK, first)
        _draw(key, words, first, positions, count)
        # reads all cells of a chunk before swapping any, so that their cache misses overlap
        for k in range(count):
            touched += np.int64(x[positions[k]])
        for k in range(count):
            i, j = first - k, positions[k]
            x[i], x[j] = x[j], x[i]
        first -= count
    return touched


def shuffle(state: U32, array: IntArray, num_threads: int = 1) -> None:
    _shuffle(state, array)


def shuffled_range(state: U32, first: int, out: IntArray, num_threads: int = 1) -> None:
    out[:] = np.arange(first, first + out.size, dtype=out.dtype)
    _shuffle(state, out)


def shuffled_documents(
    state: U32,
    documents: I32 | None,
    first_document: int,
    num_epochs: int,
    out: I32,
    num_threads: int = 1,
) -> None:
    count = out.size // num_epochs
    rows = out.reshape(num_epochs, count)
    rows[:] = (
        np.arange(first_document, first_document + count, dtype=np.int32)
        if documents is None
        else documents
    )
    _shuffle(state, out)
