"""MDS shards of MosaicML Streaming and LLM-Foundry.

A folder holds index.json, which lists the shards and the encodings of their columns. A shard is

    uint32                  n, the number of samples
    uint32 × (n + 1)        begin of each sample, and end of the last, in bytes
    JSON                    the columns again
    samples                 uint32 sizes of the columns of variable size; then the columns
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

from megaindex._lazy import library_needed
from megaindex.corpus.imports.flat import Batch, DocumentStream, token_dtype
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.provenance import RowFile
from megaindex.io.atomic import Damaged, is_size, read_object
from megaindex.io.paths import as_storage_error, check_file, check_local

_USUAL = ("tokens", "input_ids")
_DTYPE_BYTES = {
    "uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33,
    "uint64": 64, "int64": 65,
}  # fmt: skip
_BATCH_TOKENS = 1 << 18  # tokens written together
_REMEDY = "copy the shard again, or write it again"


def open_mds(
    folder: str, column: str | None = None, stored_dtype: npt.DTypeLike | None = None
) -> DocumentStream:
    """Open the samples of an MDS folder, each a document.

    Args:
        folder: folder with index.json and the shards, compressed or not.
        column: column of tokens; by default `tokens` or `input_ids`, or the only column.
        stored_dtype: token type of a `bytes` column; by default int64, as in LLM-Foundry.

    Returns:
        The documents, read shard by shard, for `import_pair`.

    Raises:
        MissingFile: index.json or a shard does not exist.
        FormatError: index.json or a shard is damaged.
        InvalidArgument: no column fits, or the shards' compression is not installed.
    """
    folder = os.fspath(folder)
    shards = _read_index(folder, column, stored_dtype)
    types = {shard.column.dtype for shard in shards}
    if len(types) != 1:
        raise FormatError(
            f"{folder}: all shards must have one token type, got "
            f"{' and '.join(sorted(map(str, types))) or 'no shards'}; import a folder of one type"
        )
    return DocumentStream(
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
            f"{folder}: shards must be of format mds version 2, got {entry['format']} version "
            f"{entry['version']}; convert them first"
        )
    raw, compressed = entry["raw_data"], entry["zip_data"]
    path, compression = _inside(folder, raw["basename"]), None
    if compressed is not None and not os.path.exists(path):
        path, compression = _inside(folder, compressed["basename"]), str(entry["compression"])
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
    """Return the path of a shard, which may lie in a subfolder."""
    if not isinstance(name, str) or "\0" in name:
        raise TypeError(f"basename must be the name of a file, found {name!r}")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise FormatError(
            f"{folder}/index.json: a shard must lie in its folder, got {name!r}; write it again"
        )
    return os.path.join(folder, name)


@dataclass(frozen=True, kw_only=True)
class _Shard:
    path: str
    """Path of the file, compressed or not."""
    compression: str | None
    nbytes: int
    """Uncompressed bytes."""
    samples: int
    column: MdsColumn


def _batches(shard: _Shard) -> Iterator[Batch]:
    file = RowFile(path=os.path.abspath(shard.path), format="mds", key=shard.column.name)
    arrays: list[npt.NDArray[Any]] = []
    held = nbytes = row = 0
    for sample in _samples(shard):
        arrays.append(shard.column.decode(sample, shard.path))
        held += arrays[-1].size
        nbytes += len(sample)
        if held >= _BATCH_TOKENS:
            yield _batch(file, row, arrays, nbytes)
            row += len(arrays)
            arrays, held, nbytes = [], 0, 0
    if arrays:
        yield _batch(file, row, arrays, nbytes)


def _batch(file: RowFile, row: int, arrays: Sequence[npt.NDArray[Any]], nbytes: int) -> Batch:
    return Batch(
        file=file,
        first_row=row,
        tokens=np.concatenate(arrays),
        lengths=np.array([array.size for array in arrays], dtype=np.int64),
        nbytes=nbytes,
    )


def _samples(shard: _Shard) -> Iterator[bytes]:
    with as_storage_error(shard.path, "cannot read"), _open(shard) as stream:
        (count,) = struct.unpack("<I", _exactly(stream, 4, shard))
        if count != shard.samples:
            raise FormatError(
                f"{shard.path}: must hold {shard.samples} samples, got {count}; {_REMEDY}"
            )
        ends = np.frombuffer(_exactly(stream, 4 * (count + 1), shard), "<u4").astype(np.int64)
        head = 4 + 4 * (count + 1)
        if ends[0] < head or (np.diff(ends) < 0).any() or ends[-1] != shard.nbytes:
            raise FormatError(
                f"{shard.path}: offsets of samples must rise from {head} or more to "
                f"{shard.nbytes}, got {ends[0]} to {ends[-1]}; {_REMEDY}"
            )
        _exactly(stream, int(ends[0]) - head, shard)
        for size in np.diff(ends).tolist():
            yield _exactly(stream, size, shard)
        if _read(stream, 1, shard):  # gzip verifies its checksum at the end
            raise FormatError(f"{shard.path}: must end at byte {shard.nbytes}; {_REMEDY}")


def _exactly(stream: IO[bytes], size: int, shard: _Shard) -> bytes:
    data = _read(stream, size, shard)
    if len(data) < size:
        raise FormatError(f"{shard.path}: ends before byte {shard.nbytes}; {_REMEDY}")
    return data


def _read(stream: IO[bytes], size: int, shard: _Shard) -> bytes:
    try:
        return stream.read(size)
    except Exception as error:  # decompressors raise errors of different types
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise
        raise FormatError(f"{shard.path}: cannot be decompressed: {error}; {_REMEDY}") from error


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
            f"{shard.path}: compression must be zstd, gz or bz2, got {kind}; decompress the shards "
            f"first"
        )
    with library_needed(f"{shard.path}: is compressed with zstd; pip install 'megaindex[zstd]'"):
        import zstandard
    return zstandard.open(shard.path, "rb")


@dataclass(frozen=True, kw_only=True)
class MdsColumn:
    """Position and encoding of the tokens in a sample."""

    name: str
    dtype: np.dtype[Any]
    size: int | None
    """Bytes, if the same in all samples."""
    num_sizes: int
    """Number of uint32 sizes at the front of each sample."""
    sizes_before: int
    """Number of them that belong to preceding columns."""
    bytes_before: int
    """Bytes of preceding columns of fixed size."""
    dtype_in_data: bool = False
    """An ndarray whose type is stored with each sample."""
    shape_in_data: bool = False
    """An ndarray whose shape is stored with each sample."""

    def decode(self, sample: bytes, path: str) -> npt.NDArray[Any]:
        """Return the tokens of a sample; raise FormatError if it is damaged."""
        if len(sample) < 4 * self.num_sizes:
            raise self._damaged(path, f"a sample has {len(sample)} bytes")
        sizes = struct.unpack_from(f"<{self.num_sizes}I", sample)
        begin = 4 * self.num_sizes + self.bytes_before + sum(sizes[: self.sizes_before])
        size = sizes[self.sizes_before] if self.size is None else self.size
        data = sample[begin : begin + size]
        if len(data) < size:
            raise self._damaged(path, f"has {len(data)} of {size} bytes")
        if self.dtype_in_data:
            data = self._without_dtype(data, path)
        if self.shape_in_data:
            data = self._without_shape(data, path)
        if len(data) % self.dtype.itemsize:
            raise self._damaged(
                path,
                f"{len(data)} bytes are not whole tokens of {self.dtype}, {self.dtype.itemsize} "
                f"bytes each",
            )
        return np.frombuffer(data, self.dtype)

    def _without_dtype(self, data: bytes, path: str) -> bytes:
        expected = _DTYPE_BYTES[str(self.dtype)]
        if data[:1] != bytes([expected]):
            raise self._damaged(
                path, f"an array has type code {data[:1].hex()}, and {self.dtype} is {expected:x}"
            )
        return data[1:]

    def _without_shape(self, data: bytes, path: str) -> bytes:
        """Remove the header: a byte of the number of axes and the width of lengths, and these."""
        axes, width = (data[0] >> 2, 1 << (data[0] & 3)) if data else (0, 1)
        length = int.from_bytes(data[1 : 1 + width], "little")
        values = data[1 + width :]
        if axes != 1 or length * self.dtype.itemsize != len(values):
            raise self._damaged(
                path,
                f"an array has {axes} axes, length {length} and {len(values)} bytes; token arrays "
                f"have one axis",
            )
        return values

    def _damaged(self, path: str, what: str) -> FormatError:
        return FormatError(
            f"{path}: column {self.name!r}: {what}; check the column and its stored type"
        )


def find_column(
    names: Sequence[str],
    encodings: Sequence[str],
    sizes: Sequence[int | None],
    wanted: str | None,
    stored_dtype: npt.DTypeLike | None,
    folder: str,
) -> MdsColumn:
    """Return the column `wanted`, by default a usual one or the only one.

    Raises:
        InvalidArgument: no such column.
        TypeError: names, encodings or sizes are of wrong types.
    """
    _check_lists(names, encodings, sizes)
    usual = names if len(names) == 1 else [name for name in _USUAL if name in names]
    name = wanted if wanted is not None else next(iter(usual), None)
    if name is None or name not in names:
        raise InvalidArgument(
            f"{folder}: has no column {name or 'of tokens'}; choose one of {', '.join(names)}"
        )
    at = list(names).index(name)
    return MdsColumn(
        name=name,
        size=sizes[at],
        num_sizes=sum(size is None for size in sizes),
        sizes_before=sum(size is None for size in sizes[:at]),
        bytes_before=sum(size or 0 for size in sizes[:at]),
        **_encoding(encodings[at], stored_dtype, f"{folder}: column {name!r}"),
    )


def _check_lists(names: Any, encodings: Any, sizes: Any) -> None:
    for name, values, kinds in (
        ("names", names, (str,)),
        ("encodings", encodings, (str,)),
        ("sizes", sizes, (int, type(None))),
    ):
        if not isinstance(values, list) or len(values) != len(names):
            raise TypeError(f"column_{name} must be a list, one of each column, found {values!r}")
        if not all(isinstance(v, kinds) and not (isinstance(v, int) and v < 0) for v in values):
            raise TypeError(f"column_{name} cannot be {values!r}")


def _encoding(encoding: str, stored_dtype: npt.DTypeLike | None, where: str) -> dict[str, Any]:
    """Return the token type, and the parts of the header of each array, of an encoding.

    Encodings are "bytes", "ndarray", "ndarray:int32" and "ndarray:int32:2048".
    """
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "bytes":
        return {"dtype": token_dtype("int64" if stored_dtype is None else stored_dtype)}
    if kind == "ndarray" and not dtype:
        if stored_dtype is None:
            raise InvalidArgument(
                f"{where}: arrays may differ in type; give the stored dtype (--stored-dtype) of "
                f"all, e.g. int32"
            )
        return {"dtype": token_dtype(stored_dtype), "dtype_in_data": True, "shape_in_data": True}
    if kind == "ndarray" and dtype in _DTYPE_BYTES and "," not in shape:
        if stored_dtype is not None and token_dtype(stored_dtype) != dtype:
            raise InvalidArgument(
                f"{where}: stored dtype (--stored-dtype) must be {dtype}, got {stored_dtype}; "
                "leave it out"
            )
        return {"dtype": np.dtype(dtype), "shape_in_data": not shape}
    raise InvalidArgument(
        f"{where}: encoding must be bytes or an array of integers with one axis, such as "
        f"ndarray:int32, got {encoding!r}; choose another column"
    )
