"""Where two orders differ, and by how much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaindex.audit.causes import Cause, causes_of
from megaindex.audit.sides import Side
from megaindex.errors import InvalidArgument
from megaindex.index.arithmetic import INT32_MAX
from megaindex.index.arrays import ArrayIndex
from megaindex.index.spans import Index
from megaindex.kernels.types import U64

_SAMPLES_AT_ONCE = 1 << 16
_ODD = tuple(
    np.uint64(k)
    for k in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of tokens of a sample, the label's extra token included."""

    source: int
    document: int
    offset: int
    length: int | None
    """None: to the document's end, wherever that is."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two orders, position by position and as bags of samples."""

    names: tuple[str, str]
    num_samples: tuple[int, int]
    first_difference: int | None
    """First sample that differs; None where the shorter is a beginning of the longer."""
    samples: tuple[tuple[Run, ...], tuple[Run, ...]] | None
    """What it is on either side."""
    positions_differing: int
    """Of the positions that both have."""
    samples_in_common: int
    """Size of the intersection as multisets, wherever the samples stand."""
    causes: tuple[Cause, ...]

    @property
    def equal(self) -> bool:
        return self.positions_differing == 0 and self.num_samples[0] == self.num_samples[1]

    @property
    def relation(self) -> str:
        """equal, prefix, reordered (the same samples elsewhere) or other samples."""
        if self.equal:
            return "equal"
        if self.positions_differing == 0:
            return "prefix"
        if self.samples_in_common == self.num_samples[0] == self.num_samples[1]:
            return "reordered"
        return "other samples"

    def to_json(self) -> dict[str, Any]:
        """One object of plain values, as ``--json`` prints it."""
        compared = min(self.num_samples)
        return {
            "a": self.names[0],
            "b": self.names[1],
            "relation": self.relation,
            "num_samples": list(self.num_samples),
            "positions_compared": compared,
            "positions_differing": self.positions_differing,
            "share_differing": self.positions_differing / max(1, compared),
            "samples_in_common": self.samples_in_common,
            "first_difference": self.first_difference,
            "samples": None
            if self.samples is None
            else {
                side: [vars(run) for run in runs]
                for side, runs in zip("ab", self.samples, strict=True)
            },
            "causes": [vars(cause) for cause in self.causes],
        }


def compare(a: Side, b: Side) -> Difference:
    """Compares two orders sample by sample.

    Samples are told apart by 64-bit hashes of their runs: two of them are taken for one with a
    chance of 2**-64.

    Raises:
        InvalidArgument: arrays without their dataset against an order that has no arrays.
    """
    first_index, second_index = _comparable(a, b)
    first, second = sample_hashes(first_index), sample_hashes(second_index)
    compared = min(first.size, second.size)
    differing = np.flatnonzero(first[:compared] != second[:compared])
    at = int(differing[0]) if differing.size else None
    equal = at is None and first.size == second.size
    return Difference(
        names=(a.name, b.name),
        num_samples=(first.size, second.size),
        first_difference=at,
        samples=None if at is None else (_runs(a.index, at), _runs(b.index, at)),
        positions_differing=int(differing.size),
        samples_in_common=_in_common(first, second),
        causes=causes_of(a, b, equal=equal),
    )


def sample_hashes(index: Index) -> U64:
    """uint64[num_samples]: of the runs that each sample reads, in their order."""
    parts = [np.zeros(0, np.uint64)]
    for begin in range(0, index.num_samples, _SAMPLES_AT_ONCE):
        spans = index.locate(np.arange(begin, min(index.num_samples, begin + _SAMPLES_AT_ONCE)))
        splits = spans.row_splits
        place = np.arange(len(spans)) - np.repeat(splits[:-1], np.diff(splits))
        mixed = np.zeros(len(spans), np.uint64)
        for column, odd in zip((*spans, place), (*_ODD, _ODD[0]), strict=True):
            mixed = _mix(mixed ^ (column.astype(np.uint64) * odd))
        sums = np.zeros(len(spans) + 1, np.uint64)
        np.cumsum(mixed, out=sums[1:])  # modulo 2**64, and so are the differences
        parts.append(sums[splits[1:]] - sums[splits[:-1]])
    return np.concatenate(parts)


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _comparable(a: Side, b: Side) -> tuple[Index, Index]:
    """Both indices; with lengths unknown on one side, both without."""
    if a.has_lengths and b.has_lengths:
        return a.index, b.index
    plain = []
    for side in (a, b):
        if not isinstance(side.index, ArrayIndex):
            raise InvalidArgument(
                f"{side.name} has no index arrays, and the lengths of the other side's documents "
                "are not known; add --data-path"
            )
        unknown = np.full(side.index.sequence_lengths.size, INT32_MAX, np.int32)
        plain.append(replace(side.index, sequence_lengths=unknown))
    return plain[0], plain[1]


def _runs(index: Index, sample: int) -> tuple[Run, ...]:
    spans = index.locate([sample])
    last = len(spans) - 1
    rows = zip(*(column.tolist() for column in spans), strict=True)
    return tuple(
        Run(
            source=source,
            document=document,
            offset=offset,
            length=None if k < last and offset + length == INT32_MAX else length,
        )
        for k, (source, document, offset, length) in enumerate(rows)
    )


def _in_common(first: U64, second: U64) -> int:
    values, counts = np.unique(first, return_counts=True)
    others, other_counts = np.unique(second, return_counts=True)
    _, left, right = np.intersect1d(values, others, assume_unique=True, return_indices=True)
    return int(np.minimum(counts[left], other_counts[right]).sum())
