"""Rules for every entry of an .idx, checked in chunks: constant memory at any size.

Each rule is here once: the functions that raise stop at the first fault, `megaindex verify` counts
and describes all of them by the same masks and faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.format.header import RESTORE, DtypeTable, Fault
from megaindex.kernels import active, load

_CHUNK = 1 << 17  # a chunk and its temporaries stay in a core's cache
_FEW = 1 << 12  # sequences for which no compiled backend need be loaded
_Mask = npt.NDArray[np.bool_]
_I64 = npt.NDArray[np.int64]


def check_sequences(
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    *,
    itemsize: int,
    bin_size: int,
    idx_path: str,
    first: int = 0,
) -> int:
    """Check that every sequence lies inside the .bin, on a token boundary; return their tokens.

    Sequences may lie anywhere, in any order, with gaps: the frameworks follow the pointers too.

    Args:
        lengths: int32[n], in tokens.
        pointers: int64[n], in bytes.
        itemsize: bytes per token.
        bin_size: bytes in the .bin.
        first: number of the sequence that lengths[0] belongs to, for messages.

    Raises:
        FormatError: names the first sequence that breaks a rule.
    """
    if len(lengths) == 1:  # of every corpus that is opened: NumPy would take longer
        size, begin = int(lengths[0]), int(pointers[0])
        if size >= 0 and 0 <= begin <= bin_size - size * itemsize and begin % itemsize == 0:
            return size
    kernels = active() if len(lengths) > _FEW else load("reference")
    total = 0
    for start in range(0, len(lengths), _CHUNK):
        part = slice(start, start + _CHUNK)
        tokens = kernels.tokens_within(pointers[part], lengths[part], itemsize, bin_size)
        if tokens < 0:
            sizes, begins = lengths[part].astype(np.int64), pointers[part].astype(np.int64)
            masks = sequence_masks(sizes, begins, itemsize, bin_size)
            i = min(int(mask.argmax()) for mask in masks if mask.any())
            number, size, begin = first + start + i, int(sizes[i]), int(begins[i])
            raise sequence_fault(number, size, begin, itemsize, bin_size).error(idx_path)
        total += tokens
    return total


def sequence_chunks(
    lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64]
) -> Iterator[tuple[int, _I64, _I64]]:
    """(number of the first sequence, lengths, pointers) as int64 copies of a chunk at a time."""
    for start in range(0, len(lengths), _CHUNK):
        # Copies, because the mapped arrays are unaligned and NumPy is slow on those.
        stop = start + _CHUNK
        yield start, lengths[start:stop].astype(np.int64), pointers[start:stop].astype(np.int64)


def sequence_masks(sizes: _I64, begins: _I64, itemsize: int, bin_size: int) -> tuple[_Mask, ...]:
    """Return masks of sequences of negative length, outside the .bin, beginning inside a token."""
    # A pointer beyond the .bin is caught before it is added to: the sum cannot wrap unseen.
    outside = (begins < 0) | (begins > bin_size)
    outside |= begins + sizes * itemsize > bin_size
    # sizes of token types are powers of two
    return sizes < 0, outside, begins & (itemsize - 1) != 0


def sequence_fault(number: int, size: int, begin: int, itemsize: int, bin_size: int) -> Fault:
    """Return the first of those three rules that a sequence breaks; it does break one."""
    where = f"sequence {number}"
    if size < 0:
        return Fault(
            rule="length",
            where=where,
            found=str(size),
            expected="0 or more",
            text=f"{where} has length {size}; lengths are never negative",
        )
    end = begin + size * itemsize
    if begin < 0 or end > bin_size:
        return Fault(
            rule="outside-bin",
            where=where,
            found=f"bytes {begin} to {end}",
            expected=f"within 0 to {bin_size}",
            text=f"{where} takes bytes {begin} to {begin} + {size}·{itemsize} = {end} of the "
            f".bin, which has {bin_size}; the .bin is cut short or belongs to another .idx",
        )
    return Fault(
        rule="inside-token",
        where=where,
        found=f"begins at byte {begin}",
        expected=f"a multiple of {itemsize}",
        text=f"{where} begins at byte {begin} of the .bin, inside a token: tokens take "
        f"{itemsize} bytes",
    )


def check_bound_ends(
    bounds: npt.NDArray[np.int64], num_sequences: int, dialect: DtypeTable, idx_path: str
) -> None:
    """Check in O(1) that the first document bound is 0 and the last the number of sequences."""
    fault = bound_end_fault(bounds, num_sequences, dialect)
    if fault is not None:
        raise fault.error(idx_path)


def bound_end_fault(
    bounds: npt.NDArray[np.int64], num_sequences: int, dialect: DtypeTable
) -> Fault | None:
    """Return a fault unless the first document bound is 0 and the last counts the sequences."""
    if len(bounds) == 0:
        return Fault(
            rule="bound-first",
            where="document bound 0",
            found="none",
            expected="0",
            text="header promises 0 document bounds, and there is always a first, 0",
        )
    first, last = int(bounds[0]), int(bounds[-1])
    if first != 0:
        return Fault(
            rule="bound-first",
            where="document bound 0",
            found=str(first),
            expected="0",
            text=f"document bound 0 is {first} and must be 0",
        )
    stops_short = 0 <= last < num_sequences and dialect.bounds_may_stop_short
    if last == num_sequences or stops_short:
        return None
    return Fault(
        rule="bound-last",
        where=f"document bound {len(bounds) - 1}",
        found=str(last),
        expected=str(num_sequences),
        text=f"the last document bound is {last} and must be the number of sequences, "
        f"{num_sequences}",
        remedy=f"open the file with dialect='neox' if GPT-NeoX's tools merged it, else {RESTORE}",
    )


def check_bounds(bounds: npt.NDArray[np.int64], num_sequences: int, idx_path: str) -> None:
    """Check that document bounds never decrease and stay within 0..num_sequences."""
    for _, fault in bound_faults(bounds, num_sequences):
        raise fault.error(idx_path)


def bound_faults(bounds: npt.NDArray[np.int64], num_sequences: int) -> Iterator[tuple[int, Fault]]:
    """(how many, the first) of the bounds that decrease or pass num_sequences, chunk by chunk."""
    previous = 0
    for start, chunk in _aligned_chunks(bounds):
        if chunk[0] >= previous and chunk[-1] <= num_sequences and _is_sorted(chunk):
            previous = int(chunk[-1])
            continue
        bad = np.empty(len(chunk), dtype=bool)
        bad[0] = chunk[0] < previous
        np.less(chunk[1:], chunk[:-1], out=bad[1:])
        bad |= chunk > num_sequences
        if bad.any():
            i = int(bad.argmax())
            before = int(chunk[i - 1]) if i else previous
            yield int(bad.sum()), _bound_fault(start + i, int(chunk[i]), before, num_sequences)
        previous = int(chunk[-1])


def _is_sorted(chunk: npt.NDArray[np.int64]) -> bool:
    return bool((chunk[1:] >= chunk[:-1]).all())


def _bound_fault(number: int, bound: int, before: int, num_sequences: int) -> Fault:
    where = f"document bound {number}"
    return Fault(
        rule="bound-order",
        where=where,
        found=str(bound),
        expected=f"{before} to {num_sequences}",
        text=f"{where} is {bound}, after {before}; bounds never decrease nor pass the number of "
        f"sequences, {num_sequences}",
    )


def _aligned_chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK].copy()
