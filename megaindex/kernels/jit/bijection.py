"""Keyed bijections in Numba."""

from __future__ import annotations

import numba
import numpy as np

from megaindex._types import I64, U32, U64, IntArray
from megaindex.kernels.reference.bijection import TABLE_BELOW, grid, round_words

_FACTOR = np.uint32(0x85EBCA6B)
_CHUNK = 4096  # indices; the halves between two loops fit the L1 cache


@numba.njit(cache=True, nogil=True, inline="always")
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def _draw_table(key, n):  # type: ignore[no-untyped-def]
    table = np.arange(n)
    for i in range(n - 1, 0, -1):
        word = _mixed(key[1] ^ _mixed(key[0] + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)))
        j = np.int64(word % np.uint64(i + 1))
        table[i], table[j] = table[j], table[i]
    return table


@numba.njit(cache=True, nogil=True, inline="always")
def _hash(half, flip, factor, size):  # type: ignore[no-untyped-def]
    x = np.uint32((half ^ flip) * _FACTOR)
    y = np.uint32((x ^ (x >> np.uint32(15))) * factor)
    return np.uint32((np.uint64(y) * np.uint64(size)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True, inline="always")
def _sum(a, b, size):  # type: ignore[no-untyped-def]
    whole = np.uint32(a + b)
    return min(whole, np.uint32(whole - size))  # if whole < size, the difference wraps


@numba.njit(cache=True, nogil=True)
def _forward(left, right, rounds, rows, columns):  # type: ignore[no-untyped-def]
    """Map all pairs of halves in place, with one loop per round that is compiled to vectors."""
    for r in range(0, len(rounds), 2):
        flip, factor = rounds[r, 0], rounds[r, 1]
        for k in range(left.size):
            left[k] = _sum(left[k], _hash(right[k], flip, factor, rows), rows)
        flip, factor = rounds[r + 1, 0], rounds[r + 1, 1]
        for k in range(left.size):
            right[k] = _sum(right[k], _hash(left[k], flip, factor, columns), columns)


@numba.njit(cache=True, nogil=True)
def _backward(left, right, rounds, rows, columns):  # type: ignore[no-untyped-def]
    for r in range(len(rounds) - 2, -1, -2):
        flip, factor = rounds[r + 1, 0], rounds[r + 1, 1]
        for k in range(left.size):
            hashed = _hash(left[k], flip, factor, columns)
            right[k] = _sum(right[k], np.uint32(columns - hashed), columns)
        flip, factor = rounds[r, 0], rounds[r, 1]
        for k in range(left.size):
            left[k] = _sum(left[k], np.uint32(rows - _hash(right[k], flip, factor, rows)), rows)


@numba.njit(cache=True, nogil=True)
def _map_halves(back, left, right, rounds, rows, columns):  # type: ignore[no-untyped-def]
    if back:
        _backward(left, right, rounds, rows, columns)
    else:
        _forward(left, right, rounds, rows, columns)


@numba.njit(cache=True, nogil=True)
def _map(back, begin, given, rounds, rows, columns, n, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with values, or with ``back`` indices, of ``given`` or, if empty, begin + k."""
    left = np.empty(_CHUNK, np.uint32)
    right = np.empty(_CHUNK, np.uint32)
    one_left = np.empty(1, np.uint32)
    one_right = np.empty(1, np.uint32)
    wide = np.uint64(columns)
    for first in range(0, out.size, _CHUNK):
        count = min(_CHUNK, out.size - first)
        for k in range(count):
            index = np.uint64(given[first + k] if given.size else begin + first + k)
            left[k] = np.uint32(index // wide)
            right[k] = np.uint32(index % wide)
        _map_halves(back, left[:count], right[:count], rounds, rows, columns)
        for k in range(count):
            value = np.uint64(left[k]) * wide + np.uint64(right[k])
            while value >= n:  # cycle walking
                one_left[0] = np.uint32(value // wide)
                one_right[0] = np.uint32(value % wide)
                _map_halves(back, one_left, one_right, rounds, rows, columns)
                value = np.uint64(one_left[0]) * wide + np.uint64(one_right[0])
            out[first + k] = value


def _run(key: U64, n: int, begin: int, given: I64, out: IntArray, back: bool = False) -> None:
    run_network(np.array(round_words(key), np.uint32), n, begin, given, out, back)


def run_network(
    rounds: U32, n: int, begin: int, given: I64, out: IntArray, back: bool = False
) -> None:
    """Map ``given``, or begin, begin + 1, …, by the network of (flip, odd factor) of each round."""
    rows, columns = (np.uint32(size) for size in grid(n))
    _map(back, begin, given, rounds, rows, columns, np.uint64(n), out)


def bijection_apply(key: U64, n: int, indices: IntArray) -> I64:
    given = indices.astype(np.int64)
    if n < TABLE_BELOW:
        values: I64 = _draw_table(key, n)[given]
        return values
    out = np.empty(given.size, np.int64)
    _run(key, n, 0, given, out)
    return out


def bijection_invert(key: U64, n: int, values: IntArray) -> I64:
    given = values.astype(np.int64)
    if n < TABLE_BELOW:
        inverse = np.empty(n, np.int64)
        inverse[_draw_table(key, n)] = np.arange(n)
        indices: I64 = inverse[given]
        return indices
    out = np.empty(given.size, np.int64)
    _run(key, n, 0, given, out, back=True)
    return out


def bijection_range(key: U64, n: int, begin: int, out: IntArray) -> None:
    if n < TABLE_BELOW:
        out[:] = _draw_table(key, n)[begin : begin + out.size]
    else:
        _run(key, n, begin, np.empty(0, np.int64), out)


def bijection_inverse_range(key: U64, n: int, begin: int, out: IntArray) -> None:
    if n < TABLE_BELOW:
        out[:] = np.argsort(_draw_table(key, n))[begin : begin + out.size]
    else:
        _run(key, n, begin, np.empty(0, np.int64), out, back=True)
