"""Arrays joined by content: a payload for each key of 128 bits, in files of one folder."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex._types import I64, U8, U64
from megaindex.errors import FormatError, InvalidArgument, MissingFile, OutOfRange, StorageError
from megaindex.io.atomic import AtomicFiles, Damaged, read_object, write_file
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import as_storage_error, check_local
from megaindex.keys.rows_file import (
    HEADER_BYTES,
    Columns,
    Payloads,
    RowsFile,
    begin_rows,
    chunks,
    distinct,
    finish_rows,
    first_unequal,
    open_rows,
)
from megaindex.validation import check_between, shown

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip
"""Dtypes of payloads."""
_MOST_BYTES = 1 << 40  # of a payload
_MOST_DIMENSIONS = 32
_DECLARATION = "store.json"
_NAME = re.compile(r"[0-9a-f]{32}\.rows")
_VERSION = 1
_LISTINGS = 20  # while other processes merge


@dataclass(frozen=True)
class PayloadForm:
    """Dtype and shape of the payloads of a store."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def checked(cls, dtype: object, shape: object) -> PayloadForm:
        """Return dtype and shape in plain form.

        Raises:
            InvalidArgument: they are not possible.
        """
        try:
            plain = np.dtype(dtype)  # type: ignore[call-overload]
            sizes = (shape,) if isinstance(shape, int) else tuple(shape)  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidArgument(f"dtype and shape must be those of an array: {error}") from None
        if plain.name not in DTYPES:
            raise InvalidArgument(
                f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}; store another as "
                "the integers of a view"
            )
        form = cls(
            plain.newbyteorder("<"),
            tuple(check_between(f"shape[{k}]", size, 1) for k, size in enumerate(sizes)),
        )
        check_between("dimensions of shape", len(form.shape), 0, _MOST_DIMENSIONS)
        check_between("bytes of a payload", form.row_bytes, 1, _MOST_BYTES)
        return form

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def text(self) -> bytes:
        """Content of the file that declares a store."""
        fields = {"dtype": self.dtype.name, "shape": list(self.shape), "version": _VERSION}
        return f"{json.dumps(fields)}\n".encode()

    @property
    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(self.text)

    def bytes_of(self, values: npt.NDArray[Any]) -> U8:
        """Return the bytes of payloads, uint8[n, row_bytes].

        Raises:
            InvalidArgument: they have another dtype or shape.
        """
        has_rows = values.ndim == len(self.shape) + 1 and values.shape[1:] == self.shape
        if values.dtype != self.dtype or not has_rows:
            raise InvalidArgument(
                f"values must be {self.dtype} of shape {['n', *self.shape]}, got {values.dtype} of "
                f"shape {list(values.shape)}"
            )
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, self.row_bytes)

    def values_of(self, data: U8) -> npt.NDArray[Any]:
        """Return the payloads in bytes, the inverse of `bytes_of`."""
        return data.reshape(-1).view(self.dtype).reshape(-1, *self.shape)


class Store:
    """A payload of fixed dtype and shape for each key, in the files of a folder.

        with Store("teacher", dtype="float16", shape=(2048, 64)).writer() as writer:
            writer.append(keys, logits)

    ``Store("teacher").get(keys)`` returns the payloads of keys.
    Many processes write at the same time, each a file of its own, which appears whole. `merge`
    makes one file of all, the same bytes however rows were spread over processes. Files are mapped,
    not read; a store may be passed to worker processes. It sees the files that were there when it
    was opened, and what it wrote itself.

    Args:
        path: folder of the store, whose parent exists.
        dtype: dtype of a payload, of `DTYPES`. With ``shape`` a store that does not exist is made,
            and one that exists must have both. Default: that of the store, which must exist.
        shape: shape of a payload, ``()`` for one number.

    Raises:
        InvalidArgument: ``path`` is a URL, dtype or shape are not possible, or not those of the
            store.
        MissingFile: there is no store, and no dtype.
        FormatError: a file is damaged, cut short, of another version or of another store.
        StorageError: a file cannot be read or written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: npt.DTypeLike | None = None,
        shape: int | Sequence[int] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        check_local(self.path, "copy the folder to a disk")
        if (dtype is None) != (shape is None):
            raise InvalidArgument(f"{self.path}: dtype and shape must be given together")
        asked = None if shape is None else PayloadForm.checked(dtype, shape)
        if asked is not None:
            _declare(self.path, asked)
        self._form = _declared(self.path)
        if asked not in (None, self._form):
            raise InvalidArgument(
                f"{self.path}: dtype and shape must be those of the store, {self.dtype} "
                f"{self.shape}, got {dtype} {shape}"
            )
        self.refresh()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of a payload."""
        return self._form.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a payload."""
        return self._form.shape

    @property
    def num_rows(self) -> int:
        """Rows of all files; a key in two files counts twice until `merge`."""
        return sum(file.columns.first.size for file in self._files)

    @property
    def num_files(self) -> int:
        """Files that a look-up searches."""
        return len(self._files)

    def writer(self) -> StoreWriter:
        """Return a writer of a further file, see `StoreWriter`."""
        return StoreWriter(self, self._form)

    def refresh(self) -> None:
        """Open the files that are there now, those of other processes too.

        Raises:
            FormatError, StorageError: as the constructor.
        """
        self._files = _open_files(self.path, self._form)

    def find(self, keys: npt.ArrayLike) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return payloads, zero where there is none, and bool[n], True where there is one.

        Args:
            keys: uint64[n, 2] or int64[n, 2].

        Raises:
            InvalidArgument: ``keys`` are not.
            FormatError: two files have different payloads for a key, or one is damaged.
        """
        wanted = wide_keys(keys)
        order = np.lexsort((wanted[:, 1], wanted[:, 0]))
        first, second = wanted[order].T
        values = np.zeros((order.size, self._form.row_bytes), np.uint8)
        found = np.zeros(order.size, np.bool_)
        for file in self._files:
            places = file.search(first, second)
            here = places >= 0
            rows, places = order[here], places[here]
            self._check_again(file, wanted, values, rows[found[rows]], places[found[rows]])
            values[rows] = file.payload[places]
            found[rows] = True
        return self._form.values_of(values), found

    def get(self, keys: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the payloads of keys, a new array of dtype and shape [n, …] of the store.

        Args:
            keys: as for `find`.

        Raises:
            OutOfRange: a key has no payload.
            InvalidArgument, FormatError: as `find`.
        """
        values, found = self.find(keys)
        missing = np.flatnonzero(~found)
        if missing.size:
            raise OutOfRange(
                f"{self.path}: {missing.size} of {found.size} keys have no payload, the first is "
                f"{_hex(wide_keys(keys)[missing[0]])} in row {missing[0]}; write them, or ask "
                "`find`, which returns a mask"
            )
        return values

    def merge(self) -> None:
        """Make one file of all that are there, and remove them once it is on disk.

        Its bytes depend on keys and payloads alone. Takes 60 bytes of memory a row; readers that
        have opened the store before keep what they have.

        Raises:
            FormatError: two files have different payloads for a key, or one is damaged.
            StorageError: a file cannot be read or written.
        """
        self.refresh()
        files = self._files
        if not files:
            return
        for file in files:
            file.check()
        payloads = Payloads([file.payload for file in files])
        columns, unequal = distinct(*_rows_of(files), payloads)
        if unequal is not None:
            one, other = (files[k].path for k in payloads.file_of(unequal[1]).tolist())
            raise _contradiction(one, other, unequal[0])
        digest = xxhash.xxh3_128(self._form.digest)
        for column in columns[:2]:
            digest.update(column.data)
        target = os.path.join(self.path, f"{digest.hexdigest()}.rows")
        if all(file.path != target for file in files):
            self._write_merged(target, columns, payloads)
        for file in files:
            if file.path != target:
                with contextlib.suppress(MissingFile), as_storage_error(file.path, "cannot remove"):
                    os.unlink(file.path)
        self.refresh()

    def verify(self) -> None:
        """Read all files of the store whole.

        Raises:
            FormatError: the bytes of one are not those that were written.
        """
        for file in self._files:
            file.check()

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.path,)

    def __repr__(self) -> str:
        return (
            f"Store({self.path!r}: {self.num_rows:,} rows of {self.dtype} {list(self.shape)} in "
            f"{self.num_files} files)"
        )

    def _check_again(self, file: RowsFile, wanted: U64, values: U8, rows: I64, places: I64) -> None:
        """Compare payloads of keys that an earlier file has, too."""
        unequal = first_unequal(Payloads([values]), rows, Payloads([file.payload]), places)
        if unequal is not None:
            raise _contradiction(file.path, "another file", wanted[rows[unequal]])

    def _write_merged(self, target: str, columns: Columns, payloads: Payloads) -> None:
        form, places = self._form, columns.place.astype(np.int64)

        def write(stream: BinaryIO) -> None:
            digest = xxhash.xxh3_128()
            begin_rows(stream)
            for part in chunks(places.size, form.row_bytes):
                taken = payloads.take(places[part])
                digest.update(taken.data)
                stream.write(taken.data)
            numbered = columns._replace(place=np.arange(places.size, dtype=np.uint64))
            finish_rows(stream, numbered, places.size, form.row_bytes, form.digest, digest)

        try:
            write_file(target, write)
        except StorageError as error:
            if error.errno != errno.EEXIST:  # else another process has merged the same rows
                raise


class StoreWriter:
    """Writer of one file of a store, which appears, synced to disk, when its ``with`` block ends.

    If the block raises, no file is left. Payloads go to disk at once; keys take 16 bytes of memory
    a row. Threads may share a writer. What a writer killed in between wrote is lost, and stays on
    disk as ``*.rows.tmp.*`` until somebody removes it: begin one at every checkpoint.
    """

    def __init__(self, store: Store, form: PayloadForm) -> None:
        self._store = store
        self._form = form
        self._path = os.path.join(store.path, f"{secrets.token_hex(16)}.rows")
        self._files = AtomicFiles([self._path])
        self._keys: list[U64] = []
        self._digest = xxhash.xxh3_128()
        self._lock = threading.Lock()  # payloads and keys in one order
        self._stream: BinaryIO | None = None
        self._is_used = False

    def __enter__(self) -> StoreWriter:
        if self._is_used:
            raise InvalidArgument(
                f"{self._store.path}: the writer was entered already; make another"
            )
        self._is_used = True
        try:
            self._stream = self._files.open(self._path)
            with as_storage_error(self._path, "cannot write"):
                begin_rows(self._stream)
        except BaseException:
            self._files.discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and any(len(keys) for keys in self._keys):
                self._finish()
                self._files.publish()
        finally:
            self._stream = None
            self._files.discard()
        self._store.refresh()

    def append(self, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Append rows; those of padding, whose key is 0, have to be left out before.

        Args:
            keys: uint64[n, 2] or int64[n, 2].
            values: payloads, [n, …] of dtype and shape of the store; bytes of another dtype, such
                as bfloat16, by a view.

        Raises:
            InvalidArgument: keys or values have another dtype or shape, or a key is 0. When the
                ``with`` block ends: a key has another payload already, here or in the store; equal
                bytes are kept once.
            StorageError: the file cannot be written.
        """
        if self._stream is None:
            raise InvalidArgument(f"{self._store.path}: use the writer in a with block")
        rows, payload = wide_keys(keys), self._form.bytes_of(_as_array("values", values))
        if len(rows) != len(payload):
            raise InvalidArgument(f"values must be {len(rows)}, one a key, got {len(payload)}")
        empty = np.flatnonzero(~rows.any(axis=1))
        if empty.size:
            raise InvalidArgument(
                f"keys must not be 0, as those of padding rows are, got 0 in row {empty[0]}; leave "
                "out rows whose sample is -1"
            )
        with self._lock, as_storage_error(self._path, "cannot write"):
            self._stream.write(payload.data)
            self._digest.update(payload.data)
            self._keys.append(rows)

    def _finish(self) -> None:
        form, keys = self._form, np.concatenate(self._keys)
        data = map_readonly(self._files.written(self._path))[HEADER_BYTES:]
        if self._stream is None or data.size != len(keys) * form.row_bytes:
            raise StorageError(f"{self._path}: an append failed; write these rows again")
        payload = Payloads([data.reshape(-1, form.row_bytes)])
        columns, unequal = distinct(keys[:, 0], keys[:, 1], np.arange(len(keys)), payload)
        if unequal is not None:
            raise _second_payload(unequal[0], self._path)
        places = columns.place.astype(np.int64)
        for file in _open_files(self._store.path, form):
            theirs = file.search(columns.first, columns.second)
            here = theirs >= 0
            again = first_unequal(payload, places[here], Payloads([file.payload]), theirs[here])
            if again is not None:
                raise _second_payload(keys[places[here][again]], file.path)
        with as_storage_error(self._path, "cannot write"):
            finish_rows(self._stream, columns, len(keys), form.row_bytes, form.digest, self._digest)


def wide_keys(keys: npt.ArrayLike) -> U64:
    """Return uint64[n, 2] of keys of 128 bits.

    Raises:
        InvalidArgument: they are not uint64[n, 2] or int64[n, 2].
    """
    array = _as_array("keys", keys)
    if array.dtype not in (np.int64, np.uint64) or array.ndim != 2 or array.shape[1] != 2:
        raise InvalidArgument(
            "keys must be uint64[n, 2], two words of 64 bits a row, got "
            f"{array.dtype} of shape {list(array.shape)}"
        )
    return array.astype(np.uint64)


def _as_array(name: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, too
        raise InvalidArgument(f"{name} must be an array in main memory: {error}") from None


def _rows_of(files: Sequence[RowsFile]) -> tuple[U64, U64, I64]:
    """Return words of the keys of all rows, and their places among the payloads of all files."""
    begins = np.cumsum([0, *(len(file.payload) for file in files)])[:-1]
    first, second, _ = map(np.concatenate, zip(*(file.columns for file in files), strict=True))
    places = [
        file.columns.place.astype(np.int64) + begin
        for file, begin in zip(files, begins, strict=True)
    ]
    return first, second, np.concatenate(places)


def _hex(key: U64) -> str:
    return "-".join(f"{word:016x}" for word in key.tolist())


def _second_payload(key: U64, where: str) -> InvalidArgument:
    return InvalidArgument(
        f"a key must have one payload, got a second, other one for {_hex(key)}, which {where} has "
        "already; write the rows of another model to another store"
    )


def _contradiction(one: str, other: str, key: U64) -> FormatError:
    return FormatError(
        f"{one} and {other} have different payloads for key {_hex(key)}; remove the one that is "
        "wrong"
    )


def _declare(path: str, form: PayloadForm) -> None:
    """Make a store unless there is one."""
    with as_storage_error(path, "cannot create"), contextlib.suppress(FileExistsError):
        os.mkdir(path)
    try:
        write_file(os.path.join(path, _DECLARATION), lambda stream: stream.write(form.text))
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise


def _declared(path: str) -> PayloadForm:
    file = os.path.join(path, _DECLARATION)
    try:
        with as_storage_error(file, "cannot read"):
            fields = read_object(file, longest=1 << 16)
        version = fields.get("version")
        if version == _VERSION:
            return PayloadForm.checked(fields["dtype"], fields["shape"])
    except MissingFile:
        raise MissingFile(
            f"{path}: holds no store; give dtype and shape to make one, or check the path"
        ) from None
    except (Damaged, InvalidArgument, KeyError, TypeError) as error:
        raise FormatError(f"{file}: {error}; copy it from another store of the kind") from None
    raise FormatError(
        f"{file}: version must be {_VERSION}, got {shown(version)}; use the release that wrote it"
    )


def _open_files(path: str, form: PayloadForm) -> list[RowsFile]:
    for _ in range(_LISTINGS):
        with as_storage_error(path, "cannot list"):
            names = sorted(filter(_NAME.fullmatch, os.listdir(path)))
        with contextlib.suppress(MissingFile):  # merged since the listing
            return [
                open_rows(os.path.join(path, name), form.digest, form.row_bytes) for name in names
            ]
    raise StorageError(f"{path}: its files keep being replaced; open it after the merges")
