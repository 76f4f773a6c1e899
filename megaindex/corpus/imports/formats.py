"""Formats of token files of other systems.

Flat files of datatrove and Nanotron, of NumPy, and of Megatron's old format; token lists in columns
of Parquet and Arrow files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._lazy import library_needed
from megaindex.corpus.imports.flat import (
    Batch,
    Chunks,
    DocumentStream,
    FlatTokens,
    open_tokens,
    token_dtype,
)
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format.header import CHUNK
from megaindex.format.legacy import open_legacy
from megaindex.format.provenance import RowFile
from megaindex.io.atomic import Damaged, read_object
from megaindex.io.mapping import map_npy_file, map_readonly
from megaindex.io.paths import as_storage_error, check_file, check_local, storage_error
from megaindex.objects.files import stat_path

logger = logging.getLogger("megaindex")


def open_nanotron(path: str) -> FlatTokens:
    """Open a `.ds` file of datatrove's DocumentTokenizer, as Nanotron reads it.

    `<path>.index` holds uint64 document ends in tokens; the last of them and the size of the file
    determine the token type, uint16 or uint32. A loss mask `<path>.loss` is not imported.

    Args:
        path: path of the `.ds` file.

    Returns:
        The tokens and document ends, for `import_pair`.

    Raises:
        MissingFile: the tokens or their index do not exist.
        FormatError: the two do not belong together.
    """
    index_path = f"{path}.index"
    ends = open_tokens(index_path, np.dtype("<u8")).view(np.int64)
    nbytes = map_readonly(path).size
    count = int(ends[-1]) if ends.size else 0
    if nbytes not in (2 * count, 4 * count):
        raise FormatError(
            f"{path}: must have 2 or 4 bytes for each of the {count} tokens in {index_path}, got "
            f"{nbytes} bytes; check that they belong together"
        )
    if os.path.exists(f"{path}.loss"):
        logger.warning("%s.loss: the loss mask is not imported", path)
    dtype = np.dtype("<u4" if nbytes == 4 * count and count else "<u2")
    return FlatTokens(
        path=path,
        format="nanotron",
        offset=0,
        tokens=open_tokens(path, dtype),
        sequence_ends=_in_chunks(ends),
    )


def open_numpy(
    path: str,
    *,
    stored_dtype: npt.DTypeLike | None = None,
    separator: int | None = None,
    boundaries: str | None = None,
) -> FlatTokens:
    """Open the tokens of a `.npy` file, or of any file without a header.

    OLMo and dolma write raw tokens into files of that name: its first bytes decide.

    Args:
        path: `.npy`, or raw tokens of `stored_dtype`.
        stored_dtype: integer type of raw tokens, such as "uint16"; not for a `.npy`.
        separator: id that ends each document, kept as its last token. Tokens after the last
            separator are a document too.
        boundaries: path of a `.npy` of document ends in tokens, with or without a leading 0.
            Exactly one of `separator` and `boundaries` is needed.

    Returns:
        The tokens and document ends, for `import_pair`.

    Raises:
        MissingFile: a file does not exist.
        FormatError: a file is not an array of integers in one dimension.
        InvalidArgument: `stored_dtype` is missing, or given for a `.npy`; there is not exactly
            one of `separator` and `boundaries`; or no token can be, or is, the separator.
    """
    path = os.fspath(path)
    if (separator is None) == (boundaries is None):
        raise InvalidArgument(
            "exactly one of separator (id that ends each document) and boundaries (.npy file of "
            "document ends) must be given"
        )
    if path.endswith(".npy") and _has_header(path):
        if stored_dtype is not None:
            raise InvalidArgument(
                f"{path}: a .npy file has a dtype of its own, got stored dtype (--stored-dtype) "
                f"{stored_dtype}; leave it out"
            )
        tokens, offset = _map_npy(path)
    elif stored_dtype is None:
        header = "has no .npy header; " * path.endswith(".npy")
        raise InvalidArgument(
            f"{path}: {header}raw tokens need a stored dtype (--stored-dtype); give e.g. uint16"
        )
    else:
        tokens, offset = open_tokens(path, token_dtype(stored_dtype)), 0
    if separator is None:
        ends = _in_chunks(_ends(str(boundaries)))
    else:
        ends = _ends_at(path, tokens, separator)
    return FlatTokens(path=path, format="numpy", offset=offset, tokens=tokens, sequence_ends=ends)


def open_tntidx(path_prefix: str, dialect: str) -> FlatTokens:
    """Open a pair of Megatron's old format TNTIDX (--dataset-impl lazy or cached).

    Args:
        path_prefix: prefix of the `.bin` and `.idx`.
        dialect: framework that defines the dtype codes: "megatron", "neox" or "paddlenlp".

    Returns:
        The tokens, sequence ends and document ends, for `import_pair`.

    Raises:
        FormatError: the pair is damaged, or its documents do not cover its sequences.
    """
    pair = open_legacy(os.fspath(path_prefix), dialect=dialect)
    if pair.bounds[-1] != len(pair.sizes):
        raise FormatError(
            f"{pair.idx_path}: its documents must end at sequence {len(pair.sizes)}, got "
            f"{pair.bounds[-1]}, as after a merge; import the files it was made of and merge them"
        )
    return FlatTokens(
        path=pair.bin_path,
        format="tntidx",
        offset=0,
        tokens=pair.tokens,
        sequence_ends=_in_chunks(pair.token_offsets[1:]),
        document_bounds=_in_chunks(pair.bounds[1:]),
    )


def _has_header(path: str) -> bool:
    """Return True if a file begins as one of format `.npy`."""
    check_local(path, "copy it to a disk")
    check_file(path, "cannot read")
    with as_storage_error(path, "cannot read"), open(path, "rb") as file:
        return file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX


def _map_npy(path: str) -> tuple[npt.NDArray[Any], int]:
    """Map the integers of a .npy; return them and their offset in bytes."""
    check_local(path, "copy it to a disk")
    try:
        array = map_npy_file(path)
    except ValueError as error:
        raise FormatError(f"{path}: not a valid .npy file: {error}; write it again") from error
    if (
        not isinstance(array, np.memmap)
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        or not array.dtype.isnative
    ):
        raise FormatError(
            f"{path}: must hold little-endian integers in one dimension, got {array.dtype} of "
            f"shape {array.shape}; write it again"
        )
    return array, int(array.offset)


def _ends(path: str) -> npt.NDArray[np.int64]:
    bounds, _ = _map_npy(path)
    ends = bounds[1:] if bounds.size and bounds[0] == 0 else bounds
    # a uint64 above 2^63 becomes negative and is refused later
    return ends.view(np.int64) if ends.dtype.itemsize == 8 else ends.astype(np.int64)


def _in_chunks(ends: npt.NDArray[np.int64]) -> Chunks:
    def chunks() -> Iterator[npt.NDArray[np.int64]]:
        for start in range(0, len(ends), CHUNK):
            yield ends[start : start + CHUNK].astype(np.int64)

    return chunks


def _ends_at(path: str, tokens: npt.NDArray[Any], separator: int) -> Chunks:
    bounds = np.iinfo(tokens.dtype)
    if not bounds.min <= separator <= bounds.max:
        raise InvalidArgument(
            f"{path}: separator must be a {tokens.dtype}, from {bounds.min} to {bounds.max}, got "
            f"{separator}; give the id that ends documents"
        )

    def chunks() -> Iterator[npt.NDArray[np.int64]]:
        last = 0
        for start in range(0, len(tokens), CHUNK):
            found = np.flatnonzero(tokens[start : start + CHUNK] == separator) + (start + 1)
            if found.size:
                last = int(found[-1])
                yield found
        if not last and len(tokens):
            raise InvalidArgument(
                f"{path}: no token is the separator {separator}, so that the file would be one "
                "document; give the id that ends documents, or boundaries"
            )
        if last < len(tokens):
            yield np.array([len(tokens)], dtype=np.int64)

    return chunks


_ROWS = 1 << 12  # rows read at once
_USUAL = ("tokens", "input_ids")


def open_columns(path: str, column: str | None = None) -> DocumentStream:
    """Open the token lists of Parquet or Arrow files; each row is a document.

    Args:
        path: a `.parquet`, `.arrow` or `.feather` file, or a folder of them, read in the order of
            their names. Arrow files may have the file or the stream format. Of a folder of Hugging
            Face's ``save_to_disk`` the files of its ``state.json`` are read, in that order.
        column: column of token lists; by default `tokens` or `input_ids`, or the only column.

    Returns:
        The documents, read in batches, for `import_pair`.

    Raises:
        MissingFile: `path` does not exist, or the folder holds no such file.
        StorageError: a pipe or a device.
        InvalidArgument: pyarrow is not installed, or the column does not exist.
        FormatError: a file cannot be read, or the column holds no lists of integers.
    """
    path = os.fspath(path)
    check_local(path, "copy it to a disk")
    with library_needed("Parquet and Arrow files need pyarrow; pip install 'megaindex[parquet]'"):
        import pyarrow.parquet  # noqa: F401
    files = _files(path)
    schema = _reader(files[0])[0]
    name = column or _usual_column(schema.names, files[0])
    dtype = _item_type(schema, name, files[0])
    return DocumentStream(
        dtype=dtype,
        nbytes=sum(os.path.getsize(file) for file in files),
        batches=(batch for file in files for batch in _batches(file, name, dtype)),
    )


def _files(path: str) -> list[str]:
    if stat_path(path) is None:
        raise MissingFile(f"{path}: does not exist; check the path")
    if not os.path.isdir(path):
        return [path]
    suffixes = (".parquet", ".arrow", ".feather")
    with as_storage_error(path, "cannot list"):
        there = sorted(str(file) for file in Path(path).iterdir())
    files = _saved(path) or [
        each
        for each in there
        if each.endswith(suffixes) and not os.path.basename(each).startswith("cache-")
    ]
    if not files:
        raise MissingFile(
            f"{path}: holds no file that ends in {' or '.join(suffixes)}; check the path"
        )
    described = (*_OF_DATASETS, *map(os.path.basename, files))
    left = [each for each in map(os.path.basename, there) if each not in described]
    if left:
        logger.warning(
            "%s: %d files and folders in it are skipped, first %s", path, len(left), left[0]
        )
    return files


_OF_DATASETS = ("state.json", "dataset_info.json")


def _saved(folder: str) -> list[str]:
    """Return the files of a folder that Hugging Face's datasets saved; none of another folder.

    Raises:
        FormatError: its `state.json` names none, or files elsewhere.
    """
    state = f"{folder}/state.json"
    if not os.path.exists(state):
        return []
    try:
        names = [str(each["filename"]) for each in read_object(state)["_data_files"]]
    except (Damaged, KeyError, TypeError) as error:
        raise FormatError(
            f"{state}: must list the files of the dataset in _data_files; save it again"
        ) from error
    if not names or any(os.path.basename(name) != name for name in names):
        raise FormatError(f"{state}: _data_files must be names of files in its folder, got {names}")
    return [os.path.join(folder, name) for name in names]


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
                    f"{path}: column {name!r} has nulls in rows {rows} to {rows + len(lists) - 1}; "
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
        raise _unreadable(path, error) from error
    nothing = np.empty(0, np.int64)
    yield Batch(file=file, first_row=rows, tokens=nothing, lengths=nothing, nbytes=size)


def _unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno:
        return storage_error(error, path, "cannot read")
    return FormatError(f"{path}: cannot be read: {error}; write the file again")
