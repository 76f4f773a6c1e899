"""The file PREFIX.provenance beside a pair: the input file, row and bytes of each document.

Documents are grouped into blocks of at most 4,096 that come from one file, in rising order; see
`BLOCK_FIELDS`. Within a block a document takes 7 bytes.

    offset    bytes  content
    0             8  magic b"MIDXPROV"
    8             4  version, uint32: 1
    12            4  size of this header, uint32: 96
    16            8  D, the number of documents, uint64
    24            8  B, the number of blocks, uint64
    32            8  J, the size of the JSON object, uint64, a multiple of 8
    40           16  XXH3-128 of the .idx, high byte first
    56           16  XXH3-128 of the columns, that is of everything after the blocks
    72           16  XXH3-128 of header (these 16 bytes zero), JSON object and blocks
    88            8  zero
    96            J  JSON object: "files" and "tokenizers", filled up with spaces
    96 + J      40B  blocks, int64[B, 5]
    …            4D  byte at which each document begins, from the first of its block, uint32
    …            2D  row of each document, from the first of its block, uint16
    …             D  bytes between the end of a document and the next of its block, uint8; 0 in the
                     last one, whose end the block states

All little-endian. The blocks are cut greedily, so that they follow from the documents alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex._types import I64
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.header import Fault, check_fault
from megaindex.format.pair import provenance_path
from megaindex.io.atomic import Damaged, parse_object
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import as_storage_error
from megaindex.objects.files import local_copy, stat_path

MAGIC = b"MIDXPROV"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQ16s16s16s8x")
_HEAD_CHECKSUM = 72
BLOCK_FIELDS = ("first_document", "file", "first_row", "first_byte", "end_byte")
"""Columns of the blocks: number of the first document; number of the file, -1 if it is unknown; row
and byte of that document; byte at which the last document of the block ends."""
_COLUMNS = (("offsets", "<u4"), ("rows", "<u2"), ("gaps", "u1"))
_DOCUMENT_BYTES = 7
MOST_IN_BLOCK = 4096
_AT_ONCE = 1 << 14  # documents
_BUFFER_BYTES = 1 << 16
UNKNOWN = -1
_AGAIN = "write the pair again, or delete the file: the pair works without it"


@dataclass(frozen=True, kw_only=True)
class RecordedTokenizer:
    """Tokenizer of some documents.

    Attributes:
        path: its file, or "bytes".
        fingerprint: library, version and hash of the file.
        add_special_tokens: whether the tokens of its template were added.
        eod: id appended to each document, or None.
    """

    path: str
    fingerprint: str
    add_special_tokens: bool
    eod: int | None


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """An input file of a corpus.

    Attributes:
        path: path or URL.
        format: "jsonl", "lines", "files" or "parquet" of a tokenized file; "nanotron", "numpy",
            "tntidx", "mds" or "columns" of an imported one.
        row_name: "line" if rows are lines, which messages count from 1; else "row", from 0.
        has_bytes: whether the bytes of a document are known: of the unpacked content, where
            ``compression`` is not empty.
        compression: "gzip", "zstd", or empty.
        size: bytes of the file as stored, or None.
        version: version of an object of a store, or empty.
        key: key of the JSON objects, or column; empty for text.
        tokenizer: the tokenizer, or None for an import.
    """

    path: str
    format: str
    row_name: str = "row"
    has_bytes: bool = False
    compression: str = ""
    size: int | None = None
    version: str = ""
    key: str = ""
    tokenizer: RecordedTokenizer | None = None

    @property
    def first_row(self) -> int:
        """Number of the first row in messages and commands."""
        return int(self.row_name == "line")


class InputRows(NamedTuple):
    """Origins of n documents, int64[n] each."""

    file: I64
    """Number of the file in `Provenance.files`; -1: unknown."""
    row: I64
    """Row in the file, from 0."""
    begin: I64
    end: I64
    """First byte, and first byte after the document; 0 where a file has no bytes."""

    @classmethod
    def unknown(cls, count: int) -> InputRows:
        """Return the origins of documents of which nothing is known."""
        zeros = np.zeros(count, np.int64)
        return cls(np.full(count, UNKNOWN, np.int64), zeros, zeros, zeros)


def nameless_file(opened: contextlib.ExitStack, directory: str, buffer: int) -> IO[bytes]:
    """Return a new temporary file without a name, which `opened` closes.

    Some file systems give it a name for a moment: ``megaindex.tmp.`` and random characters.
    """
    return opened.enter_context(
        tempfile.TemporaryFile(dir=directory, buffering=buffer, prefix="megaindex.tmp.")
    )


class ProvenanceSpool:
    """Provenance that is being written, in unnamed files of `directory`, in constant memory."""

    def __init__(self, directory: str) -> None:
        self.num_documents = 0
        self._directory = directory
        self._files: dict[RowFile, int] = {}
        self._pending: list[InputRows] = []
        self._num_pending = 0
        self._num_blocks = 0
        self._written = 0  # documents of complete blocks
        self._spools: list[IO[bytes]] = []
        self._opened = contextlib.ExitStack()

    def open(self) -> None:
        """Make the temporary files."""
        with as_storage_error(self._directory, "cannot create a temporary file"):
            for _ in range(1 + len(_COLUMNS)):
                self._spools.append(nameless_file(self._opened, self._directory, _BUFFER_BYTES))

    def close(self) -> None:
        """Remove the temporary files."""
        with contextlib.suppress(OSError):  # buffered data is discarded
            self._opened.close()

    def number_of(self, file: RowFile) -> int:
        """Return the number of an input file, which is added if it is new."""
        return self._files.setdefault(file, len(self._files))

    def add(self, rows: InputRows) -> None:
        """Append the origins of documents, by the numbers of `number_of`."""
        if rows.row.size:
            self.num_documents += rows.row.size
            self._pending.append(rows)
            self._num_pending += rows.row.size
            if self._num_pending >= _AT_ONCE:
                self._write(whole=False)

    def add_file(self, file: RowFile, row: I64, begin: I64, end: I64) -> None:
        """Append the origins of documents of one file."""
        number = np.full(row.size, self.number_of(file), np.int64)
        self.add(InputRows(number, row, begin, end))

    def add_part(self, source: Provenance, first: int, stop: int) -> None:
        """Append the origins of documents `first` to `stop` - 1 of another pair."""
        for rows in source.iterate(first, stop):
            used = np.unique(rows.file)
            numbers = [
                UNKNOWN if number == UNKNOWN else self.number_of(source.files[number])
                for number in used.tolist()
            ]
            renumbered = np.array(numbers, np.int64)[np.searchsorted(used, rows.file)]
            self.add(rows._replace(file=renumbered))

    def _write(self, *, whole: bool) -> None:
        """Write the complete blocks; with `whole` the last one too, which may still grow."""
        rows = InputRows(*(np.concatenate(column) for column in zip(*self._pending, strict=True)))
        starts = _block_starts(rows)
        stop = rows.row.size if whole else int(starts[-1])
        if not whole:
            starts = starts[:-1]
        bounds = np.append(starts, stop)
        sizes = np.diff(bounds)
        first = np.repeat(starts, sizes)
        last = bounds[1:] - 1
        gaps = np.zeros(stop, np.uint8)
        gaps[:-1] = ((rows.begin[1:stop] - rows.end[: stop - 1]) & 255) if stop else 0
        gaps[last] = 0
        blocks = np.stack(
            (
                starts + self._written,
                rows.file[starts],
                rows.row[starts],
                rows.begin[starts],
                rows.end[last],
            ),
            axis=1,
        )
        columns = (
            blocks.astype("<i8"),
            (rows.begin[:stop] - rows.begin[first]).astype("<u4"),
            (rows.row[:stop] - rows.row[first]).astype("<u2"),
            gaps,
        )
        for spool, column in zip(self._spools, columns, strict=True):
            spool.write(column.tobytes())
        self._num_blocks += starts.size
        self._written += stop
        self._pending = [InputRows(*(column[stop:] for column in rows))]
        self._num_pending = rows.row.size - stop

    def assemble(self, out: BinaryIO, idx_checksum: bytes) -> None:
        """Write the whole file to `out`."""
        if self._num_pending:
            self._write(whole=True)
        text = json.dumps(self._json(), separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        columns = xxhash.xxh3_128()
        for spool in self._spools[1:]:
            for data in _chunks(spool):
                columns.update(data)

        def header(head_checksum: bytes) -> bytes:
            counts = (self.num_documents, self._num_blocks, len(text))
            checksums = (idx_checksum, columns.digest(), head_checksum)
            return _HEADER.pack(MAGIC, VERSION, _HEADER.size, *counts, *checksums)

        head = xxhash.xxh3_128(header(bytes(16)))
        head.update(text)
        for data in _chunks(self._spools[0]):
            head.update(data)
        out.write(header(head.digest()))
        out.write(text)
        for spool in self._spools:
            for data in _chunks(spool):
                out.write(data)

    def _json(self) -> dict[str, Any]:
        tokenizers: dict[RecordedTokenizer, int] = {}
        files = []
        for file in self._files:
            entry = {**vars(file), "tokenizer": None}
            if file.tokenizer is not None:
                entry["tokenizer"] = tokenizers.setdefault(file.tokenizer, len(tokenizers))
            files.append(entry)
        return {"files": files, "tokenizers": [asdict(one) for one in tokenizers]}


def _chunks(spool: IO[bytes]) -> Iterator[bytes]:
    spool.seek(0)
    while data := spool.read(_BUFFER_BYTES):
        yield data


def _block_starts(rows: InputRows) -> I64:
    """Return the first document of each block."""
    gaps = rows.begin[1:] - rows.end[:-1]
    breaks = (
        (rows.file[1:] != rows.file[:-1])
        | (rows.row[1:] < rows.row[:-1])
        | (gaps < 0)
        | (gaps > 255)
    )
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), rows.row.size]
    starts: list[int] = []
    for at, stop in pairwise(edges):
        while at < stop:
            starts.append(at)
            end = min(stop, at + MOST_IN_BLOCK)
            for column, most in ((rows.row, 1 << 16), (rows.begin, 1 << 32)):
                limit = column[at] + most
                if column[end - 1] >= limit:
                    end = at + int(np.searchsorted(column[at:end], limit))
            at = end
    return np.array(starts, np.int64)


class Provenance:
    """The provenance of a pair, memory-mapped.

    Its header, files and blocks are checked when it is opened, and that it belongs to the .idx; its
    columns by `check_columns`.

    Args:
        path: path of the file.
        idx_path: path of the .idx; None: do not compare.

    Raises:
        MissingFile: the file does not exist.
        FormatError: it is damaged, of a newer version, or of another pair.
    """

    def __init__(self, path: str, idx_path: str | None) -> None:
        self.path = path
        info = stat_path(path)
        if info is None:
            raise MissingFile(f"{path}: does not exist; megaindex tokenize writes it")
        data = map_readonly(local_copy(info))
        check_fault(_head_fault(data), path)
        fields = _HEADER.unpack(data[: _HEADER.size].tobytes())
        self.num_documents, num_blocks, json_bytes = fields[3:6]
        self._idx_checksum, self._columns_checksum = fields[6:8]
        at = _HEADER.size + json_bytes
        self.files = _files(data[_HEADER.size : at].tobytes(), path)
        self.blocks: I64 = data[at : at + 40 * num_blocks].view("<i8").reshape(-1, 5)
        """int64[blocks, 5], see `BLOCK_FIELDS`."""
        at += 40 * num_blocks
        self._columns = data[at:]
        columns: list[npt.NDArray[Any]] = []
        for _, kind in _COLUMNS:
            end = at + np.dtype(kind).itemsize * self.num_documents
            columns.append(data[at:end].view(kind))
            at = end
        self._offsets, self._rows, self._gaps = columns
        if idx_path is not None:
            check_fault(self.pair_fault(idx_path), path)
        check_fault(self._block_fault(), path)

    def pair_fault(self, idx_path: str) -> Fault | None:
        """Return the fault of a provenance of another pair."""
        info = stat_path(idx_path)
        if info is None:
            raise MissingFile(f"{idx_path}: does not exist; put the .idx beside {self.path}")
        found = xxhash.xxh3_128_digest(map_readonly(local_copy(info)).data)
        if found == self._idx_checksum:
            return None
        return _fault(
            "provenance-pair",
            f"XXH3-128 {found.hex()} of {idx_path}",
            self._idx_checksum.hex(),
            f"belongs to another pair: it states the checksum {self._idx_checksum.hex()} of the "
            f".idx, and {idx_path} has {found.hex()}",
            "restore the one that was written with the pair, or delete it",
        )

    def columns_fault(self) -> Fault | None:
        """Return the fault of damaged columns, which opening does not read."""
        found = xxhash.xxh3_128_digest(self._columns.data)
        if found != self._columns_checksum:
            return _fault(
                "provenance-checksum",
                f"XXH3-128 {found.hex()} of the columns",
                self._columns_checksum.hex(),
                f"is damaged: its columns have the checksum {found.hex()}, and the header states "
                f"{self._columns_checksum.hex()}",
            )
        for first, stop in pairwise(self.bounds.tolist()):
            rows = self.locate(np.arange(first, stop))
            for name, bad in (("row", np.diff(rows.row) < 0), ("byte", rows.end < rows.begin)):
                if bad.any():
                    document = first + int(bad.argmax())
                    return _fault(
                        "provenance-order",
                        f"document {document}",
                        f"a {name} not below the one before",
                        f"is damaged: document {document} has a {name} below the one before",
                    )
        return None

    def check_columns(self) -> None:
        """Raise FormatError if the columns are damaged."""
        check_fault(self.columns_fault(), self.path)

    @cached_property
    def bounds(self) -> I64:
        """int64[blocks + 1]: first document of each block, and the number of documents."""
        return np.append(self.blocks[:, 0], self.num_documents).astype(np.int64)

    @cached_property
    def num_unknown(self) -> int:
        """Number of documents whose origin is unknown."""
        return int(np.diff(self.bounds)[self.blocks[:, 1] == UNKNOWN].sum())

    def locate(self, documents: I64) -> InputRows:
        """Return the origins of documents; InvalidArgument unless all exist."""
        wrong = (documents < 0) | (documents >= self.num_documents)
        if wrong.any():
            raise InvalidArgument(
                f"{self.path}: documents must be from 0 to {self.num_documents - 1}, got "
                f"{documents[wrong.argmax()]}"
            )
        number = np.searchsorted(self.bounds, documents, "right") - 1
        _, file, first_row, first_byte, end_byte = self.blocks[number].T
        row = first_row + self._rows[documents]
        begin = first_byte + self._offsets[documents]
        following = np.minimum(documents + 1, self.num_documents - 1)
        end = first_byte + self._offsets[following] - self._gaps[documents]
        is_last = documents + 1 == self.bounds[number + 1]
        return InputRows(file.astype(np.int64), row, begin, np.where(is_last, end_byte, end))

    def iterate(self, first: int, stop: int) -> Iterator[InputRows]:
        """Yield the origins of documents `first` to `stop` - 1 in chunks."""
        for at in range(first, stop, _AT_ONCE):
            yield self.locate(np.arange(at, min(stop, at + _AT_ONCE)))

    def documents_of(self, file: int, first: int, last: int) -> I64:
        """Return the documents of rows `first` to `last` of a file, both included."""
        found = [np.empty(0, np.int64)]
        lasts = self.blocks[:, 2] + self._rows[self.bounds[1:] - 1]
        own = (self.blocks[:, 1] == file) & (self.blocks[:, 2] <= last) & (lasts >= first)
        for number in np.flatnonzero(own).tolist():
            begin, stop = self.bounds[number : number + 2].tolist()
            rows = self.blocks[number, 2] + self._rows[begin:stop]
            low, high = np.searchsorted(rows, first), np.searchsorted(rows, last, "right")
            found.append(np.arange(begin + low, begin + high))
        return np.concatenate(found)

    def _block_fault(self) -> Fault | None:
        """Return the first fault of the blocks, whose checksum is right."""
        sizes = np.diff(self.bounds)
        file = self.blocks[:, 1]
        wrong = (
            (sizes < 1)
            | (sizes > MOST_IN_BLOCK)
            | (file < UNKNOWN)
            | (file >= len(self.files))
            | (self.blocks[:, 2:] < 0).any(axis=1)
        )
        begins_at_0 = not self.num_documents or (sizes.size and self.blocks[0, 0] == 0)
        if begins_at_0 and not wrong.any():
            return None
        number = int(wrong.argmax()) if wrong.size else 0
        return _fault(
            "provenance-blocks",
            f"block {number} of {sizes.size}",
            "blocks that divide the documents",
            f"is damaged: block {number} does not fit the documents and files",
        )


def open_provenance(path_prefix: str) -> Provenance | None:
    """Return the provenance of a pair, or None without one; errors as `Provenance`."""
    path = provenance_path(path_prefix)
    return Provenance(path, f"{path_prefix}.idx") if _is_there(path) else None


def _is_there(path: str) -> bool:
    """Return True if the file exists; False too for a name longer than file systems allow."""
    try:
        return stat_path(path) is not None
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENAMETOOLONG:
            return False
        raise


def provenance_faults(
    path_prefix: str, num_documents: int
) -> tuple[list[Fault], Provenance | None]:
    """Return the faults of the provenance of a pair, with every byte read, and the provenance.

    Without a file: no faults, and None.
    """
    path = provenance_path(path_prefix)
    if not _is_there(path):
        return [], None
    try:
        found = Provenance(path, None)
    except FormatError as error:
        text = str(error).removeprefix(f"{path}: ").partition(";")[0]
        return [_fault("provenance", text, "a provenance of version 1", text)], None
    faults = [found.pair_fault(f"{path_prefix}.idx"), found.columns_fault()]
    if found.num_documents != num_documents:
        text = f"{found.num_documents} documents"
        faults.append(_fault("provenance-documents", text, f"{num_documents}", f"has {text}"))
    return [fault for fault in faults if fault is not None], found


def _fault(rule: str, found: str, expected: str, text: str, remedy: str = _AGAIN) -> Fault:
    return Fault(rule=rule, found=found, expected=expected, text=text, remedy=remedy)


def _head_fault(data: npt.NDArray[np.uint8]) -> Fault | None:
    """Return the fault of a file whose header, JSON object or blocks cannot be used."""
    size = data.size
    if size < _HEADER.size or data[:8].tobytes() != MAGIC:
        start = data[:8].tobytes()
        return _fault(
            "provenance-magic",
            f"{size} bytes that begin with {start!r}",
            f"a header of {_HEADER.size} bytes that begins with {MAGIC!r}",
            f"must begin with {MAGIC!r} and hold {_HEADER.size} bytes or more, got {start!r} and "
            f"{size} bytes",
        )
    header = data[: _HEADER.size].tobytes()
    _, version, header_bytes, documents, blocks, json_bytes, *checksums = _HEADER.unpack(header)
    if version != VERSION or header_bytes != _HEADER.size:
        return _fault(
            "provenance-version",
            f"version {version}",
            f"version {VERSION}",
            f"has version {version}, and this megaindex reads version {VERSION}",
            "install a newer megaindex",
        )
    end = _HEADER.size + json_bytes + 40 * blocks
    whole = end + _DOCUMENT_BYTES * documents
    if size != whole or json_bytes % 8:
        return _fault(
            "provenance-size",
            f"{size} bytes",
            f"{whole} bytes",
            f"must have {whole} bytes by its header, got {size}: it is truncated or damaged",
        )
    digest = xxhash.xxh3_128(header[:_HEAD_CHECKSUM] + bytes(_HEADER.size - _HEAD_CHECKSUM))
    digest.update(data[_HEADER.size : end].data)
    if digest.digest() != checksums[2] or header[88:] != bytes(8):
        return _fault(
            "provenance-checksum",
            f"XXH3-128 {digest.hexdigest()} of the head",
            checksums[2].hex(),
            f"is damaged: header, files and blocks have the checksum {digest.hexdigest()}, and the "
            f"header states {checksums[2].hex()}",
        )
    return None


def _files(text: bytes, path: str) -> tuple[RowFile, ...]:
    try:
        stored = parse_object(text)
        tokenizers = [RecordedTokenizer(**one) for one in stored["tokenizers"]]
        return tuple(_row_file(entry, tokenizers) for entry in stored["files"])
    except (Damaged, KeyError, TypeError, IndexError) as error:
        raise FormatError(f"{path}: its list of files is damaged: {error}; {_AGAIN}") from error


def _row_file(entry: Mapping[str, Any], tokenizers: Sequence[RecordedTokenizer]) -> RowFile:
    file = RowFile(**entry)
    number: Any = file.tokenizer
    return replace(file, tokenizer=None if number is None else tokenizers[number])
