"""Rules for the entries of an .idx, checked in chunks, in constant memory.

The functions that raise stop at the first fault; `megaindex verify` counts and describes all faults
by the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megaindex.format.header import RESTORE, DtypeTable, Fault
from megaindex.kernels import active, load

_CHUNK = 1 << 17  # a chunk and its temporaries fit the cache of a core
_FEW = 1 << 12  # sequences for which loading a compiled backend takes longer than the check
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

    Sequences may lie in any order, with gaps and overlaps: the frameworks follow the pointers.

    Args:
        lengths: int32[n], in tokens.
        pointers: int64[n], in bytes.
        itemsize: bytes per token.
        bin_size: bytes in the .bin.
        idx_path: for messages.
        first: number of sequence 0, for messages.

    Raises:
        FormatError: a sequence breaks a rule; the message names the first.
    """
    if len(lengths) == 1:  # at each opening of a dataset, where NumPy would take longer
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
    """Yield (number of the first sequence, lengths, pointers) of each chunk, as int64 copies."""
    for start in range(0, len(lengths), _CHUNK):
        # Copies, because NumPy is slow on the unaligned mapped arrays.
        stop = start + _CHUNK
        yield start, lengths[start:stop].astype(np.int64), pointers[start:stop].astype(np.int64)


def sequence_masks(sizes: _I64, begins: _I64, itemsize: int, bin_size: int) -> tuple[_Mask, ...]:
    """Return masks of sequences of negative length, outside the .bin, beginning inside a token."""
    # The sum may wrap only for a pointer beyond the .bin, which is masked before.
    outside = (begins < 0) | (begins > bin_size)
    outside |= begins + sizes * itemsize > bin_size
    return sizes < 0, outside, begins & (itemsize - 1) != 0  # itemsize is a power of two


def sequence_fault(number: int, size: int, begin: int, itemsize: int, bin_size: int) -> Fault:
    """Return the first of these three faults, one of which the sequence has."""
    where = f"sequence {number}"
    if size < 0:
        return Fault(
            rule="length",
            where=where,
            found=str(size),
            expected="0 or more",
            text=f"{where} must have a length of at least 0, got {size}",
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
        text=f"{where} begins at byte {begin} of the .bin, inside a token of {itemsize} bytes",
    )


def bound_end_fault(
    bounds: npt.NDArray[np.int64], num_sequences: int, dialect: DtypeTable
) -> Fault | None:
    """Return a fault unless the first document bound is 0, the last the number of sequences."""
    if len(bounds) == 0:
        return Fault(
            rule="bound-first",
            where="document bound 0",
            found="none",
            expected="0",
            text="header must declare at least 1 document bound, got 0",
        )
    first, last = int(bounds[0]), int(bounds[-1])
    if first != 0:
        return Fault(
            rule="bound-first",
            where="document bound 0",
            found=str(first),
            expected="0",
            text=f"document bound 0 must be 0, got {first}",
        )
    stops_short = 0 <= last < num_sequences and dialect.bounds_may_stop_short
    if last == num_sequences or stops_short:
        return None
    return Fault(
        rule="bound-last",
        where=f"document bound {len(bounds) - 1}",
        found=str(last),
        expected=str(num_sequences),
        text=f"the last document bound must be {num_sequences}, the number of sequences, got "
        f"{last}",
        remedy=f"open the file with dialect='neox' if GPT-NeoX's tools merged it, else {RESTORE}",
    )


def check_bounds(bounds: npt.NDArray[np.int64], num_sequences: int, idx_path: str) -> None:
    """Raise FormatError if a document bound decreases or exceeds the number of sequences."""
    for _, fault in bound_faults(bounds, num_sequences):
        raise fault.error(idx_path)


def bound_faults(bounds: npt.NDArray[np.int64], num_sequences: int) -> Iterator[tuple[int, Fault]]:
    """Yield number and first of the bounds of each chunk that decrease or exceed num_sequences."""
    previous = 0
    for start in range(0, len(bounds), _CHUNK):
        chunk = bounds[start : start + _CHUNK].copy()  # aligned
        is_sorted = bool((chunk[1:] >= chunk[:-1]).all())
        if chunk[0] >= previous and chunk[-1] <= num_sequences and is_sorted:
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


def _bound_fault(number: int, bound: int, before: int, num_sequences: int) -> Fault:
    where = f"document bound {number}"
    return Fault(
        rule="bound-order",
        where=where,
        found=str(bound),
        expected=f"{before} to {num_sequences}",
        text=f"{where} must be from {before}, the bound before, to {num_sequences}, the number of "
        f"sequences, got {bound}",
    )
