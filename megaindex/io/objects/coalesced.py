"""Several parts of an object by as few requests as pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megaindex.io.facts import Facts
from megaindex.io.objects.reading import MERGE_GAP, fill

_Bytes = npt.NDArray[np.uint8]


def read_all(facts: Facts, ranges: Sequence[tuple[int, int]]) -> list[_Bytes]:
    """The bytes of each (offset, nbytes), read-only, in the order asked; neighbours share memory.

    Raises:
        StorageError: as `megaindex.io.objects.reading.read`.
    """
    parts: list[_Bytes] = [np.empty(0, np.uint8)] * len(ranges)
    for begin, stop, members in _together(ranges):
        block = np.empty(stop - begin, np.uint8)
        fill(facts, begin, block.data)
        block.flags.writeable = False
        for number in members:
            offset, nbytes = ranges[number]
            parts[number] = block[offset - begin : offset - begin + nbytes]
    return parts


def _together(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, list[int]]]:
    """(begin, stop, numbers of the ranges in it) of each stretch to read."""
    begin = stop = 0
    members: list[int] = []
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, nbytes = ranges[number]
        if members and offset > stop + MERGE_GAP:
            yield begin, stop, members
            members = []
        if not members:
            begin = stop = offset
        stop = max(stop, offset + nbytes)
        members.append(number)
    if members:
        yield begin, stop, members
