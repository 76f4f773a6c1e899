"""Keyed bijections of [0, n): shuffles of which any entry can be computed by itself.

A key is uint64[2]. Below n = 4096 the bijection is a Fisher-Yates table, since a network on so few
entries is not uniform enough. From there on it is a Feistel network: index = left * columns + right
in a grid of ceil(sqrt(n)) rows, and in each round one half has a keyed hash of the other added,
modulo its size. Each round can be undone, so the network is a bijection of the grid. At most
``rows - 1`` cells of the grid lie beyond n; an index that is mapped to one is mapped again, until
it lies in [0, n) (cycle walking).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from megaindex._types import I64, U64, IntArray

TABLE_BELOW = 4096
ROUNDS = 8
_WORD = 2**64 - 1
_HALF_WORD = 2**32 - 1
_FACTOR = 0x85EBCA6B


def bijection_apply(key: U64, n: int, indices: IntArray) -> I64:
    """Return the values of indices, int64; ``indices`` are int64 or uint64 in [0, n)."""
    if n < TABLE_BELOW:
        table = _table(key, n)
        values = [table[i] for i in indices.tolist()]
    else:
        network = Network(round_words(key), n)
        values = [network.cycle(i, network.forward) for i in indices.tolist()]
    return np.array(values, np.int64)


def bijection_invert(key: U64, n: int, values: IntArray) -> I64:
    """Return the indices of values, int64: the inverse of `bijection_apply`."""
    if n < TABLE_BELOW:
        table = _table(key, n)
        indices = [table.index(value) for value in values.tolist()]
    else:
        network = Network(round_words(key), n)
        indices = [network.cycle(value, network.backward) for value in values.tolist()]
    return np.array(indices, np.int64)


def bijection_range(key: U64, n: int, begin: int, out: IntArray) -> None:
    """Fill ``out``, int32 or int64, with the values of the indices begin, begin + 1, …"""
    out[:] = bijection_apply(key, n, np.arange(begin, begin + out.size))


def bijection_inverse_range(key: U64, n: int, begin: int, out: IntArray) -> None:
    """Fill ``out``, int32 or int64, with the indices of the values begin, begin + 1, …"""
    out[:] = bijection_invert(key, n, np.arange(begin, begin + out.size))


def key_word(key: U64, i: int) -> int:
    """Return word ``i`` of a key's stream: SplitMix64 of one half, mixed with the other."""
    low, high = (int(word) for word in key)
    return _mixed(high ^ _mixed((low + (i + 1) * 0x9E3779B97F4A7C15) & _WORD))


def round_words(key: U64) -> list[tuple[int, int]]:
    """Return (flip, odd factor) of each round, 32 bits each."""
    words = [key_word(key, r) for r in range(ROUNDS)]
    return [(word & _HALF_WORD, word >> 32 | 1) for word in words]


def grid(n: int) -> tuple[int, int]:
    """Return (rows, columns) of the smallest near-square grid of at least ``n`` cells."""
    rows = math.isqrt(n - 1) + 1 if n else 1
    return rows, -(-n // rows)


def _mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _table(key: U64, n: int) -> list[int]:
    table = list(range(n))
    for i in range(n - 1, 0, -1):
        j = key_word(key, i) % (i + 1)
        table[i], table[j] = table[j], table[i]
    return table


class Network:
    """Feistel network on the grid of ``n`` cells, with (flip, odd factor) of each round."""

    def __init__(self, rounds: list[tuple[int, int]], n: int) -> None:
        self._n = n
        self._rows, self._columns = grid(n)
        self._rounds = rounds

    def forward(self, index: int) -> int:
        left, right = divmod(index, self._columns)
        for r in range(0, ROUNDS, 2):
            left = (left + self._hash(r, right, self._rows)) % self._rows
            right = (right + self._hash(r + 1, left, self._columns)) % self._columns
        return left * self._columns + right

    def backward(self, value: int) -> int:
        left, right = divmod(value, self._columns)
        for r in range(ROUNDS - 2, -1, -2):
            right = (right - self._hash(r + 1, left, self._columns)) % self._columns
            left = (left - self._hash(r, right, self._rows)) % self._rows
        return left * self._columns + right

    def cycle(self, x: int, step: Callable[[int], int]) -> int:
        x = step(x)
        while x >= self._n:
            x = step(x)
        return x

    def _hash(self, r: int, half: int, size: int) -> int:
        flip, factor = self._rounds[r]
        x = (half ^ flip) * _FACTOR & _HALF_WORD
        x = (x ^ x >> 15) * factor & _HALF_WORD
        return x * size >> 32
