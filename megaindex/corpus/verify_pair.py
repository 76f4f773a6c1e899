"""The rules of a .bin/.idx pair, each broken one a finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.findings import Collector, Report
from megaindex.corpus.verify_layout import check_layout
from megaindex.corpus.verify_tokens import check_document_ends, check_tokens
from megaindex.format.dtypes import Dialect, code_fault
from megaindex.format.faults import Fault
from megaindex.format.header import HEADER_BYTES, header_fault, parse_header, size_fault
from megaindex.format.pair import IndexArrays, index_arrays
from megaindex.format.paths import pair_paths
from megaindex.format.validate import (
    bound_end_fault,
    bound_faults,
    sequence_chunks,
    sequence_fault,
    sequence_masks,
)
from megaindex.io.facts import Facts
from megaindex.io.kinds import odd_kind
from megaindex.io.locations import is_remote
from megaindex.io.mapping import map_readonly
from megaindex.io.objects.files import local_copy, look_at
from megaindex.io.progress import Bar


@dataclass(frozen=True, kw_only=True)
class PairRules:
    """What a pair is held to besides its format."""

    dialect: Dialect
    vocab_size: int | None = None
    eod: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A pair whose .idx has the size it promises; its entries may be anything."""

    bin_path: str
    idx_path: str
    arrays: IndexArrays
    dtype: np.dtype[Any]
    bin_facts: Facts

    @property
    def bin_nbytes(self) -> int:
        return self.bin_facts.nbytes


def verify_pair(path_prefix: str, rules: PairRules, *, full: bool, bar: Bar) -> Report:
    """Check a pair; with `full` also where its sequences lie and every token."""
    found = Collector()
    counted: dict[str, int] = {}
    pair = _opened(path_prefix, rules.dialect, found)
    if pair is not None:
        tokens, contiguous = _check_sequences(pair, found)
        _check_bounds(pair, rules.dialect, found)
        counted = {
            "sequences": len(pair.arrays.lengths),
            "documents": max(0, len(pair.arrays.bounds) - 1),
            "tokens": tokens,
            "bytes": pair.bin_nbytes,
        }
        if full:
            _check_bytes(pair, rules, contiguous, found, bar)
    return Report(
        path=path_prefix, kind="pair", full=full, findings=found.findings(), counted=counted
    )


def _opened(path_prefix: str, dialect: Dialect, found: Collector) -> Pair | None:
    """Both files and the arrays of the .idx; None where the header does not tell where they lie."""
    bin_path, idx_path = pair_paths(path_prefix)
    bin_facts, idx_facts = look_at(bin_path), look_at(idx_path)
    for path, facts in ((bin_path, bin_facts), (idx_path, idx_facts)):
        if facts is None:
            found.add(path, _missing(path, idx_path))
        elif not is_remote(path) and (kind := odd_kind(facts.path)):
            found.add(path, _not_a_file(kind))
    if bin_facts is None or idx_facts is None or found.has_errors():
        return None
    index = map_readonly(local_copy(idx_facts))
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
    return Pair(
        bin_path=bin_path,
        idx_path=idx_path,
        arrays=index_arrays(index, header),
        dtype=dialect.dtypes[header.dtype_code],
        bin_facts=bin_facts,
    )


def _missing(path: str, idx_path: str) -> Fault:
    repair = "put the missing half of the pair beside the other"
    if path == idx_path:
        repair += ", or rebuild it with --repair OUT --dtype … --eod …"
    return Fault(
        rule="missing-file",
        where="the file",
        found="no file",
        expected="a file",
        text="is missing",
        remedy=repair,
    )


def _not_a_file(kind: str) -> Fault:
    return Fault(
        rule="not-a-file",
        where="the file",
        found=kind,
        expected="a regular file",
        text="is no regular file",
        remedy="put the file there, or a link to it",
    )


def _check_sequences(pair: Pair, found: Collector) -> tuple[int, bool]:
    """Count tokens; whether sequences follow one another from the beginning to the end."""
    tokens = end = 0
    contiguous = True
    itemsize = pair.dtype.itemsize
    before = 0  # pointer of the sequence in front
    for start, sizes, begins in sequence_chunks(pair.arrays.lengths, pair.arrays.pointers):
        _add_broken(pair, found, start, sizes, begins)
        ends = begins + sizes * itemsize  # wraps in damaged entries only, which are found above
        contiguous &= bool(begins[0] == end and (begins[1:] == ends[:-1]).all())
        decreases = np.diff(begins, prepend=before) < 0
        if decreases.any():
            first = int(decreases.argmax())
            fault = _decrease(start + first, int(begins[first]))
            found.add(pair.idx_path, fault, severity="warning", count=int(decreases.sum()))
        before, end = int(begins[-1]), int(ends[-1])
        tokens += int(sizes.sum())
    if contiguous and 0 <= end < pair.bin_nbytes:
        found.add(pair.bin_path, _unused(end, pair.bin_nbytes), severity="warning")
    return tokens, contiguous


def _add_broken(
    pair: Pair,
    found: Collector,
    start: int,
    sizes: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
) -> None:
    """Each bad sequence counts for the first rule that it breaks."""
    counted = np.zeros(len(sizes), dtype=bool)
    for mask in sequence_masks(sizes, begins, pair.dtype.itemsize, pair.bin_nbytes):
        bad = mask & ~counted
        if bad.any():
            i = int(bad.argmax())
            size, begin = int(sizes[i]), int(begins[i])
            fault = sequence_fault(start + i, size, begin, pair.dtype.itemsize, pair.bin_nbytes)
            found.add(pair.idx_path, fault, count=int(bad.sum()))
        counted |= mask


def _decrease(number: int, begin: int) -> Fault:
    return Fault(
        rule="pointer-order",
        where=f"sequence {number}",
        found=f"begins at byte {begin}",
        expected="not before the sequence in front of it",
        text="sequences do not follow one another in the .bin",
        remedy="readers follow the pointers; megaindex merge writes a pair in order",
    )


def _unused(end: int, bin_nbytes: int) -> Fault:
    return Fault(
        rule="unused-bytes",
        where=f"byte {end}",
        found=f"{bin_nbytes - end} bytes after the last sequence",
        expected="none",
        text="bytes of the .bin are in no sequence",
        remedy="if tokens are missing, restore the .idx of this .bin; else megaindex merge drops "
        "them",
    )


def _check_bounds(pair: Pair, dialect: Dialect, found: Collector) -> None:
    count = len(pair.arrays.lengths)
    fault = bound_end_fault(pair.arrays.bounds, count, dialect)
    if fault is not None:
        found.add(pair.idx_path, fault)
    for number, fault in bound_faults(pair.arrays.bounds, count):
        found.add(pair.idx_path, fault, count=number)
    if fault is None and len(pair.arrays.bounds) and pair.arrays.bounds[-1] != count:
        found.add(
            pair.idx_path, _stops_short(int(pair.arrays.bounds[-1]), count), severity="warning"
        )


def _stops_short(last: int, count: int) -> Fault:
    return Fault(
        rule="bound-last",
        where="the last document bound",
        found=str(last),
        expected=str(count),
        text="document bounds end before the sequences do",
        remedy="GPT-NeoX's merge tool writes such files; training by documents needs a new .idx",
    )


def _tokens(pair: Pair) -> npt.NDArray[Any]:
    data = map_readonly(pair.bin_path)
    return data[: data.size - data.size % pair.dtype.itemsize].view(pair.dtype)


def _check_bytes(
    pair: Pair, rules: PairRules, contiguous: bool, found: Collector, bar: Bar
) -> None:
    """What takes reading the .bin, or sorting the pointers."""
    if not contiguous:
        check_layout(pair.arrays, pair.dtype.itemsize, pair.bin_nbytes, pair.bin_path, found)
    sound = not found.has_errors()
    if sound and rules.eod is not None:
        check_document_ends(pair.arrays, _tokens(pair), rules.eod, pair.bin_path, found)
    pointers = pair.arrays.pointers if sound else None
    check_tokens(pair.bin_facts, pair.dtype, rules.vocab_size, pointers, found, bar)
