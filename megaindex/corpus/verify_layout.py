"""Where the sequences of a pair lie in its .bin: gaps, overlaps, and sequences stored once for two.

The pointers of an .idx may come in any order. They are looked at in the order of the .bin, a range
of it at a time, so memory does not grow with the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megaindex.corpus.findings import Collector
from megaindex.format.faults import Fault
from megaindex.format.pair import IndexArrays
from megaindex.format.validate import sequence_chunks, sequence_masks

_I64 = npt.NDArray[np.int64]
_RANGES = 1 << 16
_AT_ONCE = 1 << 22  # sequences that are sorted together; a range that holds more stays whole


def check_layout(
    arrays: IndexArrays, itemsize: int, bin_nbytes: int, bin_path: str, found: Collector
) -> None:
    """Report sequences that share bytes, and bytes between sequences that none holds."""
    reach = 0  # the furthest byte so far
    last = (-1, -1)  # the sequence in front
    for numbers, begins, ends in _in_file_order(arrays, itemsize, bin_nbytes):
        reaches = np.maximum(np.maximum.accumulate(ends), reach)
        before = np.concatenate(([reach], reaches[:-1]))
        same = np.concatenate(([(begins[0], ends[0]) == last], _equal_to_previous(begins, ends)))
        for mask, describe in (
            (same, _duplicate),
            ((begins < before) & ~same, _overlap),
            (begins > before, _gap),
        ):
            if mask.any():
                i = int(mask.argmax())
                fault = describe(int(numbers[i]), int(begins[i]), int(before[i]))
                found.add(bin_path, fault, severity="warning", count=int(mask.sum()))
        reach, last = int(reaches[-1]), (int(begins[-1]), int(ends[-1]))
    if reach < bin_nbytes:
        found.add(bin_path, _gap(-1, bin_nbytes, reach), severity="warning")


def _equal_to_previous(begins: _I64, ends: _I64) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = (begins[1:] == begins[:-1]) & (ends[1:] == ends[:-1])
    return equal


def _in_file_order(
    arrays: IndexArrays, itemsize: int, bin_nbytes: int
) -> Iterator[tuple[_I64, _I64, _I64]]:
    """(number, begin, end) of sound sequences that hold tokens, rising by begin."""
    width = bin_nbytes // _RANGES + 1
    held = np.zeros(_RANGES, dtype=np.int64)
    for _, begins, _ in _sound(arrays, itemsize, bin_nbytes):
        held += np.bincount(begins // width, minlength=_RANGES)
    for first, stop in _groups(held):
        parts = []
        for numbers, begins, ends in _sound(arrays, itemsize, bin_nbytes):
            inside = (first * width <= begins) & (begins < stop * width)
            if inside.any():
                parts.append((numbers[inside], begins[inside], ends[inside]))
        numbers, begins, ends = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((ends, begins))
        yield numbers[order], begins[order], ends[order]


def _groups(held: _I64) -> Iterator[tuple[int, int]]:
    """Ranges of the .bin, first to stop, that together hold some sequences but not too many.

    With room for 10: sequences 4, 0, 5, 9, 30 in five ranges make groups 0:3, 3:4 and 4:5.
    """
    first = 0
    while first < len(held):
        total = np.cumsum(held[first:])
        stop = first + max(1, int(np.searchsorted(total, _AT_ONCE, side="right")))
        if total[stop - first - 1]:
            yield first, stop
        first = stop


def _sound(
    arrays: IndexArrays, itemsize: int, bin_nbytes: int
) -> Iterator[tuple[_I64, _I64, _I64]]:
    for start, sizes, begins in sequence_chunks(arrays.lengths, arrays.pointers):
        bad = np.logical_or.reduce(sequence_masks(sizes, begins, itemsize, bin_nbytes))
        kept = np.flatnonzero(~bad & (sizes > 0))
        yield kept + start, begins[kept], begins[kept] + sizes[kept] * itemsize


def _duplicate(number: int, begin: int, before: int) -> Fault:
    return Fault(
        rule="duplicate-sequence",
        where=f"sequence {number}",
        found=f"bytes of another sequence, from {begin} on",
        expected=f"bytes from {before} on",
        text="several sequences are the same bytes",
        remedy="training sees them more than once; rebuild the .idx if that is not meant",
    )


def _overlap(number: int, begin: int, before: int) -> Fault:
    return Fault(
        rule="overlap",
        where=f"sequence {number}",
        found=f"begins at byte {begin}, inside another",
        expected=f"begins at byte {before} or later",
        text="sequences share bytes",
        remedy="lengths or pointers are wrong unless this is meant; restore the .idx",
    )


def _gap(_number: int, begin: int, before: int) -> Fault:
    return Fault(
        rule="unused-bytes",
        where=f"byte {before}",
        found=f"bytes {before} to {begin} in no sequence",
        expected="none",
        text="bytes of the .bin are in no sequence",
        remedy="if tokens are missing, restore the .idx; megaindex merge writes a pair without "
        "gaps",
    )
