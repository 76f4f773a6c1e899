"""Repair of an .idx: a new one is written from the data that are certain.

All known writers lay sequences out contiguously from byte 0, which makes these cases certain; all
others are refused with the reason.

    intact             lost                 evidence
    lengths, bounds    pointers             lengths add up to the .bin, the other pointers agree
    lengths            pointers, bounds     also, as many sequences end with `eod` as the header
                                            counts documents
    all of the .idx    the end of the .bin  documents before the cut are whole
    the .bin           the .idx             `dtype` is given, and `eod` ends every document
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format.dataset import IndexedDataset
from megaindex.format.header import (
    HEADER_BYTES,
    IndexHeader,
    bound_end_fault,
    bound_faults,
    code_of_dtype,
    dtype_of_code,
    get_dialect,
    parse_header,
)
from megaindex.format.pair import (
    IndexArrays,
    IndexSpool,
    PairSink,
    check_not_a_half,
    index_arrays,
    pair_paths,
)
from megaindex.format.provenance import Provenance, provenance_path
from megaindex.io.atomic import write_file
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import check_file, refuse_zero_byte
from megaindex.progress import Bar, silent

_CHUNK = 1 << 17
_CHUNK_TOKENS = 1 << 20
_LONGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Result of `repair`."""

    path_prefix: str
    certain: tuple[str, ...]
    """Data that were kept or recomputed, with the evidence."""
    lost: tuple[str, ...]
    """Data that could not be recovered."""
    sequences: int
    documents: int
    link: str
    """Kind of the new .bin: "hard link" or "symbolic link"."""


def repair(
    path_prefix: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dialect: str = "megatron",
    dtype: npt.DTypeLike | None = None,
    eod: int | None = None,
    bar: Bar = silent,
) -> Repair:
    """Write a new .idx for a damaged pair, with a link to its .bin.

    Only data that are certain are written; the damaged pair is not changed. Its provenance is
    written too where it is that of the new documents; else it is among what was lost.

    Args:
        path_prefix: prefix of the damaged pair, whose .bin must exist.
        output: another prefix; existing files are refused.
        dialect: framework that defines the dtype codes of the pair: "megatron", "neox" or
            "paddlenlp".
        dtype: token type, needed if the .idx is lost.
        eod: token id that ends every document, needed if the .idx or its document bounds are lost.
        bar: function of the total bytes that returns a function called with bytes read.

    Returns:
        Counts of the new pair, and the data recovered and lost.

    Raises:
        InvalidArgument: the pair needs no repair, or its damage leaves the data uncertain.
        MissingFile: the .bin is missing.
        StorageError: a file is not regular, or cannot be read, linked or written.
    """
    source, target = os.fspath(path_prefix), os.fspath(output)
    refuse_zero_byte(source)
    check_not_a_half(target)
    get_dialect(dialect)
    bin_path, idx_path = pair_paths(source)
    if not _is_file(bin_path):
        raise MissingFile(f"{bin_path}: missing; tokens cannot be rebuilt from an .idx")
    if _is_file(idx_path):
        rebuilt = from_damaged_index(source, dialect, eod, bar)
    elif dtype is None or eod is None:
        raise InvalidArgument(
            f"{idx_path}: missing; document ends are certain only with the token type and the "
            f"token that ends every document; add --dtype and --eod"
        )
    else:
        code_of_dtype(dtype, get_dialect(dialect))
        rebuilt = from_tokens(bin_path, np.dtype(dtype), eod, bar)
    return _published(rebuilt, source, target, dialect)


def _is_file(path: str) -> bool:
    """Return True if a regular file exists; raise StorageError for anything else at the path."""
    try:
        check_file(path, "cannot read its status")
    except MissingFile:
        return False
    return True


def _published(rebuilt: Rebuilt, source: str, target: str, dialect: str) -> Repair:
    origins, damage = _origins(source)
    documents = len(rebuilt.bounds) - 1
    # of a .bin that was cut, the .idx is that of the provenance, and its first documents are kept
    has_prefix = (
        origins is not None and documents <= origins.num_documents and _is_of_pair(origins, source)
    )
    sink = PairSink(
        *pair_paths(target),
        rebuilt.dtype,
        multimodal=rebuilt.modes is not None,
        overwrite=False,
        provenance=has_prefix,
    )
    try:
        link = sink.open_linked(pair_paths(source)[0])
        with sink:
            _fill(sink.index, rebuilt)
            if sink.provenance is not None and origins is not None:
                sink.provenance.add_part(origins, 0, documents)
        sink.publish(code_of_dtype(rebuilt.dtype, get_dialect(dialect)))
        dataset = IndexedDataset(target, dialect=dialect)
        dataset.validate()
    except BaseException:
        sink.take_back()
        raise
    finally:
        sink.discard()
    certain, lost = list(rebuilt.certain), list(rebuilt.lost)
    kept = f"provenance of {documents} documents"
    if has_prefix:
        certain.append(f"{kept}, the first of those of the damaged pair")
    elif origins is not None and _is_of_pair(origins, target):
        with open(origins.path, "rb") as stream:
            write_file(provenance_path(target), partial(shutil.copyfileobj, stream))
        certain.append(f"{kept}: the new .idx is the one that it was written with")
    elif origins is not None:
        lost.append(f"{kept}: the new .idx is not the one that {origins.path} was written with")
    elif damage:
        lost.append(f"{kept}: {damage}")
    return Repair(
        path_prefix=target,
        certain=tuple(certain),
        lost=tuple(lost),
        sequences=len(dataset),
        documents=len(dataset.document_indices) - 1,
        link=link,
    )


def _origins(source: str) -> tuple[Provenance | None, str]:
    """Return the provenance of a damaged pair, or None and its damage, if it has one."""
    path = provenance_path(source)
    if not _is_file(path):
        return None, ""
    try:
        found = Provenance(path, None)
        found.check_columns()
    except FormatError as error:
        return None, str(error)
    return found, ""


def _is_of_pair(origins: Provenance, prefix: str) -> bool:
    """Return True if a provenance was written with this .idx."""
    idx_path = pair_paths(prefix)[1]
    return _is_file(idx_path) and origins.pair_fault(idx_path) is None


def _fill(spool: IndexSpool, rebuilt: Rebuilt) -> None:
    lengths, modes = rebuilt.lengths, rebuilt.modes
    for start in range(0, len(lengths), _CHUNK):
        part = slice(start, start + _CHUNK)
        spool.add_sequences(lengths[part].copy(), None if modes is None else modes[part].copy())
    for start in range(1, len(rebuilt.bounds), _CHUNK):  # the spool begins with bound 0
        spool.add_bounds(rebuilt.bounds[start : start + _CHUNK].astype(np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rebuilt:
    """Entries of an .idx of contiguous sequences from byte 0."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.integer[Any]]
    modes: npt.NDArray[np.int8] | None
    certain: tuple[str, ...]
    lost: tuple[str, ...]


def from_damaged_index(path_prefix: str, dialect: str, eod: int | None, bar: Bar) -> Rebuilt:
    """Rebuild an .idx whose header and lengths are intact."""
    bin_path, idx_path = pair_paths(path_prefix)
    index = map_readonly(idx_path)
    header = parse_header(index[:HEADER_BYTES].tobytes(), idx_path)
    dtype = dtype_of_code(header.dtype_code, get_dialect(dialect), idx_path)
    arrays = index_arrays(index, header)
    if len(arrays.lengths) < header.num_sequences:
        raise InvalidArgument(
            f"{idx_path}: holds {len(arrays.lengths)} of {header.num_sequences} lengths; move it "
            f"away, and rebuild it from the .bin with --dtype and --eod"
        )
    bin_nbytes = os.stat(bin_path).st_size
    inside, agreeing = _compared(arrays, dtype.itemsize, bin_nbytes, idx_path)
    if inside < header.num_sequences:
        if agreeing < header.num_sequences or not _bounds_are_sound(header, arrays):
            raise InvalidArgument(
                f"{idx_path}: the .bin is truncated, and pointers or document bounds are damaged "
                f"too; the whole documents cannot be determined"
            )
        return _cut_short(header, arrays, dtype, inside)
    bounds, how = _bounds(header, arrays, dtype, eod, bin_path, idx_path, bar)
    has_modes = index.size == header.modes_offset + header.num_sequences
    lost = _lost(header, index.size)
    if not lost and bounds is arrays.bounds and agreeing == header.num_sequences:
        raise InvalidArgument(f"{path_prefix}: has no damage that a new .idx would repair")
    return Rebuilt(
        dtype=dtype,
        lengths=arrays.lengths,
        bounds=bounds,
        modes=arrays.modes if has_modes else None,
        certain=(
            "lengths, which add up to the bytes of the .bin",
            f"pointers: {agreeing} are intact and agree with the lengths, "
            f"{header.num_sequences - agreeing} are computed from them",
            how,
        ),
        lost=lost,
    )


def from_tokens(bin_path: str, dtype: np.dtype[Any], eod: int, bar: Bar) -> Rebuilt:
    """Rebuild an .idx of documents of one sequence each that end with `eod`."""
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
        raise InvalidArgument(f"{bin_path}: does not contain token {eod}; check --eod and --dtype")
    if lengths.max() > _LONGEST:
        raise InvalidArgument(
            f"{bin_path}: a document must have at most {_LONGEST} tokens, got {lengths.max()} "
            f"between two tokens {eod}; check --eod and --dtype"
        )
    rest = len(tokens) - int(ends[-1])
    lost = ["sequences inside documents, documents without tokens, and modes, if there were any"]
    if rest or data.size > tokens.nbytes:
        left = data.size - int(ends[-1]) * dtype.itemsize
        lost.append(f"{left} bytes after the last token {eod}: a document without an end")
    return Rebuilt(
        dtype=dtype,
        lengths=lengths.astype(np.int32),
        bounds=np.arange(len(ends) + 1),
        modes=None,
        certain=(f"{len(ends)} documents, each ending with token {eod}, read as {dtype}",),
        lost=tuple(lost),
    )


def _lost(header: IndexHeader, file_size: int) -> tuple[str, ...]:
    if file_size in (header.modes_offset, header.modes_offset + header.num_sequences):
        return ()
    if file_size < header.modes_offset:
        return ("modes of sequences, if there were any",)
    return (f"{file_size - header.modes_offset} bytes after the arrays that are not modes",)


def _compared(
    arrays: IndexArrays, itemsize: int, bin_nbytes: int, idx_path: str
) -> tuple[int, int]:
    """Return the number of sequences, contiguous from byte 0, that end inside the .bin, and that of
    pointers that equal the sum of the lengths before them.

    A pointer of 0 after the first, outside the .bin or inside a token counts as damaged; all others
    must agree.
    """
    end = inside = agreeing = 0
    for start in range(0, len(arrays.lengths), _CHUNK):
        sizes = arrays.lengths[start : start + _CHUNK].astype(np.int64)
        if (sizes < 0).any():
            number = start + int((sizes < 0).argmax())
            raise InvalidArgument(
                f"{idx_path}: sequence {number} has length {arrays.lengths[number]}: lengths are "
                f"damaged, and without them the .idx cannot be rebuilt"
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
                f"up to {begins[i]}: a pointer or a length is damaged, or sequences are not "
                f"contiguous; the .idx cannot be rebuilt"
            )
        agreeing += int((~differ).sum())
        inside += int((ends <= bin_nbytes).sum())
        end = int(ends[-1])
    if end < bin_nbytes:
        raise InvalidArgument(
            f"{idx_path}: lengths add up to {end} bytes and the .bin has {bin_nbytes}; lengths are "
            f"damaged, or the .bin belongs to another .idx"
        )
    return inside, agreeing


def _cut_short(
    header: IndexHeader, arrays: IndexArrays, dtype: np.dtype[Any], inside: int
) -> Rebuilt:
    """Rebuild the .idx of a truncated .bin from its whole documents; ``inside`` sequences are."""
    whole = 0  # documents
    for start in range(0, len(arrays.bounds), _CHUNK):
        whole += int((arrays.bounds[start : start + _CHUNK] <= inside).sum())
    whole -= 1  # bound 0 begins the first document
    sequences = int(arrays.bounds[whole])
    documents = header.num_bounds - 1
    modes = arrays.modes[:sequences] if len(arrays.modes) == header.num_sequences else None
    return Rebuilt(
        dtype=dtype,
        lengths=arrays.lengths[:sequences],
        bounds=arrays.bounds[: whole + 1],
        modes=modes,
        certain=(f"{whole} documents that are whole in the .bin",),
        lost=(f"{documents - whole} documents beyond the end of the .bin",),
    )


def _bounds_are_sound(header: IndexHeader, arrays: IndexArrays) -> bool:
    if len(arrays.bounds) < header.num_bounds:
        return False
    dialect = get_dialect("megatron")  # its bounds must reach the last sequence
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
        return arrays.bounds, "document bounds, which are intact"
    if eod is None:
        raise InvalidArgument(
            f"{idx_path}: document bounds are damaged or truncated; document ends are certain only "
            f"with the token that ends every document; add --eod"
        )
    ends = np.concatenate(list(_sequences_with_end(arrays, bin_path, dtype, eod, bar)))
    if len(ends) != header.num_bounds - 1 or not len(ends) or ends[-1] != header.num_sequences:
        raise InvalidArgument(
            f"{idx_path}: {len(ends)} sequences end with token {eod}, and the header counts "
            f"{header.num_bounds - 1} documents; check --eod"
        )
    how = f"document bounds: {len(ends)} sequences end with token {eod}, the header's documents"
    return np.concatenate(([0], ends)), how


def _sequences_with_end(
    arrays: IndexArrays, bin_path: str, dtype: np.dtype[Any], eod: int, bar: Bar
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers, plus one, of the sequences whose last token is `eod`."""
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
