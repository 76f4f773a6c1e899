"""The result of a run, and the lines and rows that it left out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megaindex.corpus.outputs import WriteResult
from megaindex.errors import InvalidArgument
from megaindex.io.atomic import AtomicFiles
from megaindex.io.os_errors import as_storage_error
from megaindex.tokenize.parts import InputPart
from megaindex.tokenize.reading import place_name
from megaindex.tokenize.work_folder import Done, WorkFolder, not_written, read_bad_lines

_FIRST = 10  # bad lines that are shown


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line or row that cannot be a document."""

    path: str
    format: str
    number: int
    """Of the line, from 1; of the row of a Parquet file, from 0."""
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {place_name(self.format, self.number)}{self.detail}"


@dataclass(frozen=True, kw_only=True)
class BadReport:
    """All bad lines are in the file; the first are here."""

    path: str
    count: int
    first: tuple[BadLine, ...]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """The result of a run."""

    pairs: tuple[WriteResult, ...]
    """One for each key."""
    keys: tuple[str, ...]
    documents: int
    empty: tuple[int, ...]
    """Documents without a token, for each key; they are in the pair, as Megatron has them."""
    blank_lines: int
    bad: BadReport | None
    input_bytes: int
    """As the inputs lie there, packed or not."""
    parts: int
    resumed: int
    """Parts that an earlier run had finished."""
    new_tokens: int
    """Of this run: without those of parts that an earlier one had finished, and those of an input
    that is given twice once."""

    def lines(self, seconds: float) -> list[str]:
        """What to print of a run that took so long: a line for each pair, then for all."""
        said = []
        for pair, empty in zip(self.pairs, self.empty, strict=True):
            without = f", {empty:,} documents without any" if empty else ""
            said.append(
                f"{pair.path_prefix}: {pair.documents:,} documents, {pair.tokens:,} "
                f"tokens{without}, {pair.dtype}, {pair.nbytes / 1e6:,.1f} MB"
            )
        rate = self.new_tokens / max(seconds, 1e-9)  # the clock may not have moved
        resumed = f", {self.resumed:,} of them from an earlier run" if self.resumed else ""
        blank = f", {self.blank_lines:,} blank lines passed over" if self.blank_lines else ""
        plural = "" if self.parts == 1 else "s"
        said.append(
            f"  of {self.input_bytes / 1e6:,.1f} MB in {self.parts:,} part{plural}{resumed}{blank}"
            f", in {seconds:.2f} s ({rate:,.0f} tokens/s)"
        )
        return said

    def to_json(self) -> dict[str, Any]:
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
    """Put together what came of all parts; `fresh` are the keys of those that this run did."""
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
    """Return the path of the bad lines of a run with this output."""
    return f"{output}.bad.jsonl"


def check_bad_report(output: str, inputs: Sequence[str], *, overwrite: bool) -> None:
    """Refuse a report that would take the place of an input or, unless `overwrite`, of any file.

    Raises:
        InvalidArgument: it is an input.
        StorageError: it is there.
    """
    path = bad_report_path(output)
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise InvalidArgument(
            f"{path}: is an input, and where bad lines of this call are reported; choose another "
            f"prefix"
        )
    AtomicFiles([path], overwrite=overwrite)  # looks for an existing file


def write_bad_report(
    output: str, parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> BadReport | None:
    """Write `<output>.bad.jsonl`, in the order of the inputs; without bad lines, remove it."""
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
    """Places in a file are those in its pieces, behind the lines of the pieces before."""
    before = 0
    for part, one in zip(parts, done, strict=True):
        starts = []
        if len(one.lines) != len(part.pieces):
            raise not_written(f"{folder.path}/{one.key}.json", "it counts lines of other pieces")
        for piece, lines in zip(part.pieces, one.lines, strict=True):
            before = before if piece.begin else 0
            starts.append(before)
            before += lines
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


def _entry(line: BadLine) -> dict[str, Any]:
    place = {} if line.format == "files" else {place_name(line.format, 0)[:-4]: line.number}
    return {"file": line.path, **place, "rule": line.rule, "detail": line.detail}
