"""The entries of an .idx that are certain, from a damaged one or from the tokens alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.format.dtypes import dtype_of_code, get_dialect
from megaindex.format.header import HEADER_BYTES, IndexHeader, parse_header
from megaindex.format.pair import IndexArrays, index_arrays
from megaindex.format.paths import pair_paths
from megaindex.format.validate import bound_end_fault, bound_faults
from megaindex.io.mapping import map_readonly
from megaindex.io.progress import Bar

_CHUNK = 1 << 17
_CHUNK_TOKENS = 1 << 20
_LONGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, eq=False)
class Rebuilt:
    """Entries of an .idx whose sequences follow one another from byte 0."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.integer[Any]]
    modes: npt.NDArray[np.int8] | None
    certain: tuple[str, ...]
    lost: tuple[str, ...]


def from_damaged_index(path_prefix: str, dialect: str, eod: int | None, bar: Bar) -> Rebuilt:
    """What is certain of an .idx whose header and lengths are whole."""
    bin_path, idx_path = pair_paths(path_prefix)
    index = map_readonly(idx_path)
    header = parse_header(index[:HEADER_BYTES].tobytes(), idx_path)
    dtype = dtype_of_code(header.dtype_code, get_dialect(dialect), idx_path)
    arrays = index_arrays(index, header)
    if len(arrays.lengths) < header.num_sequences:
        raise InvalidArgument(
            f"{idx_path}: holds {len(arrays.lengths)} of {header.num_sequences} lengths; where the "
            f"other sequences end is not certain; move it away and give --dtype and --eod to cut "
            f"the .bin anew"
        )
    pointers = _compared(arrays, dtype.itemsize, os.stat(bin_path).st_size, idx_path)
    if pointers.inside < header.num_sequences:
        return _cut_short(header, arrays, dtype, pointers, idx_path)
    bounds, how = _bounds(header, arrays, dtype, eod, bin_path, idx_path, bar)
    has_modes = index.size == header.modes_offset + header.num_sequences
    lost = _lost(header, index.size)
    if not lost and bounds is arrays.bounds and pointers.agreeing == header.num_sequences:
        raise InvalidArgument(f"{path_prefix}: nothing is broken that a new .idx would mend")
    return Rebuilt(
        dtype=dtype,
        lengths=arrays.lengths,
        bounds=bounds,
        modes=arrays.modes if has_modes else None,
        certain=(
            "lengths, which add up to the bytes of the .bin",
            f"pointers: {pointers.agreeing} are left and agree with the lengths, "
            f"{header.num_sequences - pointers.agreeing} are computed from them",
            how,
        ),
        lost=lost,
    )


def _lost(header: IndexHeader, file_size: int) -> tuple[str, ...]:
    if file_size in (header.modes_offset, header.modes_offset + header.num_sequences):
        return ()
    if file_size < header.modes_offset:
        return ("modes of sequences, if there were any",)
    return (f"{file_size - header.modes_offset} bytes after the arrays, which are no modes",)


@dataclass(frozen=True, kw_only=True)
class _Pointers:
    inside: int
    """Sequences that end inside the .bin, if one lies behind the other from byte 0 on."""
    agreeing: int
    """Pointers that say so too."""


def _compared(arrays: IndexArrays, itemsize: int, bin_nbytes: int, idx_path: str) -> _Pointers:
    """Compare pointers with what the lengths add up to.

    A pointer of 0 further on, outside the .bin, or into a token is damage; all others must agree.
    """
    end = inside = agreeing = 0
    for start in range(0, len(arrays.lengths), _CHUNK):
        sizes = arrays.lengths[start : start + _CHUNK].astype(np.int64)
        if (sizes < 0).any():
            number = start + int((sizes < 0).argmax())
            raise InvalidArgument(
                f"{idx_path}: the length of sequence {number} is {arrays.lengths[number]}: lengths "
                f"are damaged, and nothing is certain without them"
            )
        ends = np.cumsum(sizes) * itemsize + end
        begins = (ends - sizes * itemsize)[: len(arrays.pointers[start : start + _CHUNK])]
        pointers = arrays.pointers[start : start + len(sizes)].astype(np.int64)
        differ = pointers != begins
        possible = (pointers > 0) & (pointers <= bin_nbytes) & (pointers % itemsize == 0)
        if (differ & possible).any():
            i = int((differ & possible).argmax())
            raise InvalidArgument(
                f"{idx_path}: sequence {start + i} begins at byte {pointers[i]}, and lengths add "
                f"up to {begins[i]}: one of them is damaged, or sequences do not lie one behind "
                f"the other; which is not certain"
            )
        agreeing += int((~differ).sum())
        inside += int((ends <= bin_nbytes).sum())
        end = int(ends[-1])
    if end < bin_nbytes:
        raise InvalidArgument(
            f"{idx_path}: lengths add up to {end} bytes and the .bin has {bin_nbytes}; lengths may "
            f"be damaged, or the .bin belongs to another .idx"
        )
    return _Pointers(inside=inside, agreeing=agreeing)


def _cut_short(
    header: IndexHeader,
    arrays: IndexArrays,
    dtype: np.dtype[Any],
    pointers: _Pointers,
    idx_path: str,
) -> Rebuilt:
    """The documents of a .bin that was cut short, as far as they are whole."""
    if pointers.agreeing < header.num_sequences or not _bounds_are_sound(header, arrays):
        raise InvalidArgument(
            f"{idx_path}: the .bin is cut short, and pointers or document bounds are damaged too; "
            f"which documents are whole is not certain"
        )
    whole = 0  # documents
    for start in range(0, len(arrays.bounds), _CHUNK):
        whole += int((arrays.bounds[start : start + _CHUNK] <= pointers.inside).sum())
    whole -= 1  # bound 0 is the beginning of the first
    sequences = int(arrays.bounds[whole])
    documents = header.num_bounds - 1
    modes = arrays.modes[:sequences] if len(arrays.modes) == header.num_sequences else None
    return Rebuilt(
        dtype=dtype,
        lengths=arrays.lengths[:sequences],
        bounds=arrays.bounds[: whole + 1],
        modes=modes,
        certain=(f"{whole} documents that lie whole before the end of the .bin",),
        lost=(f"{documents - whole} documents, whose tokens the .bin does not hold",),
    )


def _bounds_are_sound(header: IndexHeader, arrays: IndexArrays) -> bool:
    if len(arrays.bounds) < header.num_bounds:
        return False
    dialect = get_dialect("megatron")  # the strict one: bounds must reach the last sequence
    if bound_end_fault(arrays.bounds, header.num_sequences, dialect) is not None:
        return False
    return not any(True for _ in bound_faults(arrays.bounds, header.num_sequences))


def _bounds(
    header: IndexHeader,
    arrays: IndexArrays,
    dtype: np.dtype[Any],
    eod: int | None,
    bin_path: str,
    idx_path: str,
    bar: Bar,
) -> tuple[npt.NDArray[np.integer[Any]], str]:
    if _bounds_are_sound(header, arrays):
        return arrays.bounds, "document bounds, which are whole"
    if eod is None:
        raise InvalidArgument(
            f"{idx_path}: document bounds are damaged or cut off; where documents end is certain "
            f"only from the token that ends them: add --eod"
        )
    ends = np.concatenate(list(_sequences_with_end(arrays, bin_path, dtype, eod, bar)))
    if len(ends) != header.num_bounds - 1 or not len(ends) or ends[-1] != header.num_sequences:
        raise InvalidArgument(
            f"{idx_path}: {len(ends)} sequences end with token {eod}, and the header counts "
            f"{header.num_bounds - 1} documents; where documents end is not certain"
        )
    how = f"document bounds: {len(ends)} sequences end with token {eod}, as many as the header says"
    return np.concatenate(([0], ends)), how


def _sequences_with_end(
    arrays: IndexArrays, bin_path: str, dtype: np.dtype[Any], eod: int, bar: Bar
) -> Iterator[npt.NDArray[np.int64]]:
    """Numbers, plus one, of the sequences whose last token is `eod`."""
    tokens = map_readonly(bin_path)
    tokens = tokens[: tokens.size // dtype.itemsize * dtype.itemsize].view(dtype)
    progress = bar(tokens.nbytes)
    end = 0
    yield np.empty(0, np.int64)
    for start in range(0, len(arrays.lengths), _CHUNK):
        sizes = arrays.lengths[start : start + _CHUNK].astype(np.int64)
        ends = np.cumsum(sizes) + end
        filled = np.flatnonzero(sizes > 0)
        yield filled[tokens[ends[filled] - 1] == eod] + start + 1
        progress((int(ends[-1]) - end) * dtype.itemsize)
        end = int(ends[-1])


def from_tokens(bin_path: str, dtype: np.dtype[Any], eod: int, bar: Bar) -> Rebuilt:
    """Documents of one sequence each, cut behind every `eod`."""
    data = map_readonly(bin_path)
    tokens = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
    progress = bar(tokens.nbytes)
    parts = [np.empty(0, np.int64)]
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        parts.append(np.flatnonzero(chunk == eod) + start + 1)
        progress(chunk.nbytes)
    ends = np.concatenate(parts)
    lengths = np.diff(ends, prepend=0)
    if not len(ends):
        raise InvalidArgument(f"{bin_path}: holds no token {eod}; check --eod and --dtype")
    if lengths.max() > _LONGEST:
        raise InvalidArgument(
            f"{bin_path}: {lengths.max()} tokens lie between two of {eod}; documents have at most "
            f"{_LONGEST}; check --eod and --dtype"
        )
    rest = len(tokens) - int(ends[-1])
    lost = ["sequences inside documents, documents without tokens, and modes, if there were any"]
    if rest or data.size > tokens.nbytes:
        left = data.size - int(ends[-1]) * dtype.itemsize
        lost.append(f"{left} bytes after the last token {eod}: a document that has no end")
    return Rebuilt(
        dtype=dtype,
        lengths=lengths.astype(np.int32),
        bounds=np.arange(len(ends) + 1),
        modes=None,
        certain=(f"{len(ends)} documents, each ending with token {eod}, read as {dtype}",),
        lost=tuple(lost),
    )
