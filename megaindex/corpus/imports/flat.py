"""Conversion of opened token files and streams of documents to pairs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.outputs import WriteResult, check_outputs, checked_outcome
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.header import (
    CHUNK,
    DtypeTable,
    code_of_dtype,
    get_dialect,
    integer_array,
    token_array,
)
from megaindex.format.pair import pair_paths
from megaindex.format.provenance import RowFile
from megaindex.format.sink import PairSink
from megaindex.io.mapping import map_readonly
from megaindex.progress import Bar, silent

_LONGEST = np.iinfo(np.int32).max  # lengths are int32 in the .idx
Chunks = Callable[[], Iterator[npt.NDArray[np.int64]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatTokens:
    """Consecutive tokens in a file, from some byte to its end."""

    path: str
    format: str
    """Name of the format, for the provenance."""
    offset: int
    """Bytes before the first token."""
    tokens: npt.NDArray[Any]
    """All tokens as stored, memory-mapped."""
    sequence_ends: Chunks
    """Function that yields the ends of sequences in tokens, rising to the number of tokens."""
    document_bounds: Chunks | None = None
    """Function that yields the ends of documents in sequences; None: a sequence is a document."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentStream:
    """Documents of an input, in batches."""

    dtype: np.dtype[Any]
    """Token type as stored."""
    nbytes: int
    """Bytes of the input."""
    batches: Iterator[Batch]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A few documents: consecutive rows of one file."""

    file: RowFile
    first_row: int
    """Row of the first document, from 0."""
    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    nbytes: int
    """Bytes of the input, for progress."""


def import_pair(
    source: FlatTokens | DocumentStream,
    output: str,
    *,
    dtype: npt.DTypeLike | None = None,
    dialect: str = "megatron",
    copy: bool = False,
    overwrite: bool = False,
    bar: Bar = silent,
) -> WriteResult:
    """Write an opened input as a pair, published whole or not at all.

    Args:
        source: result of `open_nanotron`, `open_numpy`, `open_tntidx`, `open_mds` or
            `open_columns`.
        output: prefix of the new pair.
        dtype: token type of the pair; by default as stored, or int32 for uint32 in a dialect
            without a code for it. Tokens that do not fit are refused.
        dialect: framework that defines the dtype codes: "megatron", "neox" or "paddlenlp".
        copy: copy the tokens even if a link is possible.
        overwrite: replace an existing pair.
        bar: function of the total bytes that returns a function called with bytes done.

    Returns:
        Documents, tokens, token type and bytes of the pair, after a check of all its entries, and
        the kind of its .bin: a link or a copy.

    Raises:
        InvalidArgument: tokens do not fit the type, or the dialect has no code for it.
        FormatError: the input is damaged.
        StorageError: the pair exists, or a file cannot be read or written.
    """
    table = get_dialect(dialect)
    if isinstance(source, DocumentStream):
        check_outputs([output], [], overwrite=overwrite)
        write_stream(source, output, dtype, table, overwrite=overwrite, bar=bar)
        return checked_outcome(output, dialect)
    check_outputs([output], [source.path], overwrite=overwrite)
    target = target_dtype(source, dtype, table)
    how = write_flat(source, output, target, table, copy=copy, overwrite=overwrite, bar=bar)
    stored = source.tokens.dtype
    if how != "copied" and stored != target:
        how += f", {stored} ids below 2^{8 * target.itemsize - 1} read as {target}"
    return checked_outcome(output, dialect, how)


def open_tokens(path: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Map a whole file as tokens; raise FormatError for a partial token at its end."""
    data = map_readonly(path)
    if data.size % dtype.itemsize:
        raise FormatError(
            f"{path}: its size must be a multiple of {dtype.itemsize} bytes, a token of {dtype}, "
            f"got {data.size}; the file is truncated, or holds another type"
        )
    return data.view(dtype)


def token_dtype(name: npt.DTypeLike) -> np.dtype[Any]:
    """Return the NumPy integer type of a stored dtype; raise InvalidArgument for any other."""
    with contextlib.suppress(TypeError):
        dtype = np.dtype(name)
        if dtype.kind in "iu":
            return dtype
    raise InvalidArgument(
        f"stored dtype (--stored-dtype) must be a NumPy integer type such as uint16, got {name!r}"
    )


def target_dtype(
    flat: FlatTokens, asked: npt.DTypeLike | None, dialect: DtypeTable
) -> np.dtype[Any]:
    """Return the token type of the pair: `asked`, else the stored type, else its signed one.

    The dialect of Megatron lacks uint32, whose bytes equal those of int32 if every id is below
    2^31; that is checked in one pass over the tokens.

    Raises:
        InvalidArgument: the dialect has no code for the type, or an id does not fit it.
    """
    stored = flat.tokens.dtype
    target = stored_or_sibling(stored, asked, dialect)
    if target == stored or not _same_bytes(stored, target):
        return target  # a conversion checks every token
    highest = np.iinfo(target).max
    for start in range(0, flat.tokens.size, CHUNK):
        chunk = flat.tokens[start : start + CHUNK]
        if int(chunk.max()) > highest:
            at = start + int((chunk > highest).argmax())
            raise InvalidArgument(
                f"{flat.path}: token {at} is {flat.tokens[at]}, and {target} holds at most "
                f"{highest}; the {dialect.name} dialect has no code for {stored}; choose a wider "
                f"dtype, or the paddlenlp dialect, which has one"
            )
    return target


def stored_or_sibling(
    stored: np.dtype[Any], asked: npt.DTypeLike | None, dialect: DtypeTable
) -> np.dtype[Any]:
    """Return `asked`, else `stored` if the dialect has a code for it, else int32 for uint32."""
    if asked is None:
        stored = stored.newbyteorder("=")
        has_code = stored in dialect.dtypes.values()
        asked = stored if has_code or stored.kind != "u" else f"i{stored.itemsize}"
    return dialect.dtypes[code_of_dtype(asked, dialect)]


def write_flat(
    flat: FlatTokens,
    output: str,
    dtype: np.dtype[Any],
    dialect: DtypeTable,
    *,
    copy: bool,
    overwrite: bool,
    bar: Bar,
) -> str:
    """Write the pair and return "hard link", "symbolic link" or "copied".

    The .bin is a link if the file holds nothing but tokens whose bytes `dtype` reads unchanged.

    Raises:
        InvalidArgument: a token does not fit `dtype`, or a sequence is too long for the format.
        StorageError: the pair exists, or cannot be written.
    """
    is_link = not (copy or flat.offset) and _same_bytes(flat.tokens.dtype, dtype)
    how = "copied"
    sink = PairSink(
        *pair_paths(output), dtype, multimodal=False, overwrite=overwrite, provenance=True
    )
    try:
        if is_link:
            how = sink.open_linked(flat.path)
        else:
            sink.open()
            _copy_tokens(flat, sink, bar)
        with sink:
            _fill(sink, flat)
        sink.publish(code_of_dtype(dtype, dialect))
    finally:
        sink.discard()
    return how


def _same_bytes(stored: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if tokens that fit need no conversion: equal types, or uint32 as int32."""
    if not stored.isnative:
        return False
    unsigned_as_signed = (stored.kind, dtype.kind) == ("u", "i")
    return stored == dtype or (unsigned_as_signed and stored.itemsize == dtype.itemsize)


def _copy_tokens(flat: FlatTokens, sink: PairSink, bar: Bar) -> None:
    stored, of = flat.tokens, f"{flat.path}: tokens"
    progress = bar(stored.nbytes)
    with sink:
        if _same_bytes(stored.dtype, sink.dtype) and stored.size:
            size = flat.offset + stored.nbytes
            sink.copy_bytes(flat.path, size, flat.offset, stored.nbytes, progress)
            return
        for start in range(0, stored.size, CHUNK):
            chunk = stored[start : start + CHUNK]
            sink.write_tokens(token_array(chunk, sink.dtype, first=start, of=of))
            progress(chunk.nbytes)


def _fill(sink: PairSink, flat: FlatTokens) -> None:
    """Write lengths and document bounds, with a check of every end, and the provenance."""
    spool = sink.index
    before = 0
    for ends in flat.sequence_ends():
        lengths = np.diff(ends, prepend=before)
        bad = (lengths < 0) | (lengths > _LONGEST)
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"{flat.path}: sequence {spool.num_sequences + i} ends at token {ends[i]}: lengths "
                f"must be from 0 to {_LONGEST} tokens, got {lengths[i]}; check the boundaries"
            )
        first = spool.num_sequences
        spool.add_sequences(lengths, None)
        if flat.document_bounds is None:
            spool.add_bounds(np.arange(first + 1, first + 1 + len(ends), dtype=np.int64))
            edges = np.concatenate(([before], ends)) * flat.tokens.dtype.itemsize + flat.offset
            _add_rows(sink, flat, first, edges, has_bytes=True)
        before = int(ends[-1])
    if before != flat.tokens.size:
        raise FormatError(
            f"{flat.path}: the last sequence must end at token {flat.tokens.size}, the end of the "
            f"file, got {before}; check that the boundaries belong to this file"
        )
    if flat.document_bounds is not None:
        for bounds in flat.document_bounds():
            first = spool.num_bounds - 1
            spool.add_bounds(bounds)
            _add_rows(sink, flat, first, np.zeros(len(bounds) + 1, np.int64), has_bytes=False)


def _add_rows(
    sink: PairSink,
    flat: FlatTokens,
    first: int,
    edges: npt.NDArray[np.int64],
    *,
    has_bytes: bool,
) -> None:
    """Add the origins of documents from number `first` on, with their `edges` in bytes."""
    assert sink.provenance is not None, "imports have one"
    file = RowFile(path=os.path.abspath(flat.path), format=flat.format, has_bytes=has_bytes)
    rows = np.arange(first, first + edges.size - 1)
    sink.provenance.add_file(file, rows, edges[:-1], edges[1:])


def write_stream(
    stream: DocumentStream,
    output: str,
    dtype: npt.DTypeLike | None,
    dialect: DtypeTable,
    *,
    overwrite: bool,
    bar: Bar,
) -> None:
    target = stored_or_sibling(stream.dtype, dtype, dialect)
    progress = bar(stream.nbytes)
    sink = PairSink(
        *pair_paths(output), target, multimodal=False, overwrite=overwrite, provenance=True
    )
    try:
        sink.open()
        for batch in stream.batches:
            _add_batch(sink, batch)
            progress(batch.nbytes)
        sink.publish(code_of_dtype(target, dialect))
    finally:
        sink.discard()


def _add_batch(sink: PairSink, batch: Batch) -> None:
    assert sink.provenance is not None, "imports have one"
    try:
        of = f"from {batch.file.row_name} {batch.first_row} on, tokens"
        tokens = token_array(batch.tokens, sink.dtype, of=of)
        lengths = integer_array(batch.lengths, "document_lengths", 0, _LONGEST)
    except InvalidArgument as error:
        raise InvalidArgument(f"{batch.file.path}: {error}") from error
    with sink:
        first = sink.index.num_sequences
        sink.write_tokens(tokens)
        sink.index.add_sequences(lengths, None)
        sink.index.add_bounds(np.arange(first + 1, first + 1 + lengths.size))
        nothing = np.zeros(lengths.size, np.int64)
        rows = np.arange(batch.first_row, batch.first_row + lengths.size)
        sink.provenance.add_file(batch.file, rows, nothing, nothing)
