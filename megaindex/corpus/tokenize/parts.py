"""Inputs cut into parts: each an independent task, whose key says everything its result is of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import xxhash

from megaindex.corpus.tokenize.rows import row_groups
from megaindex.corpus.tokenize.settings import Settings
from megaindex.corpus.tokenize.sources import Source
from megaindex.index.plain import check_between

PART_FORMAT = 2  # raise when the files of a part would mean something else


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of one input.

    Of a plain JSONL or text file it is a range of bytes, and the piece owns the lines that begin in
    it: with lines of 4 and 6 bytes, 0..5 owns both and 5..10 none. Of a Parquet file it is a range
    of row groups. A packed file is one piece.
    """

    source: Source
    begin: int
    end: int
    nbytes: int
    """Of the input, for progress."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Pieces that are tokenized together, in their order."""

    key: str
    """32 hex digits that stand for inputs, settings and tokenizer; not for who runs it."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def cut(sources: Sequence[Source], settings: Settings, part_bytes: int) -> list[Part]:
    """Parts of about `part_bytes` each, in the order of the inputs: large files are cut, small ones
    put together.

    Raises:
        InvalidArgument: `part_bytes` is not positive, or a Parquet file lacks a column.
        FormatError: a Parquet file cannot be read, or its columns hold no text.
    """
    part_bytes = check_between("part_bytes (--part-size)", part_bytes, 1)
    parts: list[Part] = []
    waiting: list[Piece] = []
    nbytes = 0
    for source in sources:
        for piece in _pieces(source, settings, part_bytes):
            waiting.append(piece)
            nbytes += piece.nbytes
            if nbytes >= part_bytes:
                parts.append(_part(waiting, settings))
                waiting, nbytes = [], 0
    if waiting:
        parts.append(_part(waiting, settings))
    return parts


def _pieces(source: Source, settings: Settings, part_bytes: int) -> Iterator[Piece]:
    if source.format == "parquet":
        yield from _row_group_pieces(source, settings, part_bytes)
    elif source.compression or source.format == "files":
        yield Piece(source=source, begin=0, end=source.size, nbytes=source.size)
    else:
        for begin in range(0, source.size, part_bytes):
            end = min(begin + part_bytes, source.size)
            yield Piece(source=source, begin=begin, end=end, nbytes=end - begin)


def _row_group_pieces(source: Source, settings: Settings, part_bytes: int) -> Iterator[Piece]:
    begin = nbytes = 0
    sizes = row_groups(source, settings.keys)
    for number, size in enumerate(sizes, start=1):
        nbytes += size
        if nbytes >= part_bytes or number == len(sizes):
            yield Piece(source=source, begin=begin, end=number, nbytes=nbytes)
            begin, nbytes = number, 0


def _part(pieces: Sequence[Piece], settings: Settings) -> Part:
    identity = {
        "part_format": PART_FORMAT,
        "pieces": [asdict(piece) for piece in pieces],
        "settings": settings.identity(),
    }
    text = json.dumps(identity, sort_keys=True)
    return Part(key=xxhash.xxh3_128_hexdigest(text.encode()), pieces=tuple(pieces))
