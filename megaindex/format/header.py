"""The header of an .idx file and the dtype codes of each framework.

The frameworks agree on 1–5 and 8. GPT-NeoX exchanges 6 and 7, and PaddleNLP adds 9 and 10. A file
does not record the framework that wrote it, so the caller names the dialect.

    offset       bytes  content
    0                9  magic b"MMIDIDX\0\0"
    9                8  version, uint64: 1
    17               1  dtype code of the tokens in the .bin (see DIALECTS)
    18               8  n, the number of sequences, uint64
    26               8  m, the number of document bounds (documents + 1), uint64
    34              4n  length of each sequence in tokens, int32
    34 + 4n         8n  offset of each sequence in the .bin, in bytes, int64
    34 + 12n        8m  document bounds: document d is sequences bounds[d] : bounds[d + 1], int64
    34 + 12n + 8m    n  mode of each sequence, int8: multimodal files only

All little-endian and unpadded, so the arrays are not aligned in memory.

Rules for the entries of an .idx are checked in chunks, in constant memory. The functions that raise
stop at the first fault; `megaindex verify` counts and describes all faults by the same masks.
Values that do not fit a dtype are refused, not wrapped.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument
from megaindex.kernels import active, load
from megaindex.validation import check_choice

RESTORE = "restore the file or write the pair again"
_SHARED = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One breach of a rule of a format."""

    rule: str
    """Short name of the rule, such as "header-size"."""
    where: str = "the file"
    """Such as "byte 0", "sequence 3", "document bound 7"."""
    found: str
    expected: str
    text: str = ""
    """Message, for rules that readers enforce."""
    remedy: str = RESTORE

    def error(self, path: str) -> FormatError:
        """Return the exception for a file."""
        return FormatError(f"{path}: {self.text}; {self.remedy}")


def check_fault(fault: Fault | None, path: str) -> None:
    """Raise the error of a fault of a file, if there is one."""
    if fault is not None:
        raise fault.error(path)


@dataclass(frozen=True, kw_only=True)
class DtypeTable:
    """Dtype codes of one family of frameworks, and its rule for document bounds."""

    name: str
    dtypes: Mapping[int, np.dtype[Any]]
    """Token dtype of each code."""
    bounds_may_stop_short: bool = False
    """True if document bounds may end before the last sequence: GPT-NeoX's merge tool copies
    sequences but not document bounds, and its training reads only sequences."""


def _dialect(
    name: str, own: Mapping[int, str], *, bounds_may_stop_short: bool = False
) -> DtypeTable:
    names = {**_SHARED, **own}
    dtypes = {code: np.dtype(names[code]) for code in sorted(names)}
    return DtypeTable(name=name, dtypes=dtypes, bounds_may_stop_short=bounds_may_stop_short)


DIALECTS: Mapping[str, DtypeTable] = {
    dialect.name: dialect
    for dialect in (
        _dialect("megatron", {6: "float64", 7: "float32"}),
        _dialect("neox", {6: "float32", 7: "float64"}, bounds_may_stop_short=True),
        _dialect("paddlenlp", {6: "float64", 7: "float32", 9: "uint32", 10: "uint64"}),
    )
}


def get_dialect(name: str) -> DtypeTable:
    """Return the dialect called `name`; InvalidArgument if it is unknown."""
    return DIALECTS[check_choice("dialect", name, tuple(DIALECTS))]


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """First 34 bytes of an .idx, and the offsets of its arrays."""

    dtype_code: int
    num_sequences: int
    num_bounds: int

    @property
    def pointers_offset(self) -> int:
        return HEADER_BYTES + 4 * self.num_sequences

    @property
    def bounds_offset(self) -> int:
        return HEADER_BYTES + 12 * self.num_sequences

    @property
    def modes_offset(self) -> int:
        """Offset of the modes: the size of a file without them."""
        return HEADER_BYTES + 12 * self.num_sequences + 8 * self.num_bounds

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.dtype_code, self.num_sequences, self.num_bounds)


def parse_header(raw: bytes, idx_path: str) -> IndexHeader:
    """Return the header at the beginning of `raw`; FormatError if it breaks a rule."""
    check_fault(header_fault(raw), idx_path)
    *_, dtype_code, num_sequences, num_bounds = _HEADER.unpack_from(raw)
    return IndexHeader(dtype_code=dtype_code, num_sequences=num_sequences, num_bounds=num_bounds)


def header_fault(raw: bytes) -> Fault | None:
    """Return the first breach of a rule in the header at the beginning of `raw`."""
    if raw.startswith(_OLD_MAGIC):
        return Fault(
            rule="old-format",
            where="byte 0",
            found=repr(_OLD_MAGIC),
            expected=repr(MAGIC),
            text=f"must begin with {MAGIC!r}, got {_OLD_MAGIC!r}, the old 'lazy'/'cached' format",
            remedy="tokenize again with --dataset-impl mmap, or use megaindex import",
        )
    if len(raw) < HEADER_BYTES:
        return Fault(
            rule="header-size",
            where=f"byte {len(raw)}",
            found=f"{len(raw)} bytes",
            expected=f"{HEADER_BYTES} bytes or more",
            text=f"must have a header of {HEADER_BYTES} bytes, got {len(raw)} bytes",
        )
    magic, version, *_ = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        return Fault(
            rule="magic",
            where="byte 0",
            found=repr(magic),
            expected=repr(MAGIC),
            text=f"must begin with {MAGIC!r}, as a Megatron index does, got {magic!r}",
            remedy="check the path",
        )
    if version != VERSION:
        return Fault(
            rule="version",
            where="byte 9",
            found=str(version),
            expected=str(VERSION),
            text=f"must have format version {VERSION}, got {version}",
        )
    return None


def has_modes(header: IndexHeader, file_size: int, idx_path: str) -> bool:
    """Return True if the file holds modes; FormatError if its size does not fit its header.

    A file without sequences holds the mode of each.
    """
    check_fault(size_fault(header, file_size), idx_path)
    return file_size == header.modes_offset + header.num_sequences


def size_fault(header: IndexHeader, file_size: int) -> Fault | None:
    """Return a fault unless the file holds exactly the arrays that its header declares."""
    n, m = header.num_sequences, header.num_bounds
    without_modes = header.modes_offset
    if file_size in (without_modes, without_modes + n):
        return None
    sizes = f"{without_modes} bytes, or {without_modes + n} with modes"
    return Fault(
        rule="file-size",
        where=f"byte {min(file_size, without_modes)}",
        found=f"{file_size} bytes",
        expected=sizes,
        text=f"header declares {n} sequences and {m} document bounds "
        f"({HEADER_BYTES} + 12·{n} + 8·{m} = {sizes}), file has {file_size}",
        remedy=f"{RESTORE}; megaindex verify --repair rebuilds an .idx from its .bin",
    )


def dtype_of_code(code: int, dialect: DtypeTable, idx_path: str) -> np.dtype[Any]:
    """Return the token dtype of `code` in `dialect`; FormatError for `idx_path` if unknown."""
    check_fault(code_fault(code, dialect), idx_path)
    return dialect.dtypes[code]


def code_fault(code: int, dialect: DtypeTable) -> Fault | None:
    if code in dialect.dtypes:
        return None
    others = [other.name for other in DIALECTS.values() if code in other.dtypes]
    remedy = (
        f"open it with dialect={others[0]!r} if that framework wrote it"
        if others
        else "the header is damaged; restore the file or write it again"
    )
    return Fault(
        rule="dtype-code",
        where="byte 17",
        found=str(code),
        expected=f"one of {_listing(dialect)}",
        text=f"dtype code must be one of the {dialect.name} dialect ({_listing(dialect)}), got "
        f"{code}",
        remedy=remedy,
    )


def code_of_dtype(dtype: npt.DTypeLike, dialect: DtypeTable, name: str = "dtype") -> int:
    """Return the code of `dtype` in `dialect`; InvalidArgument with its name if it has none."""
    try:
        wanted = np.dtype("None" if dtype is None else dtype)  # of None NumPy makes float64
    except (TypeError, ValueError, SyntaxError):
        raise InvalidArgument(
            f"{name} must be a NumPy dtype such as int32, got {dtype!r}"
        ) from None
    for code, known in dialect.dtypes.items():
        if known == wanted:
            return code
    raise InvalidArgument(
        f"{name} {wanted} has no code in the {dialect.name} dialect; choose one of "
        f"{_listing(dialect)}"
    )


def _listing(dialect: DtypeTable) -> str:
    return ", ".join(f"{code} {dtype}" for code, dtype in dialect.dtypes.items())


CHUNK = 1 << 18  # tokens checked or converted at once, which bounds temporaries


def token_array(
    tokens: npt.ArrayLike, dtype: np.dtype[Any], *, first: int = 0, of: str = "tokens"
) -> npt.NDArray[Any]:
    """Return `tokens` as a one-dimensional array of its own dtype, whose values all fit `dtype`.

    In messages it is ``of``, and its first value has the number ``first``.

    Raises:
        InvalidArgument: not one-dimensional, not numbers, or a value does not fit.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"tokens must be an array of numbers: {error}") from error
    if array.ndim != 1:
        raise InvalidArgument(
            f"tokens must be one-dimensional, got shape {array.shape}; flatten them"
        )
    if array.dtype == dtype or array.size == 0:
        return array
    if array.dtype.kind not in "iuf":
        raise InvalidArgument(
            f"tokens must be numbers that fit {dtype}, got {array.dtype}; convert them first"
        )
    for start in range(0, array.size, CHUNK):
        chunk = array[start : start + CHUNK]
        misfit = _first_misfit(chunk, dtype)
        if misfit is not None:
            raise InvalidArgument(
                f"{of}[{first + start + misfit}]={chunk[misfit]}: does not fit {dtype}, which "
                f"holds {_range_of(dtype)}; choose a wider dtype (--dtype)"
            )
    return array


def integer_array(values: npt.ArrayLike, name: str, lowest: int, highest: int) -> npt.NDArray[Any]:
    """Return `values` as int64[k], each in lowest..highest; InvalidArgument otherwise."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{name} must be a list of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name} must be a list of integers, got shape {array.shape}, dtype {array.dtype}"
        )
    if array.size and (array.min() < lowest or array.max() > highest):
        i = int(np.flatnonzero((array < lowest) | (array > highest))[0])
        raise InvalidArgument(
            f"{name}[{i}] must be from {lowest} to {highest}, the range of the format, got "
            f"{array[i]}"
        )
    return array.astype(np.int64, copy=False)


def _first_misfit(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """Return the index of the first value that does not fit `dtype`; `values` is not empty."""
    if dtype.kind == "f":
        bad = _misfits_float(values, dtype)
    elif values.dtype.kind == "f":
        bad = _misfits_integer(values, dtype)
    else:
        lowest, highest = _integer_limits(dtype)
        if lowest <= int(values.min()) and int(values.max()) <= highest:
            return None
        # Python integers, since uint64 and int64 have no common dtype in which to compare.
        return next(i for i, v in enumerate(values.tolist()) if not lowest <= v <= highest)
    return int(bad.argmax()) if bad.any() else None


def _misfits_float(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    bad: npt.NDArray[np.bool_]
    if values.dtype.kind == "f":  # rounding is accepted, overflow to infinity is not
        with np.errstate(over="ignore"):
            bad = np.isfinite(values) & ~np.isfinite(values.astype(dtype))
        return bad
    # Integers are token ids and must stay exact: in float32 up to 2^24, in float64 up to 2^53.
    limit = 2 ** (np.finfo(dtype).nmant + 1)
    bad = values > limit
    if values.dtype.kind == "i":
        bad |= values < -limit
    return bad


def _misfits_integer(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the floats that are not integers in the range of `dtype`."""
    lowest, highest = _integer_limits(dtype)
    wide = values.astype(np.float64)
    above = float(highest + 1)  # a power of two, exact; float(highest) may round up to it
    bad: npt.NDArray[np.bool_] = np.trunc(wide) != wide
    bad |= ~((wide >= float(lowest)) & (wide < above))
    return bad


def _range_of(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "f":
        exact = np.finfo(dtype).nmant + 1
        return f"integers up to 2^{exact} and fractions up to {np.finfo(dtype).max}"
    lowest, highest = _integer_limits(dtype)
    return f"{lowest}..{highest}"


@functools.cache
def _integer_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the cached limits: np.iinfo takes longer than the check of a short document."""
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


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
