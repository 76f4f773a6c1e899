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
        InvalidArgument: a sequence of a request does not begin where the one before it ends, or
            the next does not begin where it ends.
    """
    runs: list[tuple[int, int, int]] = []
    splits = [0]
    start = pointers[first:stop]

    def refusal(sequence: int) -> InvalidArgument:
        low = int(pointers[sequence])
        return InvalidArgument(
            f"sequence {sequence} fills bytes {low} to {low + int(lengths[sequence]) * item_size} "
            "of the .bin, and the next one does not begin there"
        )

    def check_seam(sequence: int) -> None:
        end = int(pointers[sequence]) + int(lengths[sequence]) * item_size
        if sequence + 1 < stop and int(pointers[sequence + 1]) != end:
            raise refusal(sequence)

    for begin, end in zip((begins * item_size).tolist(), (ends * item_size).tolist(), strict=True):
        sequence = first + max(0, int(np.searchsorted(start, begin, side="right")) - 1)
        at = begin
        if sequence > first:
            check_seam(sequence - 1)
        while at < end:
            low = int(pointers[sequence])
            high = low + int(lengths[sequence]) * item_size
            fits = low <= at and (at - low) % item_size == 0
            if fits and at < min(high, end):
                run = (at - low) // item_size, (min(high, end) - at) // item_size
                runs.append((sequence, *run))
                at = min(high, end)
            check_seam(sequence)
            if at < end:
                if not fits or sequence + 1 == stop:
                    raise refusal(sequence)
                sequence += 1
        splits.append(len(runs))
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return columns[0].copy(), columns[1].copy(), columns[2].copy(), np.array(splits, np.int64)
