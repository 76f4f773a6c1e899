"""Readers of the records and bad lines of a piece, for all formats.

A line ends with a line feed, a carriage return or both, as in Python's text mode, which Megatron's
tool uses. A byte order mark at the beginning of a file is dropped.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, BinaryIO

from megaindex._lazy import library_needed
from megaindex.corpus.tokenize import parts
from megaindex.corpus.tokenize.inputs import (
    BadRecord,
    InputFile,
    Record,
    Refused,
    decoded,
    from_json,
)
from megaindex.corpus.tokenize.parts import Piece
from megaindex.errors import FormatError, InvalidArgument
from megaindex.io.paths import as_storage_error

LONGEST_LINE = 1 << 28
"""Most bytes of a line, or of a text file that is one document: they are held in memory, and a few
MB of a compressed file may unpack to GB."""
_READ = 1 << 12  # compressed bytes at a time; unpacked they are at most 128 MiB
_LONGEST_WINDOW = 1 << 31  # zstd --long=31; the library's default limit is 1 << 27
_BLOCK = 1 << 20
_OBJECT_BLOCK = 16 << 20  # four simultaneous requests of an object
_SHORT = 1 << 16  # read size in search of the end of a line
_OBJECT_SHORT = 1 << 18
_UNPACKED = 1 << 16  # most bytes between the line named in an error and the damage
_ENDS = b"\r\n"
_END = re.compile(rb"\r\n?|\n")


class RecordReader:
    """Iterator over the records of a piece; it holds one block of its lines in memory.

    ``keys`` selects the texts of JSON objects and rows; a line of a text file is one text.
    """

    def __init__(self, piece: Piece, keys: Sequence[str]) -> None:
        self._piece = piece
        self._keys = keys
        self._lines = Lines(piece)
        self.count = 0
        """Lines or rows so far, blank and bad ones included."""
        self.blank = 0

    @property
    def done(self) -> int:
        """Bytes of the input read so far; 0 for a Parquet file."""
        return self._lines.done

    def __iter__(self) -> Iterator[Record | Refused]:
        if self._piece.source.format == "parquet":
            yield from self._rows()
        else:
            yield from self._text()

    def place(self, place: int) -> int:
        """Return the number of a line in its file, from 1, or of a row, from 0.

        The lines before the piece are read again to count them.
        """
        source = self._piece.source
        if source.format == "parquet":
            return parts.rows_before(source, self._piece.begin) + place
        if self._piece.begin == 0:  # always so for compressed files
            return place + 1
        return lines_before(source, self._lines.first_byte) + place + 1

    def _text(self) -> Iterator[Record | Refused]:
        whole = self._piece.source.format == "files"
        keys = self._keys if self._piece.source.format == "jsonl" else None
        for begin, raw in self._lines:
            place, self.count = self.count, self.count + 1
            if not whole and (not raw or raw.isspace()):
                self.blank += 1
                continue
            try:
                texts = from_json(raw, keys) if keys else ((decoded(raw),),)
            except BadRecord as error:
                yield Refused(place=place, error=error)
            else:
                yield Record(place, texts, len(raw), begin)

    def _rows(self) -> Iterator[Record | Refused]:
        piece = self._piece
        piece.source.check_unchanged()
        for row in parts.rows(piece.source, self._keys, piece.begin, piece.end):
            place, self.count = self.count, self.count + 1
            try:
                texts = parts.from_row(row, self._keys)
            except BadRecord as error:
                yield Refused(place=place, error=error)
            else:
                size = sum(len(text) for value in texts for text in value)
                yield Record(place, texts, size)
        piece.source.check_unchanged()


def place_name(form: str, number: int) -> str:
    """Return a prefix for messages: "line 12: ", "row 11: ", or "" for a file of one document."""
    return {"parquet": f"row {number}: ", "files": ""}.get(form, f"line {number}: ")


class Lines:
    """Iterator over the lines of a piece without their ends, and the offset of each in the unpacked
    file; it holds a block and a line in memory.

    Iteration raises FormatError for a truncated, damaged or empty compressed file, and StorageError
    for a file that cannot be read or has changed.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.first_byte = piece.begin
        """Offset of the first line that the piece owns; set by the first step of the iteration."""
        self.done = 0
        """Bytes of the input that have been read."""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        whole = self._piece.source.format == "files"
        for begin, lines in self._chunks():
            for line in lines:
                yield begin, line if whole else line.rstrip(_ENDS)
                begin += len(line)

    def _chunks(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield consecutive lines with their ends, and the offset of the first of them."""
        source = self._piece.source
        is_whole = source.format == "files" or bool(source.compression)
        source.check_unchanged()
        count = 0
        try:
            with as_storage_error(source.path, "cannot read the input"), ExitStack() as opened:
                file = opened.enter_context(source.open())
                for begin, lines in self._whole(file, opened) if is_whole else self._range(file):
                    count += len(lines)
                    yield begin, lines
        except LongLine:
            line = 1 + count + (0 if is_whole else lines_before(source, self.first_byte))
            raise FormatError(
                f"{source.path}: line {line}: must have at most {LONGEST_LINE} bytes; divide the "
                "document"
            ) from None
        source.check_unchanged()

    def _range(self, file: io.RawIOBase) -> Iterator[tuple[int, list[bytes]]]:
        piece = self._piece
        begin, end = piece.begin, piece.end
        position = self.first_byte = _skip_to_line(file, piece)
        if position >= end:
            return
        for lines in _split(_blocks(file, position, piece)):
            owned = lines
            if position + sum(map(len, lines)) > end:  # lines of the next piece may follow
                starts = accumulate(map(len, lines), initial=position)
                owned = [line for line, start in zip(lines, starts, strict=False) if start < end]
            after = position + sum(map(len, owned))
            self.done = min(after, end) - begin
            yield _without_mark(position, owned)
            position = after
            if position >= end:
                return

    def _whole(self, raw: io.RawIOBase, opened: ExitStack) -> Iterator[tuple[int, list[bytes]]]:
        source = self._piece.source
        size = _OBJECT_BLOCK if source.is_remote else _BLOCK
        file = opened.enter_context(io.BufferedReader(raw, min(size, source.size)))
        stream = opened.enter_context(_unpacked(file, source.compression))
        count = 0

        def blocks() -> Iterator[bytes]:
            while block := stream.read1(_UNPACKED):
                self.done = file.tell()
                yield block

        def texts() -> Iterator[list[bytes]]:
            if source.format != "files":
                yield from _split(blocks())
            elif whole := stream.read(LONGEST_LINE + 1):
                if len(whole) > LONGEST_LINE:
                    raise LongLine
                self.done = source.size
                yield [whole]

        position = 0
        try:
            for lines in texts():
                count += len(lines)
                yield _without_mark(position, lines)
                position += sum(map(len, lines))
        except (EOFError, gzip.BadGzipFile, zlib.error, zstd_error()) as error:
            raise FormatError(
                f"{source.path}: the {source.compression} stream is truncated or damaged after "
                f"line {count}: {error}; copy or write the file again"
            ) from error
        if count == 0:
            raise FormatError(
                f"{source.path}: the {source.compression} stream holds 0 bytes; leave it out, or "
                f"write it again"
            )


def _without_mark(begin: int, lines: list[bytes]) -> tuple[int, list[bytes]]:
    """Leave out the byte order mark at the beginning of a file."""
    if begin or not lines[0].startswith(codecs.BOM_UTF8):
        return begin, lines
    mark = len(codecs.BOM_UTF8)
    return mark, [lines[0][mark:], *lines[1:]]


def lines_before(source: InputFile, offset: int) -> int:
    """Read the first `offset` bytes of a file, up to the beginning of a line, and count lines."""
    count = 0
    size = _OBJECT_BLOCK if source.is_remote else _BLOCK
    after_return = False
    with as_storage_error(source.path, "cannot read the input"), source.open() as file:
        while offset > 0 and (block := file.read(min(size, offset))):
            count += block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n")
            count -= after_return and block.startswith(b"\n")
            after_return = block.endswith(b"\r")
            offset -= len(block)
    return count


def _skip_to_line(file: io.RawIOBase, piece: Piece) -> int:
    """Return the offset of the first line that begins in the piece, or its end or more.

    The rest of a line that begins before the piece is skipped in bounded memory.
    """
    if piece.begin == 0:
        return 0
    size = _OBJECT_SHORT if piece.source.is_remote else _SHORT
    position = file.seek(piece.begin - 1)
    while position < piece.end and (block := file.read(size)):
        found = _END.search(block)
        if found is None:
            position += len(block)
            continue
        position += found.end()
        is_split = found.end() == len(block) and block.endswith(b"\r")
        return position + (is_split and file.read(1) == b"\n")
    return piece.end


def _blocks(file: io.RawIOBase, position: int, piece: Piece) -> Iterator[bytes]:
    """Yield long blocks up to the end of the piece, then short ones to end its last line."""
    remote = piece.source.is_remote
    long, short = (_OBJECT_BLOCK, _OBJECT_SHORT) if remote else (_BLOCK, _SHORT)
    file.seek(position)
    while block := file.read(min(long, piece.end - position) if position < piece.end else short):
        position += len(block)
        yield block


class LongLine(Exception):
    """A line has more than `LONGEST_LINE` bytes."""


def _split(blocks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield lines with their ends; a further block is read only when it is needed."""
    held: list[bytes] = []  # a line that may continue in the next block
    for block in blocks:
        lines = block.splitlines(keepends=True)
        is_ended = bool(held) and held[-1].endswith(b"\r") and not block.startswith(b"\n")
        if not is_ended and sum(map(len, held)) + len(lines[0]) > LONGEST_LINE:
            raise LongLine
        if is_ended:
            lines.insert(0, b"".join(held))
        elif held and len(lines) > 1:
            lines[0] = b"".join((*held, lines[0]))
        elif held:
            held.append(lines.pop())
            if held[-1].endswith(b"\n"):
                yield [b"".join(held)]
                held = []
            continue
        held = [] if lines[-1].endswith(b"\n") else [lines.pop()]
        if lines:
            yield lines
    if held:
        yield [b"".join(held)]


def _unpacked(file: io.BufferedReader[Any], compression: str) -> io.BufferedReader[Any]:
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _UNPACKED)
    if compression == "zstd":
        return io.BufferedReader(ZstdStream(file), _UNPACKED)
    return file


class ZstdStream(io.RawIOBase):
    """Decompressor of all frames of a file; a truncated file raises EOFError.

    The library's own reader accepts the end of a truncated file as the end of the data.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._unpack():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> bool:
        """Decompress the next bytes; return False at the end of the file."""
        packed = self._rest() or self._file.read(_READ)
        if not packed:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the file ends within a frame")
            return False
        if self._frame is None or self._frame.eof:
            library = _zstandard()
            self._frame = library.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()
        self._ready = memoryview(self._frame.decompress(packed))
        return True

    def _rest(self) -> bytes:
        """Return the bytes read beyond the end of a frame."""
        if self._frame is None or not self._frame.eof:
            return b""
        rest: bytes = self._frame.unused_data
        self._frame = None
        return rest


@functools.cache
def _zstandard() -> Any:
    with library_needed("zstd files need the library zstandard; pip install 'megaindex[zstd]'"):
        import zstandard
    return zstandard


def zstd_error() -> type[Exception]:
    """Return the library's error for damaged data, or EOFError without the library."""
    try:
        error: type[Exception] = _zstandard().ZstdError
    except InvalidArgument:
        return EOFError
    return error
