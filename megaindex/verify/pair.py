"""Checks of a pair: its .idx, the layout of its .bin, its tokens and its provenance.

Pointers may be in any order; they are sorted by ranges of the .bin, so that memory does not grow
with the number of sequences.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.corpus.tokenize.inputs import InputFile, find_sources
from megaindex.corpus.tokenize.parts import Piece, row_groups, rows_before
from megaindex.corpus.tokenize.reading import Lines
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.format.findings import Collector, Report
from megaindex.format.header import (
    HEADER_BYTES,
    DtypeTable,
    Fault,
    bound_end_fault,
    bound_faults,
    code_fault,
    get_dialect,
    header_fault,
    parse_header,
    sequence_chunks,
    sequence_fault,
    sequence_masks,
    size_fault,
)
from megaindex.format.pair import IndexArrays, index_arrays, pair_paths, provenance_path
from megaindex.format.provenance import Provenance, RowFile, provenance_faults
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import FileInfo, as_storage_error, is_remote, odd_kind
from megaindex.objects.files import local_copy, open_binary, stat_path
from megaindex.progress import Bar

_RANGES = 1 << 16
_AT_ONCE = 1 << 22  # sequences sorted together, except in a range that holds more
_CHUNK_BYTES = 4 << 20
_OBJECT_CHUNK_BYTES = 32 << 20  # the pieces of simultaneous requests
_CHUNK_DOCUMENTS = 1 << 17
_LINES_AT_ONCE = 1 << 16  # lines
_REMEDIES = {
    "missing-file": "restore the missing half of the pair",
    "not-a-file": "replace it by the file or a link to it",
    "pointer-order": "readers accept this; megaindex merge writes a pair in order",
    "bound-last": "written by GPT-NeoX's merge tool; training by documents needs a new .idx",
    "duplicate-sequence": "its tokens are trained on repeatedly; rebuild the .idx unless intended",
    "overlap": "lengths or pointers are wrong; restore the .idx unless this is intended",
    "unused-bytes": "if tokens are missing, restore the .idx of this .bin; otherwise megaindex "
    "merge drops them",
    "not-finite": "write the pair again from its source",
    "token-range": "check --vocab-size and the dialect, or tokenize again",
    "partial-token": "they are never read; if tokens are missing, copy the .bin again",
    "document-end": "check --eod, or tokenize again with --append-eod",
    "input-rows": "restore the input, or tokenize it again: the rows that the file names have "
    "changed",
}
"""Remedies of the rules that readers do not enforce."""


@dataclass(frozen=True, kw_only=True)
class PairRules:
    """The dialect of a pair, rules of its tokens, and whether its input files are read."""

    dialect: str
    vocab_size: int | None
    eod: int | None
    inputs: bool


def verify_pair(path_prefix: str, rules: PairRules, *, full: bool, bar: Bar) -> Report:
    """Check a pair and its provenance; with `full` also the layout of the .bin and every token."""
    found = Collector()
    counted: dict[str, int] = {}
    dialect = get_dialect(rules.dialect)
    pair = _open(path_prefix, dialect, found)
    if pair is not None:
        tokens, contiguous = _check_sequences(pair, found)
        _check_bounds(pair, dialect, found)
        counted = {
            "sequences": len(pair.arrays.lengths),
            "documents": max(0, len(pair.arrays.bounds) - 1),
            "tokens": tokens,
            "bytes": pair.bin_nbytes,
        }
        counted |= check_provenance(path_prefix, counted["documents"], rules.inputs, found)
        if full:
            _check_bytes(pair, rules, contiguous, found, bar)
    return found.report(path_prefix, "pair", full=full, counted=counted)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pair:
    """A pair whose .idx has the size stated in its header; its entries are unchecked."""

    idx_path: str
    arrays: IndexArrays
    dtype: np.dtype[Any]
    bin_info: FileInfo

    @property
    def bin_path(self) -> str:
        return self.bin_info.path

    @property
    def bin_nbytes(self) -> int:
        return self.bin_info.nbytes


def _open(path_prefix: str, dialect: DtypeTable, found: Collector) -> _Pair | None:
    """Open both files; report faults and return None if the arrays cannot be located."""
    bin_path, idx_path = pair_paths(path_prefix)
    bin_info, idx_info = stat_path(bin_path), stat_path(idx_path)
    for path, info in ((bin_path, bin_info), (idx_path, idx_info)):
        if info is None:
            rebuild = ", or rebuild it with --repair OUT --dtype … --eod …" * (path == idx_path)
            found.add(path, _fault("missing-file", "the file", "no file", "a file", rebuild))
        elif not is_remote(path) and (kind := odd_kind(info.path)):
            found.add(path, _fault("not-a-file", "the file", kind, "a regular file"))
    if bin_info is None or idx_info is None or found.has_errors():
        return None
    index = map_readonly(local_copy(idx_info))
    raw = index[:HEADER_BYTES].tobytes()
    fault = header_fault(raw)
    if fault is not None:
        found.add(idx_path, fault)
        return None
    header = parse_header(raw, idx_path)
    faults = (code_fault(header.dtype_code, dialect), size_fault(header, index.size))
    for fault in faults:
        if fault is not None:
            found.add(idx_path, fault)
    if any(faults):
        return None
    return _Pair(
        idx_path=idx_path,
        arrays=index_arrays(index, header),
        dtype=dialect.dtypes[header.dtype_code],
        bin_info=bin_info,
    )


def _fault(rule: str, where: str, found: str, expected: str, more: str = "") -> Fault:
    remedy = _REMEDIES[rule] + more
    return Fault(rule=rule, where=where, found=found, expected=expected, remedy=remedy)


def _check_sequences(pair: _Pair, found: Collector) -> tuple[int, bool]:
    """Check lengths and pointers; return the number of tokens, and if sequences are contiguous."""
    tokens = end = 0
    contiguous = True
    itemsize = pair.dtype.itemsize
    before = 0  # pointer of the preceding sequence
    for start, sizes, begins in sequence_chunks(pair.arrays.lengths, pair.arrays.pointers):
        _add_broken(pair, found, start, sizes, begins)
        ends = begins + sizes * itemsize  # overflows only for entries reported above
        contiguous &= bool(begins[0] == end and (begins[1:] == ends[:-1]).all())
        decreases = np.diff(begins, prepend=before) < 0
        if decreases.any():
            first = int(decreases.argmax())
            where, begin = f"sequence {start + first}", f"begins at byte {begins[first]}"
            rule = "a pointer not below the preceding one"
            fault = _fault("pointer-order", where, begin, rule)
            found.add(pair.idx_path, fault, severity="warning", count=int(decreases.sum()))
        before, end = int(begins[-1]), int(ends[-1])
        tokens += int(sizes.sum())
    if contiguous and 0 <= end < pair.bin_nbytes:
        found.add(pair.bin_path, _gap(-1, pair.bin_nbytes, end), severity="warning")
    return tokens, contiguous


def _add_broken(pair: _Pair, found: Collector, start: int, sizes: I64, begins: I64) -> None:
    """Report bad sequences, each under the first rule that it breaks."""
    counted = np.zeros(len(sizes), dtype=bool)
    for mask in sequence_masks(sizes, begins, pair.dtype.itemsize, pair.bin_nbytes):
        bad = mask & ~counted
        if bad.any():
            i = int(bad.argmax())
            size, begin = int(sizes[i]), int(begins[i])
            fault = sequence_fault(start + i, size, begin, pair.dtype.itemsize, pair.bin_nbytes)
            found.add(pair.idx_path, fault, count=int(bad.sum()))
        counted |= mask


def _check_bounds(pair: _Pair, dialect: DtypeTable, found: Collector) -> None:
    count = len(pair.arrays.lengths)
    fault = bound_end_fault(pair.arrays.bounds, count, dialect)
    if fault is not None:
        found.add(pair.idx_path, fault)
    for number, fault in bound_faults(pair.arrays.bounds, count):
        found.add(pair.idx_path, fault, count=number)
    if fault is None and len(pair.arrays.bounds) and pair.arrays.bounds[-1] != count:
        last = str(pair.arrays.bounds[-1])
        fault = _fault("bound-last", "the last document bound", last, str(count))
        found.add(pair.idx_path, fault, severity="warning")


def _check_bytes(
    pair: _Pair, rules: PairRules, contiguous: bool, found: Collector, bar: Bar
) -> None:
    if not contiguous:
        _check_layout(pair, found)
    sound = not found.has_errors()
    if sound and rules.eod is not None:
        _check_document_ends(pair, rules.eod, found)
    pointers = pair.arrays.pointers if sound else None
    _check_tokens(pair, rules.vocab_size, pointers, found, bar)


def _check_layout(pair: _Pair, found: Collector) -> None:
    """Report sequences that share bytes, and bytes outside every sequence."""
    reach = 0  # the furthest byte so far
    for numbers, begins, ends in _in_file_order(pair):
        reaches = np.maximum(np.maximum.accumulate(ends), reach)
        before = np.concatenate(([reach], reaches[:-1]))
        as_before = (begins[1:] == begins[:-1]) & (ends[1:] == ends[:-1])
        same = np.append(False, as_before)  # equal ones are in one group
        for mask, describe in (
            (same, _duplicate),
            ((begins < before) & ~same, _overlap),
            (begins > before, _gap),
        ):
            if mask.any():
                i = int(mask.argmax())
                fault = describe(int(numbers[i]), int(begins[i]), int(before[i]))
                found.add(pair.bin_path, fault, severity="warning", count=int(mask.sum()))
        reach = int(reaches[-1])
    if reach < pair.bin_nbytes:
        found.add(pair.bin_path, _gap(-1, pair.bin_nbytes, reach), severity="warning")


def _in_file_order(pair: _Pair) -> Iterator[tuple[I64, I64, I64]]:
    """Yield (number, begin, end) of valid sequences that hold tokens, sorted by begin."""
    width = pair.bin_nbytes // _RANGES + 1
    counts = np.zeros(_RANGES, dtype=np.int64)
    for _, begins, _ in _valid(pair):
        counts += np.bincount(begins // width, minlength=_RANGES)
    for first, stop in _groups(counts):
        parts = []
        for numbers, begins, ends in _valid(pair):
            inside = (first * width <= begins) & (begins < stop * width)
            if inside.any():
                parts.append((numbers[inside], begins[inside], ends[inside]))
        numbers, begins, ends = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((ends, begins))
        yield numbers[order], begins[order], ends[order]


def _groups(counts: I64) -> Iterator[tuple[int, int]]:
    """Yield groups [first, stop) of ranges of the .bin with at most `_AT_ONCE` sequences each.

    For a limit of 10, counts 4, 0, 5, 9, 30 make groups 0:3, 3:4 and 4:5.
    """
    first = 0
    while first < len(counts):
        total = np.cumsum(counts[first:])
        stop = first + max(1, int(np.searchsorted(total, _AT_ONCE, side="right")))
        if total[stop - first - 1]:
            yield first, stop
        first = stop


def _valid(pair: _Pair) -> Iterator[tuple[I64, I64, I64]]:
    """Yield (number, begin, end) of sequences that hold tokens and break no rule."""
    itemsize = pair.dtype.itemsize
    for start, sizes, begins in sequence_chunks(pair.arrays.lengths, pair.arrays.pointers):
        bad = np.logical_or.reduce(sequence_masks(sizes, begins, itemsize, pair.bin_nbytes))
        kept = np.flatnonzero(~bad & (sizes > 0))
        yield kept + start, begins[kept], begins[kept] + sizes[kept] * itemsize


def _duplicate(number: int, begin: int, before: int) -> Fault:
    again = f"bytes of another sequence, from {begin} on"
    return _fault("duplicate-sequence", f"sequence {number}", again, f"bytes from {before} on")


def _overlap(number: int, begin: int, before: int) -> Fault:
    inside, after = f"begins at byte {begin}, inside another", f"begins at byte {before} or later"
    return _fault("overlap", f"sequence {number}", inside, after)


def _gap(_number: int, begin: int, before: int) -> Fault:
    outside = f"bytes {before} to {begin} outside every sequence"
    return _fault("unused-bytes", f"byte {before}", outside, "no unused bytes")


def _check_tokens(
    pair: _Pair, vocab_size: int | None, pointers: I64 | None, found: Collector, bar: Bar
) -> None:
    """Read every byte; report token ids outside the vocabulary and floats that are not finite.

    Valid ``pointers`` add the number of the sequence to a fault.
    """
    bin_path, dtype = pair.bin_path, pair.dtype
    with as_storage_error(bin_path, "cannot read"), open_binary(pair.bin_info) as file:
        progress = bar(file.seek(0, 2))
        file.seek(0)
        at = 0
        chunk = _OBJECT_CHUNK_BYTES if is_remote(bin_path) else _CHUNK_BYTES
        while raw := file.read(chunk):
            whole = len(raw) // dtype.itemsize * dtype.itemsize
            if whole < len(raw) and whole:  # the read ended inside a token
                file.seek(whole - len(raw), 1)
                raw = raw[:whole]
            if not whole:
                part = _fault("partial-token", f"byte {at}", f"{len(raw)} bytes", "whole tokens")
                found.add(bin_path, part, severity="warning")
                return
            tokens = np.frombuffer(raw, dtype)
            bad = _misfits(tokens, vocab_size)
            if bad is not None and bad.any():
                i = int(bad.argmax())
                byte = at + i * dtype.itemsize
                fault = _misfit(byte, tokens[i], vocab_size, pointers)
                found.add(bin_path, fault, count=int(bad.sum()))
            at += whole
            progress(whole)


def _misfits(tokens: npt.NDArray[Any], vocab_size: int | None) -> npt.NDArray[np.bool_] | None:
    bad: npt.NDArray[np.bool_]
    if tokens.dtype.kind == "f":
        bad = ~np.isfinite(tokens)
        return bad
    if vocab_size is None:
        return None
    if vocab_size > np.iinfo(tokens.dtype).max:  # only negative ids can be outside
        return tokens < 0
    bad = tokens >= vocab_size
    bad |= tokens < 0
    return bad


def _misfit(byte: int, token: Any, vocab_size: int | None, pointers: I64 | None) -> Fault:
    where = f"byte {byte}"
    if pointers is not None and len(pointers) and pointers[0] <= byte:
        # correct if pointers rise, as in the files of all known writers
        where += f", sequence {bisect.bisect_right(pointers, byte) - 1}"
    if token.dtype.kind == "f":
        return _fault("not-finite", where, str(token), "a finite number")
    return _fault("token-range", where, str(token), f"0 to {(vocab_size or 0) - 1}")


def _check_document_ends(pair: _Pair, eod: int, found: Collector) -> None:
    """Report documents whose last token is not `eod`; every entry of the .idx must be valid.

    Documents without sequences, or with an empty last sequence, are not checked.
    """
    arrays, itemsize = pair.arrays, pair.dtype.itemsize
    data = map_readonly(pair.bin_path)
    tokens = data[: data.size - data.size % itemsize].view(pair.dtype)
    for start in range(0, len(arrays.bounds) - 1, _CHUNK_DOCUMENTS):
        bounds = arrays.bounds[start : start + _CHUNK_DOCUMENTS + 1].copy()
        documents = np.flatnonzero(bounds[1:] > bounds[:-1])
        sequences = bounds[1:][documents] - 1
        sizes = arrays.lengths[sequences].astype(np.int64)
        documents, sequences, sizes = (a[sizes > 0] for a in (documents, sequences, sizes))
        ends = arrays.pointers[sequences] // itemsize + sizes - 1
        last = tokens[ends]
        bad = last != eod
        if bad.any():
            i = int(bad.argmax())
            where = f"document {start + documents[i]}, byte {ends[i] * itemsize}"
            fault = _fault("document-end", where, str(last[i]), str(eod))
            found.add(pair.bin_path, fault, count=int(bad.sum()))


def check_provenance(
    path_prefix: str, documents: int, inputs: bool, found: Collector
) -> dict[str, int]:
    """Check every byte, and with `inputs` each input file that exists; return what was counted."""
    faults, provenance = provenance_faults(path_prefix, documents)
    path = provenance_path(path_prefix)
    for fault in faults:
        found.add(path, fault)
    if provenance is None:
        return {"input files": 0} if inputs else {}
    counted = {"input files": len(provenance.files)}
    if provenance.num_unknown:
        counted["documents of unknown origin"] = provenance.num_unknown
    if inputs and not faults:
        there = [n for n, file in enumerate(provenance.files) if _is_there(file)]
        counted["input files read"] = len(there)
        imported = sum(file.tokenizer is None for file in provenance.files)
        if imported:
            counted["input files of imports, which are not compared"] = imported
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
        return _difference("the file", f"{size} bytes", f"{file.size} bytes")
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
        return _difference("the file", str(error), "a readable file")


def _rows_fault(source: InputFile, file: RowFile, row: I64) -> Fault | None:
    groups = row_groups(source, [file.key])
    count = rows_before(source, len(groups))
    last = int(row.max(initial=-1))
    return None if last < count else _difference(f"row {last}", f"{count} rows", f"{last + 1} rows")


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
            return _difference(
                f"{file.row_name} {int(row[i]) + file.first_row}",
                f"bytes {begins[line]} to {ends[line]}",
                f"bytes {begin[i]} to {end[i]}",
            )
        at, count = stop, count + begins.size
    if at < row.size:
        return _difference("the file", f"{count} lines", f"{int(row[-1]) + 1} lines or more")
    return None


def _line_chunks(source: InputFile) -> Iterator[tuple[I64, I64]]:
    """Yield begins and ends of the lines of a file, in chunks."""
    whole = Piece(source=source, begin=0, end=source.size, nbytes=source.size)
    bounds: list[tuple[int, int]] = []
    for begin, line in Lines(whole):
        bounds.append((begin, begin + len(line)))
        if len(bounds) == _LINES_AT_ONCE:
            yield _columns(bounds)
            bounds = []
    if bounds:
        yield _columns(bounds)


def _columns(bounds: list[tuple[int, int]]) -> tuple[I64, I64]:
    begins, ends = np.array(bounds, np.int64).T
    return begins, ends


def _difference(where: str, found: str, expected: str) -> Fault:
    return _fault("input-rows", where, found, expected)
