"""Lines of text files: of a range of bytes, of a packed file, or a whole file as one.

A line ends with a line feed, a carriage return or both, as in Python's text mode, in which
Megatron's tool reads. A byte order mark at the beginning of a file is no part of its first line.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from megaindex.corpus.tokenize.parts import Piece
from megaindex.corpus.tokenize.sources import Source
from megaindex.corpus.tokenize.unpacking import ZstdStream, zstd_error
from megaindex.errors import FormatError
from megaindex.io.failures import as_storage_error

_BLOCK = 1 << 20
_OBJECT_BLOCK = 16 << 20  # in memory; of an object four requests, which are under way together
_SHORT = 1 << 16  # to look for the end of a line
_OBJECT_SHORT = 1 << 18
_UNPACKED = 1 << 16  # what lies between the line named and the damage, at most
_ENDS = b"\r\n"
_END = re.compile(rb"\r\n?|\n")


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


def lines_before(source: Source, offset: int) -> int:
    """Lines in the first `offset` bytes of a file, which is read again for it.

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
    """Where the first line begins that begins in the piece, or its end or more.

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
    """Lines with their ends; no more blocks are taken than are needed."""
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
