"""What must hold for every entry of an .idx, checked in chunks: constant memory at any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError
from megaindex.format.dtypes import Dialect

_CHUNK = 1 << 17  # a chunk and its temporaries stay in a core's cache
_REMEDY = "restore the file or write the pair again"


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
    total = 0
    for start in range(0, len(lengths), _CHUNK):
        # Copies, because the mapped arrays are unaligned and NumPy is slow on those.
        sizes = lengths[start : start + _CHUNK].astype(np.int64)
        begins = pointers[start : start + _CHUNK].astype(np.int64)
        # A pointer beyond the .bin is caught before it is added to: the sum cannot wrap unseen.
        bad = (sizes < 0) | (begins < 0) | (begins > bin_size)
        bad |= begins + sizes * itemsize > bin_size
        bad |= begins & (itemsize - 1) != 0  # sizes of token types are powers of two
        if bad.any():
            i = int(bad.argmax())
            size, begin = int(sizes[i]), int(begins[i])
            raise _bad_sequence(first + start + i, size, begin, itemsize, bin_size, idx_path)
        total += int(sizes.sum())
    return total


def _bad_sequence(
    index: int, size: int, begin: int, itemsize: int, bin_size: int, idx_path: str
) -> FormatError:
    where = f"{idx_path}: sequence {index}"
    if size < 0:
        return FormatError(f"{where} has length {size}; lengths are never negative; {_REMEDY}")
    if begin < 0 or begin + size * itemsize > bin_size:
        return FormatError(
            f"{where} takes bytes {begin} to {begin} + {size}·{itemsize} = "
            f"{begin + size * itemsize} of the .bin, which has {bin_size}; the .bin is cut short "
            f"or belongs to another .idx; {_REMEDY}"
        )
    return FormatError(
        f"{where} begins at byte {begin} of the .bin, inside a token: tokens take {itemsize} "
        f"bytes; {_REMEDY}"
    )


def check_bound_ends(
    bounds: npt.NDArray[np.int64], num_sequences: int, dialect: Dialect, idx_path: str
) -> None:
    """The O(1) part of the rules for document bounds: the first is 0, the last counts sequences."""
    if len(bounds) == 0:
        raise FormatError(
            f"{idx_path}: header promises 0 document bounds, and there is always a first, 0; "
            f"{_REMEDY}"
        )
    first, last = int(bounds[0]), int(bounds[-1])
    if first != 0:
        raise FormatError(f"{idx_path}: document bound 0 is {first} and must be 0; {_REMEDY}")
    if 0 <= last < num_sequences and dialect.bounds_may_stop_short:
        return
    if last != num_sequences:
        raise FormatError(
            f"{idx_path}: the last document bound is {last} and must be the number of sequences, "
            f"{num_sequences}; open the file with dialect='neox' if GPT-NeoX's tools merged it, "
            f"else {_REMEDY}"
        )


def check_bounds(bounds: npt.NDArray[np.int64], num_sequences: int, idx_path: str) -> None:
    """Check that document bounds never decrease and stay within 0..num_sequences."""
    previous = 0
    for start, chunk in _aligned_chunks(bounds):
        bad = np.empty(len(chunk), dtype=bool)
        bad[0] = chunk[0] < previous
        np.less(chunk[1:], chunk[:-1], out=bad[1:])
        bad |= chunk > num_sequences
        if bad.any():
            i = int(bad.argmax())
            before = int(chunk[i - 1]) if i else previous
            raise FormatError(
                f"{idx_path}: document bound {start + i} is {int(chunk[i])}, after {before}; "
                f"bounds never decrease nor pass the number of sequences, {num_sequences}; "
                f"{_REMEDY}"
            )
        previous = int(chunk[-1])


def _aligned_chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK].copy()
