"""Keys of rows in Numba; reference/row_keys.py documents the function."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.kernels.jit.receipts import mixed
from megaindex.kernels.reference.row_keys import EXPOSURE, HIGH_CHAIN, LOW_CHAIN, NOTHING

_CHAINS = np.array([HIGH_CHAIN, LOW_CHAIN], np.uint64)
_EXPOSURE = np.uint64(EXPOSURE)


@numba.njit(cache=True, nogil=True, inline="always")
def _after_run(h, content, document, offset, length, lane):  # type: ignore[no-untyped-def]
    h = mixed(h + _CHAINS[lane] + content + np.uint64(document), lane)
    h = mixed(h + _CHAINS[lane] + np.uint64(offset), lane)
    return mixed(h + _CHAINS[lane] + np.uint64(length), lane)


@numba.njit(cache=True, nogil=True)
def row_keys(  # type: ignore[no-untyped-def]
    positions, numbers, source, document, offset, length, row_splits, width, contents, starts,
    passes, samples, sources, exposures, keys, high,
):  # fmt: skip
    for k in range(positions.size):
        first, left = NOTHING, width
        high_word = low_word = np.uint64(0)
        for at in range(row_splits[k], row_splits[k + 1]):
            taken = min(left, length[at])
            if taken < 1:
                continue
            left -= taken
            if first == NOTHING:
                first = source[at]
            run = document[at], offset[at], taken
            high_word = _after_run(high_word, contents[source[at], 0], run[0], run[1], run[2], 0)
            low_word = _after_run(low_word, contents[source[at], 1], run[0], run[1], run[2], 1)
        samples[k] = sources[k] = exposures[k] = NOTHING
        keys[k] = 0
        if first != NOTHING:
            exposure = passes[np.searchsorted(starts, numbers[k], "right") - 1]
            samples[k], sources[k], exposures[k] = positions[k], first, exposure
            keys[k] = np.int64(mixed(low_word + np.uint64(exposure) * _EXPOSURE, 1))
        if high.size:
            high[k] = np.int64(high_word)
