"""Whether the sequences of an .idx lie in its .bin."""

from __future__ import annotations

import numpy as np

from megaindex.kernels.types import I32, I64


def tokens_within(pointers: I64, lengths: I32, item_size: int, nbytes: int) -> int:
    """The tokens of all sequences; -1 where one breaks a rule.

    Each has a length that is not negative, lies within the first ``nbytes`` of the .bin, and begins
    at a multiple of ``item_size``: 1, 2, 4 or 8 bytes. ``pointers`` are in bytes, ``lengths`` in
    items. Of items of 2 bytes, pointers 0 6 and lengths 3 1 are 4 tokens within 8 bytes.
    """
    begins, sizes = pointers.astype(np.int64), lengths.astype(np.int64)
    if begins.size == 0:
        return 0
    # a pointer beyond the .bin is caught before it is added to: the sum cannot wrap unseen
    if sizes.min() < 0 or begins.min() < 0 or begins.max() > nbytes:
        return -1
    if (begins + sizes * item_size).max() > nbytes or (begins % item_size).any():
        return -1
    return int(sizes.sum())
