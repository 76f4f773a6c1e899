"""Records of a part, whatever its format, and bad lines in their place.

A line ends with a line feed, a carriage return or both, as in Python's text mode, in which
Megatron's tool reads. A byte order mark at the beginning of a file is left out.
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
from typing import Any, BinaryIO

from megaindex.errors import FormatError, InvalidArgument
from megaindex.io.os_errors import as_storage_error
from megaindex.tokenize import parts
from megaindex.tokenize.inputs import InputFile
from megaindex.tokenize.parts import Piece
from megaindex.tokenize.records import BadRecord, Record, Refused, Text, decoded, from_json

_READ = 1 << 14  # packed bytes at a time: what they unpack to is in memory
_LONGEST_WINDOW = 1 << 31  # zstd --long=31; the library stops at 1 << 27 unless told
_BLOCK = 1 << 20
_OBJECT_BLOCK = 16 << 20  # in memory; of an object four requests, which are under way together
_SHORT = 1 << 16  # to look for the end of a line
_OBJECT_SHORT = 1 << 18
_UNPACKED = 1 << 16  # what lies between the line named and the damage, at most
_ENDS = b"\r\n"
_END = re.compile(rb"\r\n?|\n")


class Reader:
    """Iterates over the records of a piece, one in memory at a time.

    Args:
        keys: of the texts wanted; a text file has one text whatever the key.
    """

    def __init__(self, piece: Piece, keys: Sequence[str]) -> None:
        self._piece = piece
        self._keys = keys
        self._lines = Lines(piece)
        self.count = 0
        """Lines or rows so far, of whatever kind."""
        self.blank = 0

    @property
    def done(self) -> int:
        """Bytes of the input read so far; of Parquet files nothing is known before the end."""
        return self._lines.done

    def __iter__(self) -> Iterator[Record | Refused]:
        if self._piece.source.format == "parquet":
            yield from self._rows()
        else:
            yield from self._text()

    def place(self, place: int) -> int:
        """Number of a line in its file, from 1, or of a row, from 0; reads what lies before it."""
        source = self._piece.source
        if source.format == "parquet":
            return parts.rows_before(source, self._piece.begin) + place
        if self._piece.begin == 0:  # packed files too, whose bytes tell nothing
            return place + 1
        return lines_before(source, self._lines.first_byte) + place + 1

    def _text(self) -> Iterator[Record | Refused]:
        whole = self._piece.source.format == "files"
        for raw in self._lines:
            place, self.count = self.count, self.count + 1
            if not whole and (not raw or raw.isspace()):
                self.blank += 1
                continue
            try:
                texts = self._texts(raw)
            except BadRecord as error:
                yield Refused(place=place, error=error)
            else:
                yield Record(place=place, texts=texts, size=len(raw))

    def _texts(self, raw: bytes) -> tuple[Text, ...]:
        form = self._piece.source.format
        if form == "jsonl":
            return from_json(raw, self._keys)
        return ((decoded(raw),),)

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
                yield Record(place=place, texts=texts, size=_size(texts))
        piece.source.check_unchanged()


def place_name(form: str, number: int) -> str:
    """Return a place as messages name it: "line 12", "row 11"; empty for a file of one document."""
    return {"parquet": f"row {number}: ", "files": ""}.get(form, f"line {number}: ")


def _size(texts: tuple[Text, ...]) -> int:
    return sum(len(text) for value in texts for text in value)


class Lines:
    """Iterates over the lines of a piece, without their ends; a block and a line in memory.

    Raises, while it iterates:
        FormatError: a packed file ends too early, is damaged, or holds nothing.
        StorageError: the file cannot be read, or was changed.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.first_byte = piece.begin
        """Where the first line that the piece owns begins; known once iteration has begun."""
        self.done = 0
        """Bytes of the input that have been read."""

    def __iter__(self) -> Iterator[bytes]:
        source = self._piece.source
        source.check_unchanged()
        with as_storage_error(source.path, "cannot read the input"), ExitStack() as opened:
            file = opened.enter_context(source.open())
            if source.format == "files" or source.compression:
                yield from self._whole(file, opened)
            else:
                yield from self._range(file)
        source.check_unchanged()

    def _range(self, file: io.RawIOBase) -> Iterator[bytes]:
        piece = self._piece
        begin, end = piece.begin, piece.end
        position = self.first_byte = _skip_to_line(file, piece)
        if position >= end:
            return
        for line in _split(_blocks(file, position, piece)):
            first = position == 0
            position += len(line)
            self.done = min(position, end) - begin
            text = line.rstrip(_ENDS)  # the one at its end: a line holds no other
            yield text.removeprefix(codecs.BOM_UTF8) if first else text
            if position >= end:
                return

    def _whole(self, raw: io.RawIOBase, opened: ExitStack) -> Iterator[bytes]:
        source = self._piece.source
        size = _OBJECT_BLOCK if source.is_remote else _BLOCK
        file = opened.enter_context(io.BufferedReader(raw, min(size, source.size)))
        stream = opened.enter_context(_unpacked(file, source.compression))
        count = 0

        def blocks() -> Iterator[bytes]:
            while block := stream.read1(_UNPACKED):
                self.done = file.tell()
                yield block

        try:
            if source.format == "files":
                count, whole = 1, stream.read()
                self.done = source.size
                yield whole.removeprefix(codecs.BOM_UTF8)
                return
            for line in _split(blocks()):
                count += 1
                text = line.rstrip(_ENDS)
                yield text.removeprefix(codecs.BOM_UTF8) if count == 1 else text
        except (EOFError, gzip.BadGzipFile, zlib.error, zstd_error()) as error:
            raise FormatError(
                f"{source.path}: the {source.compression} stream breaks off or is damaged behind "
                f"line {count}: {error}; fetch or write the file again"
            ) from error
        if count == 0:
            raise FormatError(
                f"{source.path}: the {source.compression} stream holds 0 bytes; leave it out, or "
                f"write it again"
            )


def lines_before(source: InputFile, offset: int) -> int:
    """Return the number of lines in the first `offset` bytes of a file, which is read again for it.

    Args:
        offset: where a line begins.
    """
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
    """Return where the first line begins that begins in the piece, or its end or more.

    A long line from before is passed over in bounded memory, and no further than to the end.
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
    """Long ones up to the end of the piece, then short ones, of which few are needed."""
    remote = piece.source.is_remote
    long, short = (_OBJECT_BLOCK, _OBJECT_SHORT) if remote else (_BLOCK, _SHORT)
    file.seek(position)
    while block := file.read(min(long, piece.end - position) if position < piece.end else short):
        position += len(block)
        yield block


def _split(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends; no more blocks are taken than are needed."""
    held: list[bytes] = []  # a line that may go on
    for block in blocks:
        if held and held[-1].endswith(b"\r") and not block.startswith(b"\n"):
            yield b"".join(held)
            held = []
        first, *others = block.splitlines(keepends=True)
        held.append(first)
        if others:
            yield b"".join(held)
            yield from others[:-1]
            held = others[-1:]
        if held[-1].endswith(b"\n"):
            yield b"".join(held)
            held = []
    if held:
        yield b"".join(held)


def _unpacked(file: io.BufferedReader[Any], compression: str) -> io.BufferedReader[Any]:
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _UNPACKED)
    if compression == "zstd":
        return io.BufferedReader(ZstdStream(file), _UNPACKED)
    return file


class ZstdStream(io.RawIOBase):
    """Unpacks all frames of a file, one behind the other.

    The library's own reader takes the end of the file for the end of the data; a file that was
    copied in part would pass for a whole one. Here that is an EOFError.
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
        """Unpack the next packed bytes; False at the end of the file."""
        packed = self._rest() or self._file.read(_READ)
        if not packed:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the file ends within a frame")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = (
                _zstandard().ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()
            )
        self._ready = memoryview(self._frame.decompress(packed))
        return True

    def _rest(self) -> bytes:
        """Return the bytes behind the end of a frame, with which the next one begins."""
        if self._frame is None or not self._frame.eof:
            return b""
        rest: bytes = self._frame.unused_data
        self._frame = None
        return rest


@functools.cache
def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise InvalidArgument(
            "zstd files take the library zstandard; pip install 'megaindex[zstd]'"
        ) from None
    return zstandard


def zstd_error() -> type[Exception]:
    """Return the library's error for damaged data; EOFError where the library is missing."""
    try:
        error: type[Exception] = _zstandard().ZstdError
    except InvalidArgument:
        return EOFError
    return error
