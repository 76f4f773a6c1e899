"""The figures of a .bin/.idx pair, from its .idx; of a damaged one as far as they go."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.inspect_dialect import DialectGuess, bytes_per_token, guess_dialects
from megaindex.errors import MissingFile, StorageError
from megaindex.format.faults import Fault
from megaindex.format.header import HEADER_BYTES, header_fault, parse_header, size_fault
from megaindex.format.pair import IndexArrays, index_arrays
from megaindex.format.paths import pair_paths
from megaindex.io.facts import Facts
from megaindex.io.kinds import odd_kind
from megaindex.io.locations import is_remote
from megaindex.io.mapping import map_readonly
from megaindex.io.objects.files import local_copy, look_at

_CHUNK = 1 << 17
_CLASSES = 32
_LOWEST: npt.NDArray[np.int64] = np.concatenate(([0], 2 ** np.arange(_CLASSES - 1)))
_COMPANIONS = (".lsm", "-megaindex.json", ".metadata")


@dataclass(frozen=True, kw_only=True)
class PairDescription:
    """A .bin/.idx pair, as its .idx has it; `faults` says what speaks against that."""

    path: str
    index_nbytes: int
    bin_nbytes: int | None
    """None where the .bin is missing, or no file."""
    format: str = "MMIDIDX"
    dtype_code: int | None = None
    dialects: tuple[DialectGuess, ...] = ()
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    empty_sequences: int = 0
    empty_documents: int = 0
    """Documents without any sequence."""
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
    """Files beside the pair that tell more about it."""
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": "pair", **asdict(self)}


def describe_pair(path_prefix: str) -> PairDescription:
    """All of it.

    Raises:
        MissingFile: there is no .idx.
        StorageError: it cannot be read.
    """
    bin_path, idx_path = pair_paths(path_prefix)
    bin_facts, idx_facts = look_at(bin_path), look_at(idx_path)
    odd = _odd(bin_facts)
    bin_nbytes = None if bin_facts is None or odd else bin_facts.nbytes
    if idx_facts is None:
        raise MissingFile(f"{idx_path}: missing, although {bin_path} exists; it tells what that is")
    index = map_readonly(local_copy(idx_facts))
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
    return PairDescription(
        **known,
        **_lengths(arrays.lengths),
        **_layout(arrays, bin_nbytes),
        dtype_code=header.dtype_code,
        dialects=guess_dialects(header.dtype_code, arrays, bin_nbytes),
        documents=max(0, len(arrays.bounds) - 1),
        empty_documents=_repeated(arrays.bounds),
        has_modes=len(arrays.modes) > 0,
        faults=odd + _sentences(size_fault(header, index.size)),
    )


def _is_there(companion: str) -> bool:
    """False too where it cannot be told: its name may be longer than those of the pair."""
    with contextlib.suppress(StorageError):
        return look_at(companion) is not None
    return False


def _odd(bin_facts: Facts | None) -> tuple[str, ...]:
    """What speaks against a .bin that is there."""
    if bin_facts is None or is_remote(bin_facts.path):
        return ()
    kind = odd_kind(bin_facts.path)
    if not kind:
        return ()
    return (f"the .bin is {kind}, not a regular file; put the file there, or a link to it",)


def _sentences(fault: Fault | None) -> tuple[str, ...]:
    return () if fault is None else (f"{fault.text}; {fault.remedy}",)


def _lengths(lengths: npt.NDArray[np.int32]) -> dict[str, Any]:
    held = np.zeros(_CLASSES, dtype=np.int64)
    tokens, shortest, longest = 0, np.iinfo(np.int32).max, 0
    for start in range(0, len(lengths), _CHUNK):
        sizes = lengths[start : start + _CHUNK].astype(np.int64).clip(0)  # negative ones are damage
        # 0 is in class 0, 1 in class 1, 2 and 3 in class 2, …
        classes = np.searchsorted(_LOWEST, sizes, side="right") - 1
        held += np.bincount(classes, minlength=_CLASSES)
        tokens += int(sizes.sum())
        shortest, longest = min(shortest, int(sizes.min())), max(longest, int(sizes.max()))
    used = np.flatnonzero(held)
    return {
        "sequences": len(lengths),
        "tokens": tokens,
        "empty_sequences": int(held[0]),
        "shortest": shortest if len(lengths) else 0,
        "longest": longest,
        "histogram": tuple((int(_LOWEST[k]), int(held[k])) for k in used),
    }


def _layout(arrays: IndexArrays, bin_nbytes: int | None) -> dict[str, Any]:
    """Whether pointers rise, and whether each sequence begins where the one before ends."""
    itemsize = bytes_per_token(arrays, bin_nbytes)
    contiguous, rising = True, True
    before = end = 0
    for start in range(0, len(arrays.pointers), _CHUNK):
        begins = arrays.pointers[start : start + _CHUNK].astype(np.int64)
        sizes = arrays.lengths[start : start + len(begins)].astype(np.int64)
        ends = begins + sizes * (itemsize or 0)  # wraps in damaged files only, and compares unequal
        rising &= bool(begins[0] >= before and (begins[1:] >= begins[:-1]).all())
        contiguous &= bool(begins[0] == end and (begins[1:] == ends[:-1]).all())
        before, end = int(begins[-1]), int(ends[-1])
    return {"bytes_per_token": itemsize, "contiguous": contiguous, "rising": rising}


def _repeated(bounds: npt.NDArray[np.int64]) -> int:
    """Entries that equal the one before."""
    count = 0
    for start in range(0, len(bounds), _CHUNK):
        chunk = bounds[start : start + _CHUNK + 1]  # one more: the first of the next chunk
        count += int((chunk[1:] == chunk[:-1]).sum())
    return count
