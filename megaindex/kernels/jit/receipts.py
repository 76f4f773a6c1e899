"""Receipts in Numba; reference/receipts.py documents the function."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.kernels.reference.receipts import HIGH_LANE, HIGH_MIX, LOW_LANE, LOW_MIX

_LANES = np.array([HIGH_LANE, LOW_LANE], np.uint64)
_MIXES = np.array([HIGH_MIX, LOW_MIX], np.uint64)


@numba.njit(cache=True, nogil=True, inline="always")
def _after_run(h, key, document, offset, length, lane):  # type: ignore[no-untyped-def]
    factors = _LANES[lane]
    h = (h ^ (h >> np.uint64(32))) * factors[0] + key + np.uint64(document) * factors[1]
    return h + np.uint64(offset) * factors[2] + np.uint64(length) * factors[3]


@numba.njit(cache=True, nogil=True, inline="always")
def mixed(h, lane):  # type: ignore[no-untyped-def]
    mix = _MIXES[lane]
    h = (h ^ (h >> mix[0])) * mix[1]
    h = (h ^ (h >> mix[2])) * mix[3]
    return h ^ (h >> mix[4])


@numba.njit(cache=True, nogil=True)
def receipt_add(  # type: ignore[no-untyped-def]
    positions, source, document, offset, length, row_splits, keys, blocks, sums
):
    for k in range(positions.size):
        high = low = np.uint64(positions[k])
        for at in range(row_splits[k], row_splits[k + 1]):
            run = document[at], offset[at], length[at]
            high = _after_run(high, keys[source[at], 0], run[0], run[1], run[2], 0)
            low = _after_run(low, keys[source[at], 1], run[0], run[1], run[2], 1)
        high, low = mixed(high, 0), mixed(low, 1)
        total = sums[blocks[k], 1] + low
        sums[blocks[k], 0] += high + np.uint64(total < low)  # the carry
        sums[blocks[k], 1] = total
