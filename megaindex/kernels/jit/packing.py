"""Whole documents into samples, in Numba; see reference/packing.py for what it computes."""

from __future__ import annotations

import numba
import numpy as np

from megaindex.kernels.types import I32, I64

__all__ = ["pack_documents"]


@numba.njit(cache=True, nogil=True)
def _pack(lengths, capacity, tokens, begins):  # type: ignore[no-untyped-def]
    samples = 0
    for d in range(lengths.size):
        if samples == begins.size:
            break
        length = np.int64(lengths[d])
        opens = tokens == 0 or length > capacity - tokens
        begins[samples] = d
        samples += opens
        tokens = length if opens else tokens + length
    return samples, tokens


def pack_documents(lengths: I32, capacity: int, tokens: int, begins: I64) -> tuple[int, int]:
    samples, left = _pack(lengths, np.int64(capacity), np.int64(tokens), begins)
    return int(samples), int(left)
