"""Keys of the computed orders: what an order depends on, and nothing else."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
import xxhash

from megaindex.kernels.types import U64


@lru_cache(maxsize=64)
def order_key(
    seed: int, block: int, source_name: str, purpose: Literal["documents", "samples"]
) -> U64:
    """uint64[2]: XXH3-128 of the seed, the block of epochs, what is permuted, and the source.

    The name comes last and the rest holds no slash, so different requests never share a text.
    """
    key = key_of(f"megaindex/{seed}/{block}/{purpose}/{source_name}")
    key.flags.writeable = False  # all callers share it
    return key


def key_of(text: str) -> U64:
    """uint64[2]: XXH3-128 of the text, low word first."""
    number = xxhash.xxh3_128_intdigest(text.encode())
    return np.array([number & (2**64 - 1), number >> 64], np.uint64)
