"""Rebuilding of an .idx from its .bin, whose documents end with one token.

The sequences are those of the known writers, contiguous from byte 0. What a damaged .idx still
holds is not taken over; only its header is compared, if that can be read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format.dataset import IndexedDataset
from megaindex.format.header import (
    HEADER_BYTES,
    IndexHeader,
    code_of_dtype,
    dtype_of_code,
    get_dialect,
    parse_header,
)
from megaindex.format.pair import check_not_a_half, pair_paths, provenance_path
from megaindex.format.sink import PairSink
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import check_file, refuse_zero_byte
from megaindex.progress import Bar, silent

_CHUNK = 1 << 20
_LONGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Result of `repair`."""

    path_prefix: str
    certain: tuple[str, ...]
    """Data that were rebuilt, with the evidence."""
    lost: tuple[str, ...]
    """Data that were not rebuilt."""
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
    """Write a new .idx for a .bin whose .idx is lost or damaged, with a link to the .bin.

    Every document is one sequence that ends with `eod`. The damaged pair is not changed.

    Args:
        path_prefix: prefix of the damaged pair, whose .bin must exist.
        output: another prefix; existing files are refused.
        dialect: framework that defines the dtype codes of the pair: "megatron", "neox" or
            "paddlenlp".
        dtype: token type, needed unless the header of the .idx can be read.
        eod: token id that ends every document.
        bar: function of the total bytes that returns a function called with bytes read.

    Raises:
        InvalidArgument: the .idx has no damage, `dtype` or `eod` is missing, or the documents
            differ from what the header of the .idx counts.
        MissingFile: the .bin is missing.
        StorageError: a file is not regular, or cannot be read, linked or written.
    """
    source, target = os.fspath(path_prefix), os.fspath(output)
    refuse_zero_byte(source)
    check_not_a_half(target)
    table = get_dialect(dialect)
    bin_path, idx_path = pair_paths(source)
    if not _is_file(bin_path):
        raise MissingFile(f"{bin_path}: missing; tokens cannot be rebuilt from an .idx")
    header = _damaged_header(source, dialect) if _is_file(idx_path) else None
    if dtype is None and header is not None:
        dtype = dtype_of_code(header.dtype_code, table, idx_path)
    if dtype is None or eod is None:
        raise InvalidArgument(
            f"{idx_path}: is lost or damaged; document ends are certain only with the token type "
            f"and the token that ends every document; add --dtype and --eod"
        )
    code, dtype = code_of_dtype(dtype, table), np.dtype(dtype)
    lengths, left = _documents(bin_path, dtype, eod, bar)
    if header is not None:
        _check_counts(header, code, len(lengths), idx_path)
    lost = ["sequences inside documents, documents without tokens, and modes, if there were any"]
    if left:
        lost.append(f"{left} bytes after the last token {eod}: a document without an end")
    if os.path.lexists(provenance_path(source)):
        lost.append(
            f"provenance: copy {provenance_path(source)} to {provenance_path(target)}, and "
            f"megaindex verify says whether it is that of the new .idx"
        )
    return Repair(
        path_prefix=target,
        certain=(f"{len(lengths)} documents, each ending with token {eod}, read as {dtype}",),
        lost=tuple(lost),
        sequences=len(lengths),
        documents=len(lengths),
        link=_publish(lengths, dtype, source, target, dialect),
    )


def _is_file(path: str) -> bool:
    """Return True if a regular file exists; raise StorageError for anything else at the path."""
    try:
        check_file(path, "cannot read its status")
    except MissingFile:
        return False
    return True


def _damaged_header(source: str, dialect: str) -> IndexHeader | None:
    """Return the header of a damaged .idx, or None if it cannot be read."""
    try:
        IndexedDataset(source, dialect=dialect).validate()
    except FormatError:
        idx_path = pair_paths(source)[1]
        try:
            return parse_header(map_readonly(idx_path)[:HEADER_BYTES].tobytes(), idx_path)
        except FormatError:
            return None
    raise InvalidArgument(
        f"{source}.idx: has no damage that breaks a rule of the format; move it away if it is to "
        f"be rebuilt from the .bin all the same"
    )


def _check_counts(header: IndexHeader, code: int, documents: int, idx_path: str) -> None:
    """Raise InvalidArgument if the header of a damaged .idx counts other documents."""
    found = code, documents, documents + 1
    counted = header.dtype_code, header.num_sequences, header.num_bounds
    if found != counted:
        names = "dtype code {}, {} sequences and {} document bounds"
        raise InvalidArgument(
            f"{idx_path}: the header has {names.format(*counted)}, and the .bin as it was read "
            f"{names.format(*found)}: --eod or --dtype is wrong, the .bin is cut short, or "
            f"documents have several sequences; restore both files from a copy or write them "
            f"again, or move the .idx away to keep only what the .bin holds"
        )


def _documents(
    bin_path: str, dtype: np.dtype[Any], eod: int, bar: Bar
) -> tuple[npt.NDArray[np.int32], int]:
    """Return the lengths of the documents that end with `eod`, and the bytes after the last."""
    data = map_readonly(bin_path)
    tokens = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
    progress = bar(tokens.nbytes)
    parts = [np.empty(0, np.int64)]
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        parts.append(np.flatnonzero(chunk == eod) + start + 1)
        progress(chunk.nbytes)
    ends = np.concatenate(parts)
    if not len(ends):
        raise InvalidArgument(f"{bin_path}: does not contain token {eod}; check --eod and --dtype")
    lengths = np.diff(ends, prepend=0)
    if lengths.max() > _LONGEST:
        raise InvalidArgument(
            f"{bin_path}: a document must have at most {_LONGEST} tokens, got {lengths.max()} "
            f"between two tokens {eod}; check --eod and --dtype"
        )
    return lengths.astype(np.int32), data.size - int(ends[-1]) * dtype.itemsize


def _publish(
    lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], source: str, target: str, dialect: str
) -> str:
    """Write the new pair, and return the kind of the link to the .bin."""
    sink = PairSink(*pair_paths(target), dtype, multimodal=False, overwrite=False)
    try:
        link = sink.open_linked(pair_paths(source)[0])
        with sink:
            sink.index.add_sequences(lengths, None)
            sink.index.add_bounds(np.arange(1, len(lengths) + 1))
        sink.publish(code_of_dtype(dtype, get_dialect(dialect)))
        IndexedDataset(target, dialect=dialect).validate()
    except BaseException:
        sink.take_back()
        raise
    finally:
        sink.discard()
    return link
