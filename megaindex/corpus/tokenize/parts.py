"""Division of inputs into independent parts, and row groups of Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from megaindex._lazy import library_needed
from megaindex.corpus.tokenize.inputs import BadRecord, InputFile, Text, TokenizeSettings, decoded
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError
from megaindex.io.paths import storage_error
from megaindex.validation import check_between

_ROWS = 256  # read at once
PART_FORMAT = 3  # increase when the meaning of a part's files changes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of one input: bytes of an uncompressed text file, or row groups of a Parquet file.

    A range of bytes owns the lines that begin in it: with lines of 4 and 6 bytes, 0..5 owns both
    and 5..10 neither. A compressed file is one piece.
    """

    source: InputFile
    begin: int
    end: int
    nbytes: int
    """Bytes of the input, for progress."""


@dataclass(frozen=True, kw_only=True)
class InputPart:
    """Pieces that are tokenized together, in their order."""

    key: str
    """Hash of inputs, settings and tokenizer: 32 hex digits."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def cut(
    sources: Sequence[InputFile], settings: TokenizeSettings, part_bytes: int
) -> list[InputPart]:
    """Return parts of about `part_bytes` each: large files are divided, small ones combined.

    Raises:
        InvalidArgument: `part_bytes` is not positive, or a Parquet file lacks a column.
        FormatError: a Parquet file cannot be read, or its columns hold no text.
    """
    part_bytes = check_between("part_bytes (--part-size)", part_bytes, 1)
    parts: list[InputPart] = []
    pending: list[Piece] = []
    nbytes = 0
    for source in sources:
        for piece in _pieces(source, settings, part_bytes):
            pending.append(piece)
            nbytes += piece.nbytes
            if nbytes >= part_bytes:
                parts.append(_part(pending, settings))
                pending, nbytes = [], 0
    if pending:
        parts.append(_part(pending, settings))
    return parts


def _pieces(source: InputFile, settings: TokenizeSettings, part_bytes: int) -> Iterator[Piece]:
    if source.format == "parquet":
        yield from _row_group_pieces(source, settings, part_bytes)
    elif source.compression or source.format == "files":
        yield Piece(source=source, begin=0, end=source.size, nbytes=source.size)
    else:
        for begin in range(0, source.size, part_bytes):
            end = min(begin + part_bytes, source.size)
            yield Piece(source=source, begin=begin, end=end, nbytes=end - begin)


def _row_group_pieces(
    source: InputFile, settings: TokenizeSettings, part_bytes: int
) -> Iterator[Piece]:
    begin = nbytes = 0
    sizes = row_groups(source, settings.keys)
    for number, size in enumerate(sizes, start=1):
        nbytes += size
        if nbytes >= part_bytes or number == len(sizes):
            yield Piece(source=source, begin=begin, end=number, nbytes=nbytes)
            begin, nbytes = number, 0


def _part(pieces: Sequence[Piece], settings: TokenizeSettings) -> InputPart:
    identity = {
        "part_format": PART_FORMAT,
        "pieces": [asdict(piece) for piece in pieces],
        "settings": settings.identity(),
    }
    text = json.dumps(identity, sort_keys=True)
    return InputPart(key=xxhash.xxh3_128_hexdigest(text.encode()), pieces=tuple(pieces))


def row_groups(source: InputFile, keys: Sequence[str]) -> list[int]:
    """Return the compressed bytes of the columns `keys` in each row group, at least 1.

    Raises:
        FormatError: the file is not Parquet, has no rows, or a column holds no text.
        InvalidArgument: the column does not exist, or pyarrow is not installed.
    """
    path = source.path
    with _opened(source) as file:
        _check_columns(path, file.schema_arrow, keys)
        metadata = file.metadata
        if metadata.num_rows == 0:
            raise FormatError(f"{path}: has 0 rows; leave it out, or write it again")
        return [_size(metadata.row_group(i), keys) for i in range(metadata.num_row_groups)]


def rows_before(source: InputFile, row_group: int) -> int:
    """Return the number of rows before a row group."""
    with _opened(source) as file:
        return sum(file.metadata.row_group(i).num_rows for i in range(row_group))


def rows(source: InputFile, keys: Sequence[str], begin: int, end: int) -> Iterator[tuple[Any, ...]]:
    """Yield rows of the row groups begin to end - 1, as stored: bytes, a list of bytes, or None.

    Raises:
        FormatError: the file is damaged.
        StorageError: it cannot be read.
    """
    import pyarrow as pa

    with _opened(source) as file:
        groups = file.iter_batches(
            batch_size=_ROWS, row_groups=list(range(begin, end)), columns=list(keys)
        )
        try:
            for batch in groups:
                columns = [_as_bytes(batch.column(key)).to_pylist() for key in keys]
                yield from zip(*columns, strict=True)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(source.path, error) from error


def from_row(row: tuple[Any, ...], keys: Sequence[str]) -> tuple[Text, ...]:
    """Return the texts of a row; raise BadRecord, rule type or utf-8."""
    return tuple(_text(value, key) for value, key in zip(row, keys, strict=True))


def _text(value: Any, key: str) -> Text:
    parts = value if isinstance(value, list) else [value]
    if any(part is None for part in parts):
        raise BadRecord("type", f"column {key!r} is null")
    return tuple(decoded(part) for part in parts)


def _as_bytes(column: Any) -> Any:
    """Cast text to bytes, so that invalid UTF-8 fails for its row alone."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain = pa.large_binary()
    return column.cast(pa.large_list(plain) if _is_list(column.type) else plain)


def _check_columns(path: str, schema: Any, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in schema.names:
            raise InvalidArgument(
                f"{path}: has no column {key!r}; choose from {', '.join(schema.names)} with "
                f"--json-keys"
            )
        kind = schema.field(key).type
        if not _is_text(kind.value_type if _is_list(kind) else kind):
            raise FormatError(
                f"{path}: column {key!r} must hold text or lists of text, got {kind}; choose "
                f"another with --json-keys"
            )


def _is_list(kind: Any) -> bool:
    return _is_one_of(kind, "list", "large_list", "fixed_size_list", "list_view", "large_list_view")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return _is_one_of(kind, "string", "large_string", "string_view")


def _is_one_of(kind: Any, *names: str) -> bool:
    """Return True if a type has one of these names, some of which old versions of pyarrow lack."""
    import pyarrow as pa

    checks = (getattr(pa.types, f"is_{name}", None) for name in names)
    return any(check is not None and check(kind) for check in checks)


def _size(group: Any, keys: Sequence[str]) -> int:
    columns = (group.column(i) for i in range(group.num_columns))
    # the path of a nested column begins with the key
    wanted = (c for c in columns if c.path_in_schema.split(".")[0] in keys)
    return max(1, sum(int(c.total_compressed_size) for c in wanted))


def _opened(source: InputFile) -> Any:
    path = source.path
    with library_needed(f"{path}: Parquet files need pyarrow; pip install 'megaindex[parquet]'"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        if not source.is_remote:
            return pq.ParquetFile(path)
        # pre_buffer reads a row group in few requests instead of page by page
        return pq.ParquetFile(pa.PythonFile(source.open(), mode="r"), pre_buffer=True)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, MegaIndexError):
        return error
    if isinstance(error, OSError) and error.errno:
        return storage_error(error, path, "cannot read")
    return FormatError(f"{path}: cannot be read as Parquet: {error}; write the file again")
