"""Stretches of a .bin, as runs within the sequences that fill it one after another."""

from __future__ import annotations

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, I64


def window_spans(
    pointers: I64, lengths: I32, item_size: int, first: int, stop: int, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]:
    """Where tokens begins[k] ... ends[k] - 1 of the .bin lie: (sequence, offset, length, splits).

    All int64; the runs of request k are ``splits[k]:splits[k + 1]``, none is empty. Sequences
    ``first`` ... ``stop - 1`` have ``lengths`` items of ``item_size`` bytes and begin at byte
    ``pointers``; each request holds at least one token, and 0 <= begin.

    Raises:
        InvalidArgument: the sequences of a request do not follow each other.
    """
    runs: list[tuple[int, int, int]] = []
    splits = [0]
    start = pointers[first:stop]
    for begin, end in zip((begins * item_size).tolist(), (ends * item_size).tolist(), strict=True):
        sequence = first + max(0, int(np.searchsorted(start, begin, side="right")) - 1)
        at = begin
        while at < end:
            low = int(pointers[sequence])
            high = low + int(lengths[sequence]) * item_size
            fits = low <= at and (at - low) % item_size == 0
            if fits and at < min(high, end):
                run = (at - low) // item_size, (min(high, end) - at) // item_size
                runs.append((sequence, *run))
                at = min(high, end)
            if at < end:
                last = sequence + 1 == stop
                if not fits or last or int(pointers[sequence + 1]) != high:
                    raise InvalidArgument(
                        f"sequence {sequence} fills bytes {low} to {high} of the .bin, and the "
                        "next one does not begin there"
                    )
                sequence += 1
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)
