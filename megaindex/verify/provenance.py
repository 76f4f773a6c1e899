"""Check of the provenance of a pair, by itself and against the input files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from megaindex._types import I64
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.format.header import Fault
from megaindex.format.provenance import (
    Provenance,
    RowFile,
    provenance_faults,
    provenance_path,
)
from megaindex.tokenize.inputs import InputFile, find_sources
from megaindex.tokenize.parts import Piece, row_groups, rows_before
from megaindex.tokenize.reading import Lines
from megaindex.verify.report import Collector

_AT_ONCE = 1 << 16  # lines
_REMEDY = "restore the input, or tokenize it again: the rows that the file names have changed"


def check_provenance(
    path_prefix: str, documents: int, inputs: bool, found: Collector
) -> dict[str, int]:
    """Check every byte, and with `inputs` each input file that exists; return what was counted."""
    faults, provenance = provenance_faults(path_prefix, documents)
    path = provenance_path(path_prefix)
    for fault in faults:
        found.add(path, fault)
    if provenance is None:
        return {}
    counted = {"input files": len(provenance.files)}
    if provenance.num_unknown:
        counted["documents of unknown origin"] = provenance.num_unknown
    if inputs and not faults:
        there = [n for n, file in enumerate(provenance.files) if _is_there(file)]
        counted["input files read"] = len(there)
        for number in there:
            difference = _input_fault(provenance, number)
            if difference is not None:
                found.add(provenance.files[number].path, difference)
    return counted


def _is_there(file: RowFile) -> bool:
    return file.tokenizer is not None and os.path.isfile(file.path)


def _input_fault(provenance: Provenance, number: int) -> Fault | None:
    """Return the first difference of an input file from the rows of its documents."""
    file = provenance.files[number]
    size = os.path.getsize(file.path)
    if size != file.size:
        return _fault("the file", f"{size} bytes", f"{file.size} bytes")
    documents = provenance.documents_of(number, 0, 2**62)
    rows = provenance.locate(documents)
    try:
        (source,) = find_sources([file.path], file.format)
        if file.format == "parquet":
            return _rows_fault(source, file, rows.row)
        return _lines_fault(source, rows.row, rows.begin, rows.end, file)
    except MegaIndexError as error:
        if isinstance(error, InvalidArgument):
            raise
        return _fault("the file", str(error), "a readable file")


def _rows_fault(source: InputFile, file: RowFile, row: I64) -> Fault | None:
    groups = row_groups(source, [file.key])
    count = rows_before(source, len(groups))
    last = int(row.max(initial=-1))
    return None if last < count else _fault(f"row {last}", f"{count} rows", f"{last + 1} rows")


def _lines_fault(source: InputFile, row: I64, begin: I64, end: I64, file: RowFile) -> Fault | None:
    """Compare the bytes of documents, in any order, with those of the lines of the file."""
    order = np.argsort(row, kind="stable")
    row, begin, end = row[order], begin[order], end[order]
    at = count = 0
    for begins, ends in _line_chunks(source):
        stop = int(np.searchsorted(row, count + begins.size))
        place = row[at:stop] - count
        wrong = (begins[place] != begin[at:stop]) | (ends[place] != end[at:stop])
        if wrong.any():
            i = at + int(wrong.argmax())
            line = int(row[i]) - count
            return _fault(
                f"{file.row_name} {int(row[i]) + file.first_row}",
                f"bytes {begins[line]} to {ends[line]}",
                f"bytes {begin[i]} to {end[i]}",
            )
        at, count = stop, count + begins.size
    if at < row.size:
        return _fault("the file", f"{count} lines", f"{int(row[-1]) + 1} lines or more")
    return None


def _line_chunks(source: InputFile) -> Iterator[tuple[I64, I64]]:
    """Yield begins and ends of the lines of a file, in chunks."""
    whole = Piece(source=source, begin=0, end=source.size, nbytes=source.size)
    bounds: list[tuple[int, int]] = []
    for begin, line in Lines(whole):
        bounds.append((begin, begin + len(line)))
        if len(bounds) == _AT_ONCE:
            yield _columns(bounds)
            bounds = []
    if bounds:
        yield _columns(bounds)


def _columns(bounds: list[tuple[int, int]]) -> tuple[I64, I64]:
    begins, ends = np.array(bounds, np.int64).T
    return begins, ends


def _fault(where: str, found: str, expected: str) -> Fault:
    return Fault(rule="input-rows", where=where, found=found, expected=expected, remedy=_REMEDY)
