"""Lines of text files: of a range of bytes, of a packed file, or a whole file as one."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import BinaryIO

from megaindex.corpus.tokenize.parts import Piece
from megaindex.corpus.tokenize.unpacking import ZstdStream, zstd_error
from megaindex.errors import FormatError
from megaindex.io.failures import as_storage_error

_BUFFER = 1 << 20
_UNPACKED = 1 << 16  # what lies between the line named and the damage, at most


class Lines:
    """Iterates over the lines of a piece, without their line feeds; one line at a time in memory.

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
            file = opened.enter_context(open(source.path, "rb", buffering=_BUFFER))
            if source.format == "files" or source.compression:
                yield from self._whole(file, opened)
            else:
                yield from self._range(file)
        source.check_unchanged()

    def _range(self, file: BinaryIO) -> Iterator[bytes]:
        begin, end = self._piece.begin, self._piece.end
        position = _skip_to_line(file, begin, end)
        self.first_byte = position
        while position < end and (line := file.readline()):
            position += len(line)
            self.done = min(position, end) - begin
            yield line[:-1] if line.endswith(b"\n") else line

    def _whole(self, file: BinaryIO, opened: ExitStack) -> Iterator[bytes]:
        source = self._piece.source
        stream = opened.enter_context(_unpacked(file, source.compression))
        count = 0
        try:
            if source.format == "files":
                count, whole = 1, stream.read()
                self.done = source.size
                yield whole
                return
            while line := stream.readline():
                count += 1
                self.done = file.tell()
                yield line[:-1] if line.endswith(b"\n") else line
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


def lines_before(path: str, offset: int) -> int:
    """Line feeds in the first `offset` bytes of a file, which is read again for it."""
    count = 0
    with as_storage_error(path, "cannot read the input"), open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(_BUFFER, offset))):
            count += block.count(b"\n")
            offset -= len(block)
    return count


def _skip_to_line(file: BinaryIO, begin: int, end: int) -> int:
    """Go to the first line that begins at `begin` or later; returns where, or `end` or more.

    A line begins at `begin` where the byte before is a line feed. A long line from before is
    passed over in bounded memory, and no further than to `end`.
    """
    if begin == 0:
        return 0
    position = file.seek(begin - 1)
    while position < end and (found := file.readline(_BUFFER)):
        position += len(found)
        if found.endswith(b"\n"):
            return position
    return end


def _unpacked(file: BinaryIO, compression: str) -> BinaryIO:
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _UNPACKED)
    if compression == "zstd":
        return io.BufferedReader(ZstdStream(file), _UNPACKED)
    return file
