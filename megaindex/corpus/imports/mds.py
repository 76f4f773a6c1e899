"""MDS shards of MosaicML Streaming, as LLM-Foundry writes them: a sample becomes a document.

A folder holds index.json, which names the shards and the encoding of their columns. A shard is

    uint32                  n, the number of samples
    uint32 × (n + 1)        where each sample begins, and where the last ends, in bytes
    JSON                    the columns once more
    samples                 uint32 sizes of the columns without a fixed size; then the columns
"""

from __future__ import annotations

import bz2
import gzip
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.imports.mds_columns import Column, find_column
from megaindex.corpus.imports.stream import Batch, Stream
from megaindex.errors import FormatError, InvalidArgument
from megaindex.io.failures import as_storage_error
from megaindex.io.json_files import Damaged, is_size, read_object
from megaindex.io.kinds import check_file
from megaindex.io.locations import check_local

_BATCH_TOKENS = 1 << 18  # tokens written together
_REMEDY = "copy the shard again, or write it again"


@dataclass(frozen=True, kw_only=True)
class _Shard:
    path: str
    """Of the file to read, compressed or not."""
    compression: str | None
    nbytes: int
    """Uncompressed."""
    samples: int
    column: Column


def open_mds(
    folder: str, column: str | None = None, stored_dtype: npt.DTypeLike | None = None
) -> Stream:
    """The samples of an MDS folder, shard by shard, each read once from front to end.

    Args:
        column: its name; by default `tokens` or `input_ids`, or the only column.
        stored_dtype: token type of a `bytes` column, which does not say it; by default int64, the
            convention of LLM-Foundry.

    Raises:
        MissingFile: index.json or a shard is not there.
        FormatError: index.json or a shard is damaged.
        InvalidArgument: no column fits, or the shards' compression is not installed.
    """
    shards = _read_index(folder, column, stored_dtype)
    types = {shard.column.dtype for shard in shards}
    if len(types) != 1:
        raise FormatError(
            f"{folder}: its shards hold {' and '.join(sorted(map(str, types))) or 'nothing'}; "
            f"import a folder of shards with one token type"
        )
    return Stream(
        dtype=types.pop(),
        nbytes=sum(shard.nbytes for shard in shards),
        batches=(batch for shard in shards for batch in _batches(shard)),
    )


def _read_index(
    folder: str, column: str | None, stored_dtype: npt.DTypeLike | None
) -> list[_Shard]:
    check_local(folder, "copy it to a disk")
    path = os.path.join(folder, "index.json")
    try:
        with as_storage_error(path, "cannot read"):
            entries = read_object(path)["shards"]
        return [_shard(folder, entry, column, stored_dtype) for entry in entries]
    except (KeyError, TypeError, Damaged) as error:
        reason = error if isinstance(error, Damaged) else f"{type(error).__name__} {error}"
        raise FormatError(
            f"{path}: not an index of MDS shards: {reason}; write it again"
        ) from error


def _shard(
    folder: str, entry: Any, column: str | None, stored_dtype: npt.DTypeLike | None
) -> _Shard:
    if (entry["format"], entry["version"]) != ("mds", 2):
        raise FormatError(
            f"{folder}: holds shards of format {entry['format']} version {entry['version']}, and "
            f"only mds version 2 is known"
        )
    raw, packed = entry["raw_data"], entry["zip_data"]
    path, compression = _inside(folder, raw["basename"]), None
    if packed is not None and not os.path.exists(path):
        path, compression = _inside(folder, packed["basename"]), str(entry["compression"])
    names, encodings = entry["column_names"], entry["column_encodings"]
    return _Shard(
        path=path,
        compression=compression,
        nbytes=_size(raw, "bytes"),
        samples=_size(entry, "samples"),
        column=find_column(names, encodings, entry["column_sizes"], column, stored_dtype, folder),
    )


def _size(entry: Any, name: str) -> int:
    size: int = entry[name]
    if not is_size(size):
        raise TypeError(f"{name} must be a size, found {size!r}")
    return size


def _inside(folder: str, name: Any) -> str:
    """The path of a shard; merged indices name shards in folders below."""
    if not isinstance(name, str) or "\0" in name:
        raise TypeError(f"basename must be the name of a file, found {name!r}")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise FormatError(
            f"{folder}/index.json: names the shard {name!r}, outside its folder; write it again"
        )
    return os.path.join(folder, name)


def _batches(shard: _Shard) -> Iterator[Batch]:
    arrays: list[npt.NDArray[Any]] = []
    held = nbytes = 0
    for sample in _samples(shard):
        arrays.append(shard.column.decode(sample, shard.path))
        held += arrays[-1].size
        nbytes += len(sample)
        if held >= _BATCH_TOKENS:
            yield _batch(shard, arrays, nbytes)
            arrays, held, nbytes = [], 0, 0
    if arrays:
        yield _batch(shard, arrays, nbytes)


def _batch(shard: _Shard, arrays: Sequence[npt.NDArray[Any]], nbytes: int) -> Batch:
    return Batch(
        where=shard.path,
        tokens=np.concatenate(arrays),
        lengths=np.array([array.size for array in arrays], dtype=np.int64),
        nbytes=nbytes,
    )


def _samples(shard: _Shard) -> Iterator[bytes]:
    with as_storage_error(shard.path, "cannot read"), _open(shard) as stream:
        yield from _parse(stream, shard)


def _parse(stream: IO[bytes], shard: _Shard) -> Iterator[bytes]:
    (count,) = struct.unpack("<I", _exactly(stream, 4, shard))
    if count != shard.samples:
        raise FormatError(
            f"{shard.path}: holds {count} samples, index.json says {shard.samples}; {_REMEDY}"
        )
    ends = np.frombuffer(_exactly(stream, 4 * (count + 1), shard), "<u4").astype(np.int64)
    head = 4 + 4 * (count + 1)
    if ends[0] < head or (np.diff(ends) < 0).any() or ends[-1] != shard.nbytes:
        raise FormatError(
            f"{shard.path}: its samples take bytes {ends[0]} to {ends[-1]}, and must rise from "
            f"{head} or more to the end at {shard.nbytes}; {_REMEDY}"
        )
    _exactly(stream, int(ends[0]) - head, shard)
    for size in np.diff(ends).tolist():
        yield _exactly(stream, size, shard)
    if _read(stream, 1, shard):  # the end is also where gzip checks its checksum
        raise FormatError(f"{shard.path}: goes on behind byte {shard.nbytes}; {_REMEDY}")


def _exactly(stream: IO[bytes], size: int, shard: _Shard) -> bytes:
    data = _read(stream, size, shard)
    if len(data) < size:
        raise FormatError(
            f"{shard.path}: ends early: {shard.nbytes} bytes were expected; {_REMEDY}"
        )
    return data


def _read(stream: IO[bytes], size: int, shard: _Shard) -> bytes:
    try:
        return stream.read(size)
    except Exception as error:  # each decompressor has errors of its own
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise
        raise FormatError(f"{shard.path}: cannot be unpacked: {error}; {_REMEDY}") from error


def _open(shard: _Shard) -> Any:
    kind = (shard.compression or "").partition(":")[0]
    check_file(shard.path, "cannot read")
    if not kind:
        return open(shard.path, "rb")
    if kind == "gz":
        return gzip.open(shard.path, "rb")
    if kind == "bz2":
        return bz2.open(shard.path, "rb")
    if kind != "zstd":
        raise InvalidArgument(
            f"{shard.path}: is compressed with {kind}, and only zstd, gz and bz2 are known; "
            f"unpack the shards first"
        )
    try:
        import zstandard
    except ImportError:
        raise InvalidArgument(
            f"{shard.path}: is compressed with zstd; pip install 'megaindex[zstd]'"
        ) from None
    return zstandard.open(shard.path, "rb")
