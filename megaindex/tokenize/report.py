"""Result of a tokenizing run, and the report of its bad lines and rows."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megaindex.corpus.outputs import WriteResult
from megaindex.errors import InvalidArgument
from megaindex.format.provenance import Provenance, ProvenanceSpool, RecordedTokenizer, RowFile
from megaindex.io.atomic import AtomicFiles
from megaindex.io.os_errors import as_storage_error
from megaindex.tokenize.inputs import InputFile
from megaindex.tokenize.parts import InputPart
from megaindex.tokenize.reading import place_name
from megaindex.tokenize.settings import TokenizeSettings
from megaindex.tokenize.work_folder import Done, WorkFolder, not_written, read_bad_lines

_FIRST = 10  # bad lines printed by the command


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line or row that cannot be a document."""

    path: str
    format: str
    number: int
    """Number of the line, from 1, or of the row of a Parquet file, from 0."""
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {place_name(self.format, self.number)}{self.detail}"


@dataclass(frozen=True, kw_only=True)
class BadReport:
    """The bad lines of a run."""

    path: str
    """File that lists all of them."""
    count: int
    first: tuple[BadLine, ...]
    """The first ten."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """Result of `tokenize`.

    Attributes:
        pairs: the pair of each key.
        keys: JSON keys, or Parquet columns, that were tokenized, in the order of ``pairs``.
        documents: documents of each pair.
        empty: documents without a token, for each key; they are in the pair, as in Megatron's.
        blank_lines: blank lines skipped.
        bad: bad lines left out, if there were any.
        input_bytes: bytes of the inputs as stored.
        parts: parts that the inputs were divided into.
        resumed: parts that an earlier run had finished.
        new_tokens: tokens of all keys that this run produced; an input given twice counts once.
    """

    pairs: tuple[WriteResult, ...]
    keys: tuple[str, ...]
    documents: int
    empty: tuple[int, ...]
    blank_lines: int
    bad: BadReport | None
    input_bytes: int
    parts: int
    resumed: int
    new_tokens: int

    def lines(self, seconds: float) -> list[str]:
        """Return the lines that the command prints: one for each pair, then one for the run."""
        said = []
        for pair, empty in zip(self.pairs, self.empty, strict=True):
            without = f", {empty:,} documents without any" if empty else ""
            said.append(
                f"{pair.path_prefix}: {pair.documents:,} documents, {pair.tokens:,} "
                f"tokens{without}, {pair.dtype}, {pair.nbytes / 1e6:,.1f} MB"
            )
        rate = self.new_tokens / max(seconds, 1e-9)  # the clock may not have moved
        resumed = f", {self.resumed:,} of them from an earlier run" if self.resumed else ""
        blank = f", {self.blank_lines:,} blank lines skipped" if self.blank_lines else ""
        plural = "" if self.parts == 1 else "s"
        said.append(
            f"  of {self.input_bytes / 1e6:,.1f} MB in {self.parts:,} part{plural}{resumed}{blank}"
            f", in {seconds:.2f} s ({rate:,.0f} tokens/s)"
        )
        return said

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as ``--json`` prints them."""
        return asdict(self)


def summed(
    pairs: tuple[WriteResult, ...],
    keys: tuple[str, ...],
    done: Sequence[Done],
    bad: BadReport | None,
    *,
    input_bytes: int,
    fresh: set[str],
) -> Tokenized:
    """Sum the results of all parts; `fresh` holds the keys of those that this run tokenized."""
    once = {one.key: one for one in done}
    return Tokenized(
        pairs=pairs,
        keys=keys,
        documents=sum(one.documents for one in done),
        empty=tuple(sum(counts) for counts in zip(*(one.empty for one in done), strict=True)),
        blank_lines=sum(one.blank for one in done),
        bad=bad,
        input_bytes=input_bytes,
        parts=len(done),
        resumed=len(once.keys() - fresh),
        new_tokens=sum(sum(one.tokens) for key, one in once.items() if key in fresh),
    )


def bad_report_path(output: str) -> str:
    return f"{output}.bad.jsonl"


def check_bad_report(output: str, inputs: Sequence[str], *, overwrite: bool) -> None:
    """Raise if the report of bad lines would replace an input or, unless `overwrite`, any file.

    Raises:
        InvalidArgument: its path is that of an input.
        StorageError: it exists.
    """
    path = bad_report_path(output)
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise InvalidArgument(
            f"{path}: is both an input and the report of bad lines; choose another prefix"
        )
    AtomicFiles([path], overwrite=overwrite)  # raises if the file exists


def write_bad_report(
    output: str, parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> BadReport | None:
    """Write `<output>.bad.jsonl`, in the order of the inputs, or remove it without bad lines."""
    path = bad_report_path(output)
    count = sum(one.bad for one in done)
    if count == 0:
        with contextlib.suppress(FileNotFoundError), as_storage_error(path, "cannot remove"):
            os.unlink(path)
        return None
    first: list[BadLine] = []
    files = AtomicFiles([path], overwrite=True)
    try:
        with as_storage_error(path, "cannot write"):
            file = files.open(path)
            for line in _bad_lines(parts, done, folder):
                file.write(json.dumps(_entry(line)).encode() + b"\n")
                if len(first) < _FIRST:
                    first.append(line)
        files.publish()
    finally:
        files.discard()
    return BadReport(path=path, count=count, first=tuple(first))


def _bad_lines(
    parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> Iterator[BadLine]:
    """Yield bad lines; their number in a file is the place in a piece plus the lines before it."""
    for part, one, starts in _first_rows(parts, done, folder):
        for bad in read_bad_lines(folder.bad(one.name)) if one.bad else ():
            if not 0 <= bad["piece"] < len(part.pieces):
                raise not_written(folder.bad(one.name), f"it names piece {bad['piece']}")
            source = part.pieces[bad["piece"]].source
            number = starts[bad["piece"]] + bad["place"] + (source.format != "parquet")
            yield BadLine(
                path=source.path,
                format=source.format,
                number=number,
                rule=bad["rule"],
                detail=bad["detail"],
            )


def _first_rows(
    parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> Iterator[tuple[InputPart, Done, list[int]]]:
    """Yield each part, its result, and the rows of the file before each of its pieces."""
    before = 0
    for part, one in zip(parts, done, strict=True):
        starts = []
        if len(one.lines) != len(part.pieces):
            raise not_written(f"{folder.path}/{one.key}.json", "its pieces differ in number")
        for piece, lines in zip(part.pieces, one.lines, strict=True):
            before = before if piece.begin else 0
            starts.append(before)
            before += lines
        yield part, one, starts


@dataclass(frozen=True, kw_only=True)
class PartOrigins:
    """The origins of the documents of all parts, for the pair of one key."""

    parts: Sequence[InputPart]
    done: Sequence[Done]
    folder: WorkFolder
    settings: TokenizeSettings
    key: int
    """Number of the key."""

    def __call__(self, spool: ProvenanceSpool) -> None:
        """Add them in the order of the inputs.

        Raises:
            FormatError: a file of a part was changed after it was written.
        """
        for part, one, starts in _first_rows(self.parts, self.done, self.folder):
            path = self.folder.rows(one.name)
            places = Provenance(path, None)
            places.check_columns()
            if (places.num_documents, len(places.files)) != (one.documents, len(starts)):
                raise not_written(path, "its documents differ in number")
            files = [spool.number_of(self._file(piece.source)) for piece in part.pieces]
            numbers, before = np.array(files, np.int64), np.array(starts, np.int64)
            for rows in places.iterate(0, places.num_documents):
                row = rows.row + before[rows.file]
                spool.add(rows._replace(file=numbers[rows.file], row=row))

    def _file(self, source: InputFile) -> RowFile:
        is_text = source.format != "parquet"
        has_keys = source.format in ("jsonl", "parquet")
        return RowFile(
            path=source.path,
            format=source.format,
            row_name="line" if source.format in ("jsonl", "lines") else "row",
            has_bytes=is_text,
            compression=source.compression,
            size=source.size,
            version=source.version,
            key=self.settings.keys[self.key] if has_keys else "",
            tokenizer=RecordedTokenizer(
                path=self.settings.tokenizer.path,
                fingerprint=self.settings.tokenizer.fingerprint,
                add_special_tokens=self.settings.tokenizer.add_special_tokens,
                eod=self.settings.eod,
            ),
        )


def _entry(line: BadLine) -> dict[str, Any]:
    place = {} if line.format == "files" else {place_name(line.format, 0)[:-4]: line.number}
    return {"file": line.path, **place, "rule": line.rule, "detail": line.detail}
