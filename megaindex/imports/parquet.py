"""Columns of token lists in Parquet and Arrow files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megaindex.errors import FormatError, InvalidArgument, MegaIndexError, MissingFile
from megaindex.format.provenance import RowFile
from megaindex.imports.flat import Batch, DocumentStream
from megaindex.io.os_errors import as_storage_error, storage_error
from megaindex.io.paths import check_file, check_local
from megaindex.objects.files import stat_path

_ROWS = 1 << 12  # rows read at once
_USUAL = ("tokens", "input_ids")


def open_columns(path: str, column: str | None = None) -> DocumentStream:
    """Open the token lists of Parquet or Arrow files; each row is a document.

    Args:
        path: a `.parquet`, `.arrow` or `.feather` file, or a folder of them, read in the order of
            their names. Arrow files may have the file or the stream format.
        column: column of token lists; by default `tokens` or `input_ids`, or the only column.

    Returns:
        The documents, read in batches, for `import_pair`.

    Raises:
        MissingFile: `path` does not exist, or the folder holds no such file.
        StorageError: a pipe or a device.
        InvalidArgument: pyarrow is not installed, or the column does not exist.
        FormatError: a file cannot be read, or the column holds no lists of integers.
    """
    check_local(path, "copy it to a disk")
    _require_pyarrow()
    files = _files(path)
    schema = _reader(files[0])[0]
    name = column or _usual_column(schema.names, files[0])
    dtype = _item_type(schema, name, files[0])
    return DocumentStream(
        dtype=dtype,
        nbytes=sum(os.path.getsize(file) for file in files),
        batches=(batch for file in files for batch in _batches(file, name, dtype)),
    )


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InvalidArgument(
            "Parquet and Arrow files need pyarrow; pip install 'megaindex[parquet]'"
        ) from None


def _files(path: str) -> list[str]:
    if stat_path(path) is None:
        raise MissingFile(f"{path}: does not exist; check the path")
    if not os.path.isdir(path):
        return [path]
    suffixes = (".parquet", ".arrow", ".feather")
    with as_storage_error(path, "cannot list"):
        files = sorted(str(file) for file in Path(path).iterdir() if file.suffix in suffixes)
    if not files:
        raise MissingFile(
            f"{path}: holds no file that ends in {' or '.join(suffixes)}; check the path"
        )
    return files


def _reader(path: str) -> tuple[Any, Iterator[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_file(path)
    try:
        if path.endswith(".parquet"):
            file = pq.ParquetFile(path)
            return file.schema_arrow, file.iter_batches(batch_size=_ROWS)
        source = pa.memory_map(path)
        try:
            opened = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            stream = pa.ipc.open_stream(pa.memory_map(path))
            return stream.schema, iter(stream)
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        return opened.schema, batches
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _usual_column(names: list[str], path: str) -> str:
    for name in names if len(names) == 1 else _USUAL:
        if name in names:
            return name
    raise InvalidArgument(f"{path}: column must be given, one of {', '.join(names)}")


def _item_type(schema: Any, name: str, path: str) -> np.dtype[Any]:
    import pyarrow as pa

    if name not in schema.names:
        raise InvalidArgument(
            f"{path}: has no column {name!r}; choose one of {', '.join(schema.names)}"
        )
    kind = schema.field(name).type
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not pa.types.is_integer(kind.value_type):
        raise FormatError(
            f"{path}: column {name!r} must hold lists of integers, got {kind}; choose another"
        )
    dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
    return dtype


def _batches(path: str, name: str, dtype: np.dtype[Any]) -> Iterator[Batch]:
    import pyarrow as pa
    import pyarrow.compute as pc

    schema, records = _reader(path)
    if _item_type(schema, name, path) != dtype:
        raise FormatError(
            f"{path}: column {name!r} must hold lists of {dtype} as in the files before, got "
            f"{schema.field(name).type}; import the files one at a time and merge with a dtype"
        )
    rows = 0
    size = os.path.getsize(path)
    file = RowFile(path=os.path.abspath(path), format="columns", size=size, key=name)
    try:
        for record in records:
            lists = record.column(name)
            tokens = lists.flatten()
            if lists.null_count or tokens.null_count:
                raise FormatError(
                    f"{path}: column {name!r} has nulls in rows {rows} to {rows + len(lists)}; "
                    f"drop or fill them"
                )
            rows += len(lists)
            yield Batch(
                file=file,
                first_row=rows - len(lists),
                tokens=tokens.to_numpy(),
                lengths=pc.list_value_length(lists).to_numpy().astype(np.int64),
                nbytes=0,
            )
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, MegaIndexError):
            raise
        raise _unreadable(path, error) from error
    nothing = np.empty(0, np.int64)
    yield Batch(file=file, first_row=rows, tokens=nothing, lengths=nothing, nbytes=size)


def _unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno:
        return storage_error(error, path, "cannot read")
    return FormatError(f"{path}: cannot be read: {error}; write the file again")
