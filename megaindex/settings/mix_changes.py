"""Record of the weights that were changed in mid-run.

A change holds the first sample of the run that is drawn with its weights, and the weight of every
source in units of 2**-31. In a checkpoint it is text, 8 bytes a number in base64; in a file,
an int64 array in ``.npy`` format with a row for each change: the sample, and the weights.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from megaindex._types import I64, U32
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.index.mixing import ChangedMixing, FixedMixing, MixTable, row_of_weights
from megaindex.io.atomic import write_file
from megaindex.io.mapping import map_npy_file
from megaindex.kernels.reference.blending import UNIT
from megaindex.validation import CheckpointReader, check_fraction, shown

_MOST_POSITION = 2**60
_CHANGES = "the changes of a mix"


class _MixRows:
    """Rows that several records share, of which each is the beginning."""

    def __init__(self, positions: I64, weights: U32) -> None:
        self.positions, self.weights, self.size = positions, weights, positions.size
        self.tables: dict[Any, MixTable] = {}

    def add(self, position: int, weights: U32) -> None:
        if self.size == len(self.positions):
            more = max(self.size, 16)
            columns = self.weights.shape[1]
            self.positions = np.concatenate((self.positions, np.zeros(more, np.int64)))
            self.weights = np.concatenate((self.weights, np.zeros((more, columns), np.uint32)))
        self.positions[self.size], self.weights[self.size] = position, weights
        self.size += 1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixChanges:
    """The weights that were changed in mid-run, in order of their first samples.

    Attributes:
        sources: names of the sources that the weights belong to.
        size: number of changes.
        path: file that holds them; empty if none does.
    """

    sources: tuple[str, ...]
    size: int = 0
    path: str = ""
    _rows: _MixRows = field(repr=False)

    @classmethod
    def empty(cls, sources: Sequence[str]) -> MixChanges:
        """Return a record without changes."""
        rows = _MixRows(np.empty(0, np.int64), np.empty((0, len(sources)), np.uint32))
        return cls(sources=tuple(sources), _rows=rows)

    @classmethod
    def from_array(cls, sources: Sequence[str], rows: Any, name: str) -> MixChanges:
        """Return the record in an array of its file.

        Raises:
            FormatError: the array is not one of changes; ``name`` is where it was.
        """
        rule = ""
        if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[1] != len(sources) + 1:
            rule = f"must be int64 with {len(sources) + 1} columns, the sample and every source"
        elif rows.size and not 0 <= rows[0, 0] <= rows[-1, 0] <= _MOST_POSITION:
            rule = "must have samples from 0 to 2**60"
        elif (np.diff(rows[:, 0]) <= 0).any():
            rule = "must have samples that increase"
        elif (rows[:, 1:] < 0).any() or (rows[:, 1:].sum(axis=1, dtype=np.float64) != UNIT).any():
            rule = "must have weights from 0 that sum to 2**31 in each row"
        if rule:
            raise FormatError(
                f"{name}: not {_CHANGES}: it {rule}, got {rows.dtype} of shape {rows.shape}; "
                "restore it"
            )
        weights = rows[:, 1:].astype(np.uint32)
        own = _MixRows(np.ascontiguousarray(rows[:, 0]), weights)
        return cls(sources=tuple(sources), size=len(rows), _rows=own)

    @classmethod
    def read(cls, path: str, sources: Sequence[str] | None = None) -> MixChanges:
        """Return the record in a file that `write` wrote.

        Args:
            path: the file.
            sources: names of its sources; None: their numbers.

        Raises:
            MissingFile, StorageError: the file cannot be read.
            FormatError: it does not hold changes of so many sources.
        """
        if not os.path.lexists(path):
            raise MissingFile(
                f"{path}: the file of mix changes is not there; check the path in mix_changes"
            )
        try:
            rows = np.array(map_npy_file(path))
        except ValueError:
            raise FormatError(
                f"{path}: not an array in .npy format; write it with MixChanges.write"
            ) from None
        if sources is None:
            sources = [str(column) for column in range(rows.shape[-1] - 1 if rows.ndim else 0)]
        return replace(cls.from_array(sources, rows, path), path=path)

    def begins_with(self, other: MixChanges) -> bool:
        """Return True if the first changes are all those of another record."""
        first = self.to_array()[: other.size]
        return self.sources == other.sources and np.array_equal(first, other.to_array())

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> MixChanges:
        """Write the record to a file, and return it with the path.

        Raises:
            StorageError: the file exists, or cannot be written.
        """
        path = os.fspath(path)
        write_file(path, lambda file: np.save(file, self.to_array()), overwrite=overwrite)
        return replace(self, path=path)

    def to_array(self) -> I64:
        """Return int64[changes, 1 + sources]: the first sample, and the weights in units of
        2**-31."""
        return np.column_stack((self.positions, self.weights.astype(np.int64)))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values: at most 16 bytes a source and change."""
        data = self.to_array().astype("<i8").tobytes()
        return {
            "sources": list(self.sources),
            "changes": self.size,
            "data": base64.b64encode(data).decode(),
        }

    @classmethod
    def from_dict(cls, stored: CheckpointReader) -> MixChanges:
        """Return the record in a result of `to_dict`, or raise FormatError."""
        rule = "must be a list of text"
        sources = stored.checked(
            "sources",
            rule,
            lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value),
        )
        columns, size = len(sources) + 1, stored.integer("changes")
        try:
            data = base64.b64decode(stored.text("data"), validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if len(data) != 8 * size * columns:
            raise stored.error(f"data must hold {size} rows of {columns} numbers", len(data))
        rows = np.frombuffer(data, "<i8").astype(np.int64).reshape(size, columns)
        return cls.from_array(sources, rows, "the state of a recipe's loader")

    @property
    def positions(self) -> I64:
        """int64[changes]: first sample of the run that is drawn with the weights of each."""
        return self._rows.positions[: self.size]

    @property
    def weights(self) -> U32:
        """uint32[changes, sources]: weights in units of 2**-31."""
        return self._rows.weights[: self.size]

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"MixChanges({self.size} of {', '.join(self.sources)})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MixChanges)
            and self.sources == other.sources
            and np.array_equal(self.positions, other.positions)
            and np.array_equal(self.weights, other.weights)
        )

    def __hash__(self) -> int:
        return hash((self.sources, self.size))

    def with_change(self, position: int, weights: U32) -> MixChanges:
        """Return the record with one more change; one of the same first sample is replaced."""
        at = int(np.searchsorted(self.positions, position))
        if at == self.size == self._rows.size:  # the usual case, without a copy of the others
            self._rows.add(position, weights)
            return replace(self, size=self.size + 1, path="")
        end = at + int(at < self.size and self.positions[at] == position)
        positions = np.concatenate((self.positions[:at], [position], self.positions[end:]))
        rows = np.concatenate((self.weights[:at], weights[None], self.weights[end:]))
        return replace(self, size=len(rows), path="", _rows=_MixRows(positions, rows))

    def of_sources(self, names: Sequence[str]) -> MixChanges:
        """Return the record with a column for each of these sources, which include its own."""
        if self.sources == tuple(names):
            return self
        rows = _MixRows(self.positions.copy(), self._weights_in(self._columns(names), slice(None)))
        return replace(self, sources=tuple(names), path="", _rows=rows)

    def before(self, position: int) -> MixChanges:
        """Return the record without changes from ``position`` on."""
        size = int(np.searchsorted(self.positions, position))
        return self if size == self.size else replace(self, size=size, path="")

    def first_difference(self, other: MixChanges, end: int) -> int | None:
        """Return the first sample before ``end`` at which another record changes to other weights,
        or does not change; None if they are equal."""
        ours, theirs = self.before(end), other.before(end)
        names = sorted({*self.sources, *other.sources})
        common = min(ours.size, theirs.size)
        a, b = (each._weights_in(each._columns(names), slice(common)) for each in (ours, theirs))
        same = (ours.positions[:common] == theirs.positions[:common]) & (a == b).all(axis=1)
        at = int(np.argmin(same)) if not same.all() else common
        found = [int(each.positions[at]) for each in (ours, theirs) if at < each.size]
        return min(found, default=None)

    def weights_from(self, position: int) -> dict[str, float] | None:
        """Return the shares that a change at ``position`` sets, by source; None without one."""
        at = int(np.searchsorted(self.positions, position))
        if at == self.size or self.positions[at] != position:
            return None
        pairs = zip(self.sources, self.weights[at].tolist(), strict=True)
        return {name: units / UNIT for name, units in pairs if units}

    def _columns(self, names: Sequence[str]) -> I64:
        """Return the column of each source; -1 of those that the weights do not name."""
        numbers = {name: number for number, name in enumerate(self.sources)}
        return np.array([numbers.get(name, -1) for name in names], np.int64)

    def _weights_in(self, columns: I64, rows: slice) -> U32:
        """Return weights of changes in these columns, uint32[changes, n]; 0 for column -1."""
        weights: U32 = self.weights[rows][:, columns] * (columns >= 0).astype(np.uint32)
        return weights

    def mixing(
        self,
        begin: int,
        end: int,
        piece: int,
        names: Sequence[str],
        first: FixedMixing | None,
        unit: int,
    ) -> ChangedMixing | None:
        """Return the draws of a part of a stage, or None if no change concerns it.

        Args:
            begin: first sample of the stage; changes before it belong to earlier stages.
            end: one past the last sample of the stage.
            piece: first sample of the part.
            names: source of each stream; those of ``first`` come first.
            first: draws before the first change; None if no stream is left for them.
            unit: samples of a draw.

        Raises:
            InvalidArgument: all sources of a change are exhausted.
        """
        low, high = np.searchsorted(self.positions, (begin, end)).tolist()
        # the change in force where the part begins, if any
        low = max(low, int(np.searchsorted(self.positions, piece, "right")) - 1)
        if low >= high:
            return None
        return self.draws(low, high, piece, self._columns(names), first, unit)

    def draws(
        self, low: int, high: int, piece: int, columns: I64, first: FixedMixing | None, unit: int
    ) -> ChangedMixing:
        """Return the draws of a part of a stage with changes ``low`` to ``high - 1``.

        Args:
            low: number of the change in force where the part begins, or of the first one in it.
            high: one past the last change.
            piece: first sample of the part.
            columns: source of each stream, by its column; -1 for a weight of 0.
            first: draws before the first change.
            unit: samples of a draw.
        """
        start = max(int(self.positions[low]) - piece, 0)
        before = first if start > 0 else None
        facts = before and (type(before), *(getattr(before, f.name) for f in fields(before)))
        key = (low, piece, tuple(columns.tolist()), unit, facts)
        table = self._rows.tables.get(key)
        if table is None:
            table = self._rows.tables[key] = MixTable(before, start, columns.size, unit)
        if table.size < high - low:
            rows = slice(low + table.size, high)
            weights = self._weights_in(columns, rows)
            starts = np.maximum(self.positions[rows] - piece, 0) // unit
            table.add(starts, _whole(weights, self.positions[rows]))
        return ChangedMixing(
            table=table,
            size=high - low,
            rows=(low, high),
            columns=tuple(columns.tolist()),
            piece=piece,
            path=self.path,
        )


def _whole(weights: U32, positions: I64) -> U32:
    """Return the weights, those of exhausted sources divided among the others.

    Rounded down; the units left go to the greatest weight, the first of equals.
    """
    sums = weights.sum(axis=1, dtype=np.int64)
    partial = np.flatnonzero(sums != UNIT)
    if partial.size == 0:
        return weights
    empty = partial[sums[partial] == 0]
    if empty.size:
        raise InvalidArgument(
            f"the mix from sample {positions[empty[0]]} on has weights of exhausted sources alone; "
            "give another source a weight, or raise max_epochs"
        )
    scaled = weights[partial].astype(np.int64) * UNIT // sums[partial][:, None]
    greatest = weights[partial].argmax(axis=1)
    scaled[np.arange(partial.size), greatest] += UNIT - scaled.sum(axis=1)
    weights[partial] = scaled
    return weights


def given_weights(
    weights: Mapping[str, object], names: Sequence[str], bounds: Mapping[str, tuple[Any, Any]]
) -> U32:
    """Return a row of weights for the sources ``names``; those not given have 0."""
    if not isinstance(weights, Mapping):
        raise InvalidArgument(
            f"the mix must be a mapping of sources to weights, such as {{'web': 0.7, 'code': 0.3}}"
            f", got {shown(weights)}"
        )
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise InvalidArgument(
            f"mix: unknown source {shown(unknown[0])}; the sources are {', '.join(names)}"
        )
    values = []
    for name in names:
        value: Any = weights.get(name, 0)
        if isinstance(value, float | np.floating) and not math.isfinite(value):
            raise InvalidArgument(f"mix: {name}: must be a number from 0, got {value}")
        values.append(check_fraction(f"mix: {name}", value))
        if values[-1] < 0:
            raise InvalidArgument(f"mix: {name}: must be a number from 0, got {shown(value)}")
    total = sum(values)
    if total == 0:
        raise InvalidArgument("mix: the weights sum to 0; give at least one source a weight")
    row = row_of_weights(values)
    for name, (least, most) in bounds.items():
        units = int(row[list(names).index(name)])
        if not least * UNIT - 1 <= units <= most * UNIT + 1:
            raise InvalidArgument(
                f"mix: {name}: a share of {units / UNIT:.4g} is out of its mix_bounds "
                f"[{float(least):g}, {float(most):g}]; change the weights, or the bounds in the "
                "recipe"
            )
    return row
