"""The records of a piece, whatever its format, and in their places the lines that are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaindex.corpus.tokenize import rows
from megaindex.corpus.tokenize.lines import Lines, lines_before
from megaindex.corpus.tokenize.parts import Piece
from megaindex.corpus.tokenize.records import (
    BadRecord,
    Record,
    Refused,
    Text,
    decoded,
    from_json,
)


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
            return rows.rows_before(source, self._piece.begin) + place
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
        for row in rows.rows(piece.source, self._keys, piece.begin, piece.end):
            place, self.count = self.count, self.count + 1
            try:
                texts = rows.from_row(row, self._keys)
            except BadRecord as error:
                yield Refused(place=place, error=error)
            else:
                yield Record(place=place, texts=texts, size=_size(texts))
        piece.source.check_unchanged()


def place_name(form: str, number: int) -> str:
    """How messages call a place: "line 12", "row 11"; nothing for a file that is one document."""
    return {"parquet": f"row {number}: ", "files": ""}.get(form, f"line {number}: ")


def _size(texts: tuple[Text, ...]) -> int:
    return sum(len(text) for value in texts for text in value)
