"""Description of pairs from their .idx, with the dialects they may have, and of cache entries.

Codes 6 and 7 are float64 and float32 to Megatron and PaddleNLP, and the reverse to GPT-NeoX. A pair
of code 6 whose pointers advance by 4 bytes a token is GPT-NeoX's.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.cache.array_files import ArrayFiles
from megaindex.cache.entry import DURABLE, read_manifest
from megaindex.cache.fingerprint import load_records
from megaindex.cache.sidecar import UNREADABLE, SidecarFile, load_sidecar
from megaindex.corpus.subjects import Subject, entries, pairs_of_recipe, subjects
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.header import (
    DIALECTS,
    HEADER_BYTES,
    DtypeTable,
    Fault,
    header_fault,
    parse_header,
    size_fault,
)
from megaindex.format.pair import IndexArrays, index_arrays, pair_paths
from megaindex.io.atomic import Damaged
from megaindex.io.mapping import map_readonly
from megaindex.io.paths import FileInfo, as_storage_error, is_remote, odd_kind
from megaindex.objects.files import local_copy, stat_path
from megaindex.settings.recipe_file import read_recipe

_WIDEST = 8  # bytes of a token
_EXAMINED = 4096  # sequences, at most, to infer the width of tokens
_CHUNK = 1 << 17
_CLASSES = 32
_LOWEST: npt.NDArray[np.int64] = np.concatenate(([0], 2 ** np.arange(_CLASSES - 1)))
_COMPANIONS = (".lsm", "-megaindex.json", ".metadata")


def inspect(path: str | os.PathLike[str]) -> list[PairDescription | EntryDescription]:
    """Describe the pairs, cache entries, snapshots and sets of index arrays at a path.

    Args:
        path: prefix or half of a pair, cache entry, cache, snapshot, sidecar, a folder of these,
            or a recipe, whose pairs are described.

    Returns:
        A description of each, in the order of names.

    Raises:
        MissingFile: nothing exists at `path`.
        StorageError: a file cannot be read.
        InvalidArgument: `path` is of no kind that can be described.
    """
    return [each for subject in subjects(path) for each in _described(subject)]


def _described(subject: Subject) -> list[PairDescription | EntryDescription]:
    if subject.kind == "pair":
        return [describe_pair(subject.path)]
    if subject.kind == "cache entry":
        return [describe_entry(Path(subject.path))]
    if subject.kind == "framework arrays":
        return [*describe_sets(subject.path)]
    if subject.kind == "snapshot":
        return [describe_snapshot(subject.path)]
    if subject.kind == "recipe":
        read_recipe(subject.path)  # raises if the recipe is invalid
        return [describe_pair(each) for pairs in pairs_of_recipe(subject.path) for each in pairs]
    if subject.kind == "lock":
        raise InvalidArgument(
            f"{subject.path}: is a lock, which is text; read it, or check it with megaindex verify"
        )
    return [describe_entry(entry) for entry in entries(subject.path)]


@dataclass(frozen=True, kw_only=True)
class PairDescription:
    """A .bin/.idx pair as described by its .idx."""

    path: str
    index_nbytes: int
    bin_nbytes: int | None
    """None if the .bin is missing or not a regular file."""
    format: str = "MMIDIDX"
    dtype_code: int | None = None
    dialects: tuple[DialectGuess, ...] = ()
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    empty_sequences: int = 0
    empty_documents: int = 0
    """Documents without sequences."""
    shortest: int = 0
    longest: int = 0
    histogram: tuple[tuple[int, int], ...] = ()
    """(smallest length of a class, sequences in it); classes are 0, 1, 2–3, 4–7, …"""
    bytes_per_token: int | None = None
    contiguous: bool = False
    """Sequences follow one another from byte 0 on, without gaps."""
    rising: bool = False
    """Pointers never decrease."""
    has_modes: bool = False
    companions: tuple[str, ...] = ()
    """Existing files with further information about the pair."""
    faults: tuple[str, ...] = ()
    """Contradictions between the .idx, its size and the .bin."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "pair", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class EntryDescription:
    """A cache entry as recorded in its manifest, a set of arrays as recorded in its sidecar, or a
    snapshot of sources."""

    path: str
    kind: str = "cache entry"
    parameters: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dtype, shape and bytes of each array."""
    nbytes: int = 0
    boot_id: str = ""
    durable: bool = False
    """True if the files were synced to disk, so that they need no check after a reboot."""
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_pair(path_prefix: str) -> PairDescription:
    bin_path, idx_path = pair_paths(path_prefix)
    bin_info, idx_info = stat_path(bin_path), stat_path(idx_path)
    odd = _odd(bin_info)
    bin_nbytes = None if bin_info is None or odd else bin_info.nbytes
    if idx_info is None:
        raise MissingFile(
            f"{idx_path}: missing, although {bin_path} exists; restore it, or see verify --repair"
        )
    index = map_readonly(local_copy(idx_info))
    known: dict[str, Any] = {
        "path": path_prefix,
        "index_nbytes": index.size,
        "bin_nbytes": bin_nbytes,
        "companions": tuple(p for s in _COMPANIONS if _is_there(p := path_prefix + s)),
    }
    raw = index[:HEADER_BYTES].tobytes()
    fault = header_fault(raw)
    if fault is not None:
        name = "TNTIDX" if fault.rule == "old-format" else "unknown"
        return PairDescription(**known, format=name, faults=odd + _sentences(fault))
    header = parse_header(raw, idx_path)
    arrays = index_arrays(index, header)
    layout, end = _layout(arrays, bin_nbytes)
    return PairDescription(
        **known,
        **_lengths(arrays.lengths),
        **layout,
        dtype_code=header.dtype_code,
        dialects=guess_dialects(header.dtype_code, arrays, bin_nbytes),
        documents=max(0, len(arrays.bounds) - 1),
        empty_documents=_repeated(arrays.bounds),
        has_modes=len(arrays.modes) > 0,
        faults=odd + _sentences(size_fault(header, index.size)) + _short(end, bin_nbytes),
    )


def describe_entry(entry: Path) -> EntryDescription:
    try:
        manifest = read_manifest(entry)
    except FormatError as error:
        return EntryDescription(path=str(entry), faults=(str(error),))
    arrays = {
        name: {"dtype": record.dtype, "shape": record.shape, "bytes": record.nbytes}
        for name, record in manifest.arrays.items()
    }
    return EntryDescription(
        path=str(entry),
        parameters=manifest.parameters,
        arrays=arrays,
        nbytes=sum(record.nbytes for record in manifest.arrays.values()),
        boot_id=manifest.boot_id,
        durable=(entry / DURABLE).exists(),
    )


def describe_snapshot(path: str) -> EntryDescription:
    try:
        with as_storage_error(path, "cannot read"):
            records = load_records(path)
    except Damaged as error:
        return EntryDescription(path=path, kind="snapshot", faults=(str(error),))
    prefixes = [record["prefix"] for record in records]
    return EntryDescription(path=path, kind="snapshot", parameters={"sources": prefixes})


def describe_sets(sidecar: str) -> list[EntryDescription]:
    try:
        file = load_sidecar(sidecar)
        return [_describe_set(files, file, name) for name, files in file.own_sets(sidecar)]
    except UNREADABLE as error:
        return [EntryDescription(path=sidecar, kind="framework arrays", faults=(str(error),))]


def _describe_set(files: ArrayFiles, file: SidecarFile, name: str) -> EntryDescription:
    recorded = file.sets[name]
    arrays: dict[str, dict[str, Any]] = {
        array: {"dtype": dtype, "shape": shape, "bytes": recorded.files[array][0] - offset}
        for array, (dtype, shape, offset) in recorded.arrays.items()
    }
    return EntryDescription(
        path=str(files),
        kind="framework arrays",
        parameters={**recorded.settings, "corpus": recorded.corpus, "origin": recorded.origin},
        arrays=arrays,
        nbytes=sum(int(array["bytes"]) for array in arrays.values()),
        boot_id=file.boot,
        durable=file.is_durable(name),
    )


def _is_there(companion: str) -> bool:
    with contextlib.suppress(StorageError):  # of a name that is too long
        return stat_path(companion) is not None
    return False


def _odd(bin_info: FileInfo | None) -> tuple[str, ...]:
    """Return a fault if the .bin is not a regular file."""
    if bin_info is None or is_remote(bin_info.path):
        return ()
    kind = odd_kind(bin_info.path)
    if not kind:
        return ()
    return (f"the .bin is {kind}, not a regular file; replace it by the file or a link to it",)


def _sentences(fault: Fault | None) -> tuple[str, ...]:
    return () if fault is None else (f"{fault.text}; {fault.remedy}",)


def _lengths(lengths: npt.NDArray[np.int32]) -> dict[str, Any]:
    counts = np.zeros(_CLASSES, dtype=np.int64)
    tokens, shortest, longest = 0, np.iinfo(np.int32).max, 0
    for start in range(0, len(lengths), _CHUNK):
        sizes = lengths[start : start + _CHUNK].astype(np.int64).clip(0)  # damage may be negative
        # 0 is in class 0, 1 in class 1, 2 and 3 in class 2, …
        classes = np.searchsorted(_LOWEST, sizes, side="right") - 1
        counts += np.bincount(classes, minlength=_CLASSES)
        tokens += int(sizes.sum())
        shortest, longest = min(shortest, int(sizes.min())), max(longest, int(sizes.max()))
    used = np.flatnonzero(counts)
    return {
        "sequences": len(lengths),
        "tokens": tokens,
        "empty_sequences": int(counts[0]),
        "shortest": shortest if len(lengths) else 0,
        "longest": longest,
        "histogram": tuple((int(_LOWEST[k]), int(counts[k])) for k in used),
    }


def _layout(arrays: IndexArrays, bin_nbytes: int | None) -> tuple[dict[str, Any], int]:
    """Return the width of tokens, and whether sequences are contiguous and pointers rise; and the
    end of the last sequence in bytes, of tokens of unknown width the least."""
    itemsize = bytes_per_token(arrays, bin_nbytes)
    contiguous, rising = True, True
    before = end = last = 0
    for start in range(0, len(arrays.pointers), _CHUNK):
        begins = arrays.pointers[start : start + _CHUNK].astype(np.int64)
        sizes = arrays.lengths[start : start + len(begins)].astype(np.int64)
        ends = begins + sizes * (itemsize or 0)  # overflows only in damaged files
        rising &= bool(begins[0] >= before and (begins[1:] >= begins[:-1]).all())
        contiguous &= bool(begins[0] == end and (begins[1:] == ends[:-1]).all())
        before, end = int(begins[-1]), int(ends[-1])
        last = max(last, int((begins + sizes * (itemsize or 1)).max()))
    return {"bytes_per_token": itemsize, "contiguous": contiguous, "rising": rising}, last


def _short(end: int, bin_nbytes: int | None) -> tuple[str, ...]:
    """Return a sentence on a .bin that is missing, or ends before the sequences do."""
    if bin_nbytes is None:
        return (".bin: is missing",)
    if end <= bin_nbytes:
        return ()
    return (f".bin: has {bin_nbytes:,} bytes, the sequences end at byte {end:,}",)


def _repeated(bounds: npt.NDArray[np.int64]) -> int:
    """Count entries that equal the one before."""
    count = 0
    for start in range(0, len(bounds), _CHUNK):
        chunk = bounds[start : start + _CHUNK + 1]  # one more: the first of the next chunk
        count += int((chunk[1:] == chunk[:-1]).sum())
    return count


@dataclass(frozen=True, kw_only=True)
class DialectGuess:
    """A pair as read in one dialect."""

    dialect: str
    dtype: str | None
    """None if the dialect lacks the dtype code."""
    possible: bool
    """False if the pair contradicts the dialect."""
    reason: str


def guess_dialects(
    code: int, arrays: IndexArrays, bin_nbytes: int | None
) -> tuple[DialectGuess, ...]:
    """Return for each dialect if the pair can be of it, and the reason."""
    itemsize = bytes_per_token(arrays, bin_nbytes)
    short = len(arrays.bounds) > 0 and 0 <= arrays.bounds[-1] < len(arrays.lengths)
    return tuple(_guess(dialect, code, itemsize, short) for dialect in DIALECTS.values())


def _guess(dialect: DtypeTable, code: int, itemsize: int | None, short: bool) -> DialectGuess:
    dtype = dialect.dtypes.get(code)
    possible, reasons = True, []
    if dtype is None:
        possible, reasons = False, [f"has no dtype code {code}"]
    elif itemsize is not None and dtype.itemsize != itemsize:
        possible = False
        reasons = [f"{dtype} takes {dtype.itemsize} bytes, pointers advance by {itemsize} a token"]
    elif itemsize is not None and len({d.dtypes.get(code) for d in DIALECTS.values()}) > 1:
        reasons = [f"pointers advance by {itemsize} bytes a token"]
    if short and not dialect.bounds_may_stop_short:
        possible = False
        reasons.append("document bounds end before the sequences do")
    elif short:
        reasons.append("document bounds end early, as after its merge tool")
    return DialectGuess(
        dialect=dialect.name,
        dtype=None if dtype is None else str(dtype),
        possible=possible,
        reason="; ".join(reasons) or "consistent with the pair",
    )


def bytes_per_token(arrays: IndexArrays, bin_nbytes: int | None) -> int | None:
    """Infer the width of tokens from the first contiguous sequences; None if it is uncertain.

    A width of more than 8 bytes means a gap between sequences, or damage.
    """
    count = min(len(arrays.lengths), len(arrays.pointers), _EXAMINED)
    # Python integers, since damaged values may overflow
    sizes, begins = arrays.lengths[:count].tolist(), arrays.pointers[:count].tolist()
    for size, begin, end in zip(sizes, begins, begins[1:], strict=False):
        if size > 0 and end > begin and (end - begin) % size == 0:
            return _width((end - begin) // size)
    if count == 1 and sizes[0] > 0 and bin_nbytes and bin_nbytes % sizes[0] == 0:
        return _width(bin_nbytes // sizes[0])
    return None


def _width(nbytes: int) -> int | None:
    return nbytes if nbytes <= _WIDEST else None
