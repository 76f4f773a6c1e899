"""Map each position of a stage to a stream and to the index of that stream's sample.

Streams are mixed in proportion to integer shares by Webster's divisor method, so that the draws of
every stream are proportional to its share at any position, to about one draw. Three arrangements of
draws, with shares 2 and 1 of streams a and b:

    stratified   a b a  a b a     evenly distributed draws
    per stream   aaaa bbbb aaaa   evenly distributed batches (here of 4 samples each)
    random       b a a  a a b     stratified draws, shuffled within blocks

A stage whose weights change in mid-run (`ChangedMixing`) draws evenly, or in batches, from the
first change on, and owes each stream what rounding left of its weights before a change.

All are computed by blocks at any position; memory does not depend on the length of a stage.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from operator import mul
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megaindex._types import I16, I64, U32, U64
from megaindex.errors import InvalidArgument
from megaindex.index.draws import BlendDraws, Draws, Rule
from megaindex.index.spans import uncached_state
from megaindex.kernels import active, num_threads
from megaindex.kernels.reference.blending import UNIT
from megaindex.keys.numbers import key_of
from megaindex.validation import check_between

BLOCK = 1 << 16  # positions computed at once
SHUFFLED = 1 << 11  # positions that `Random` shuffles together
MOST_STREAMS = 2**15 - 1
_MOST_POSITIONS = 2**60
_BLOCKS_KEPT = 4


class MixedPositions(NamedTuple):
    """Streams and samples of n positions of a stage."""

    stream: I16
    """int16[n]: number of the stream."""
    ordinal: I64
    """int64[n]: number of earlier draws of that stream in the stage."""


def _joined(pieces: Sequence[MixedPositions]) -> MixedPositions:
    return MixedPositions(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def check_streams(count: int) -> None:
    """Raise InvalidArgument for a stage of too many streams, or of none."""
    if not 1 <= count <= MOST_STREAMS:
        raise InvalidArgument(f"a stage must have 1 to {MOST_STREAMS} streams, got {count}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixing(Draws):
    """Base class of the draws of one stage."""

    @abstractmethod
    def counts(self, samples: int) -> I64:
        """Return int64[streams]: draws of each stream in the first ``samples``."""

    @abstractmethod
    def _block(self, number: int) -> MixedPositions:
        """Return positions number * _block_size to (number + 1) * _block_size - 1."""

    @property
    def _block_size(self) -> int:
        return BLOCK

    def lookup(self, positions: I64) -> MixedPositions:
        """Return the streams and samples of positions in any order."""
        size = self._block_size
        numbers = positions // size
        # nearly every look-up is of one batch, in one block
        if positions.size and (numbers[0] == numbers).all():
            block = self._blocks(int(numbers[0]))
            within = positions % size
            return MixedPositions(block.stream[within], block.ordinal[within])
        found = MixedPositions(
            np.empty(positions.size, np.int16), np.empty(positions.size, np.int64)
        )
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            block = self._blocks(number)
            within = positions[mine] % size
            found.stream[mine], found.ordinal[mine] = block.stream[within], block.ordinal[within]
        return found

    def streams_between(self, begin: int, end: int) -> tuple[I16, I64]:
        """Return the stream of each of positions ``begin`` to ``end - 1``, int16[n], and the draws
        of each stream before them, int64[streams]."""
        size = self._block_size
        streams = np.empty(end - begin, np.int16)
        for start in range(begin // size * size, end, size):
            low, high = max(start, begin), min(start + size, end)
            block = self._block(start // size)
            streams[low - begin : high - begin] = block.stream[low - start : high - start]
        return streams, self.counts(begin)

    def positions(self, stream: int, ordinals: I64, most: int) -> I64:
        """Return the positions below ``most`` of a stream's draws: the inverse of `lookup`.

        Args:
            stream: number of the stream.
            ordinals: numbers of its draws, sorted and distinct; all lie below ``most``.
            most: number of positions that are searched.
        """
        found = np.empty(ordinals.size, np.int64)
        # ranges of positions, and the draws that lie in them, halved until they are short
        ranges = [(0, most, 0, ordinals.size)]
        while ranges:
            begin, end, low, high = ranges.pop()
            if low == high:
                continue
            # counts of a prefix cost no pass over it, so they find the block of each draw
            if end - begin > BLOCK:
                middle = (begin + end) // 2
                count = int(self.counts(middle)[stream])
                cut = low + int(np.searchsorted(ordinals[low:high], count))
                ranges += [(begin, middle, low, cut), (middle, end, cut, high)]
                continue
            drawn = self.lookup(np.arange(begin, end))
            own = np.flatnonzero(drawn.stream == stream)
            order = np.argsort(drawn.ordinal[own])
            at = np.searchsorted(drawn.ordinal[own], ordinals[low:high], sorter=order)
            found[low:high] = own[order[at]] + begin
        return found

    def longest(self, limits: Sequence[int], most: int = _MOST_POSITIONS) -> tuple[int, bool]:
        """Return the most positions, up to ``most``, with no stream drawn above its limit."""
        limit = np.array(limits, np.int64)
        # counts only grow with positions, so the last that fits is bisected for
        low, high = 0, min(most, sum(limits))
        while low < high:
            middle = (low + high + 1) // 2
            if (self.counts(middle) <= limit).all():
                low = middle
            else:
                high = middle - 1
        return low, True

    @cached_property
    def _blocks(self) -> Callable[[int], MixedPositions]:
        return lru_cache(_BLOCKS_KEPT)(self._block)

    def __getstate__(self) -> dict[str, Any]:
        return uncached_state(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedMixing(Mixing):
    """Base class of draws in proportion to integer shares."""

    shares: tuple[int, ...]
    """Share of each stream, 1 to 2**53 - 1."""

    def __post_init__(self) -> None:
        check_streams(len(self.shares))
        if min(self.shares) < 1 or max(self.shares) >= 2**53:
            raise InvalidArgument(
                f"shares of streams must be from 1 to 2**53 - 1, got {list(self.shares)[:8]}; "
                "omit a stream that is not drawn"
            )

    @property
    def unit(self) -> int:
        """Samples of a draw: those of a batch if every batch has as many and is of one stream."""
        return 1

    @cached_property
    def _weights(self) -> U64:
        return np.array(self.shares, np.uint64)

    def _spread(self, begin: int, end: int) -> MixedPositions:
        """Return draws [begin, end) of the divisor rule."""
        if end > _MOST_POSITIONS:
            raise InvalidArgument(f"a stage must have at most 2**60 positions, got {end}")
        drawn = MixedPositions(np.empty(end - begin, np.int16), np.empty(end - begin, np.int64))
        counts = active().divisor_counts(self._weights, begin)
        active().divisor_fill(self._weights, begin, end, counts, drawn.stream, drawn.ordinal)
        return drawn


@dataclass(frozen=True, kw_only=True, eq=False)
class Stratified(FixedMixing, BlendDraws):
    """Evenly distributed draws; ties go to the first stream."""

    rule: ClassVar[Rule] = "divisor"

    @property
    def values(self) -> U64:
        return self._weights

    def counts(self, samples: int) -> I64:
        return active().divisor_counts(self._weights, samples)

    def longest(self, limits: Sequence[int], most: int | None = None) -> tuple[int, bool]:
        # Draw k of a stream, from 0, has time (2k + 1) / share. The first draw above a limit is the
        # least (2 limit + 1) / share. Times are compared by cross-multiplication.
        shares, first = self.shares, 0
        for i in range(1, len(shares)):
            if (2 * limits[i] + 1) * shares[first] < (2 * limits[first] + 1) * shares[i]:
                first = i
        odd, share = 2 * limits[first] + 1, shares[first]
        before = 0
        for i, other in enumerate(shares):
            # of equal times the earlier stream is drawn first, so its draw is before the limit
            last_odd = (odd * other - int(i >= first)) // share
            before += (last_odd + 1) // 2
        return before if most is None else min(before, most), True

    def _block(self, number: int) -> MixedPositions:
        return self._spread(number * BLOCK, (number + 1) * BLOCK)


@dataclass(frozen=True, kw_only=True, eq=False)
class PerStream(FixedMixing):
    """Evenly distributed batches, each of one stream."""

    batch_sizes: tuple[int, ...]
    """Samples of a batch of each stream, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.batch_sizes) != len(self.shares):
            raise InvalidArgument(
                f"each of {len(self.shares)} streams must have a batch size, got "
                f"{len(self.batch_sizes)}"
            )
        for size in self.batch_sizes:
            check_between("batch_size", size, 1, _MOST_POSITIONS)

    @cached_property
    def batch_size(self) -> int | None:
        """Samples of every batch; None if those of the streams differ."""
        return self.batch_sizes[0] if len({*self.batch_sizes}) == 1 else None

    @property
    def unit(self) -> int:
        return self.batch_size or 1

    def samples_after(self, batches: int) -> int:
        """Return the samples of the first ``batches``."""
        if self.batch_size is not None:
            return batches * self.batch_size
        drawn = active().divisor_counts(self._weights, batches)
        return sum(map(mul, drawn.tolist(), self.batch_sizes))

    def batches_within(self, samples: int) -> int:
        """Return the most batches that have at most ``samples`` in all."""
        if self.batch_size is not None:
            return samples // self.batch_size
        mean = Fraction(sum(map(mul, self.shares, self.batch_sizes)), sum(self.shares))
        low = high = int(samples / mean)  # the answer, to about a batch for each stream
        apart = 1
        while low and self.samples_after(low) > samples:
            low, apart = max(0, low - apart), 2 * apart
        apart = 1
        while self.samples_after(high) <= samples:
            high, apart = high + apart, 2 * apart
        return bisect_right(range(low, high), samples, key=self.samples_after) - 1 + low

    def sizes_between(self, begin: int, end: int) -> I64:
        """Return int64[n]: samples of batches ``begin`` to ``end - 1``."""
        return np.array(self.batch_sizes, np.int64)[self._spread(begin, end).stream]

    def counts(self, samples: int) -> I64:
        batches = self.batches_within(samples)
        counts: I64 = active().divisor_counts(self._weights, batches) * self.batch_sizes
        if rest := samples - self.samples_after(batches):
            counts[self._spread(batches, batches + 1).stream[0]] += rest
        return counts

    def _block(self, number: int) -> MixedPositions:
        begin, end = number * BLOCK, (number + 1) * BLOCK
        first, last = self.batches_within(begin), self.batches_within(end - 1)
        drawn = self._spread(first, last + 1)
        sizes = np.array(self.batch_sizes, np.int64)[drawn.stream]
        # the first batch may begin before the block, the last one end behind it
        bounds = np.append(0, np.cumsum(sizes)) - (begin - self.samples_after(first))
        which = np.repeat(np.arange(sizes.size), np.diff(np.clip(bounds, 0, BLOCK)))
        within = np.arange(BLOCK) - bounds[which]
        return MixedPositions(drawn.stream[which], (drawn.ordinal * sizes)[which] + within)


@dataclass(frozen=True, kw_only=True, eq=False)
class Random(FixedMixing):
    """Stratified draws, shuffled within blocks of 2048 positions that end at each period."""

    seed: int
    name: str
    """Part of the shuffle key besides the seed, such as the name of the stage."""
    period: int = _MOST_POSITIONS
    """Positions after which the draws must be exactly proportional to the shares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("period", self.period, 1)

    def counts(self, samples: int) -> I64:
        begin, _ = self._bounds(samples)
        counts = active().divisor_counts(self._weights, begin)
        if samples > begin:
            served = self._shuffled(begin).stream[: samples - begin]
            counts += np.bincount(served, minlength=counts.size)
        return counts

    def _block(self, number: int) -> MixedPositions:
        position, end = number * SHUFFLED, (number + 1) * SHUFFLED
        pieces: list[MixedPositions] = []
        while position < end:
            begin, stop = self._bounds(position)
            shuffled = self._shuffled(begin)
            part = slice(position - begin, min(stop, end) - begin)
            pieces.append(MixedPositions(shuffled.stream[part], shuffled.ordinal[part]))
            position = min(stop, end)
        return _joined(pieces)

    @property
    def _block_size(self) -> int:
        return SHUFFLED

    def _bounds(self, position: int) -> tuple[int, int]:
        """Return the bounds of the shuffled block at a position."""
        period = position // self.period * self.period
        begin = period + (position - period) // SHUFFLED * SHUFFLED
        return begin, min(begin + SHUFFLED, period + self.period)

    @cached_property
    def _shuffled(self) -> Callable[[int], MixedPositions]:
        return lru_cache(_BLOCKS_KEPT)(self._shuffle)

    def _shuffle(self, begin: int) -> MixedPositions:
        """Return the block at ``begin`` with shuffled streams and ordered samples of each."""
        _, end = self._bounds(begin)
        spread = self._spread(begin, end)
        key = key_of(f"megaindex/{self.seed}/{begin}/mixing/{self.name}")
        order = np.empty(end - begin, np.int64)
        active().bijection_range(key, end - begin, 0, order)
        stream = spread.stream[order]
        ordinal = np.empty(end - begin, np.int64)
        by_stream = np.argsort(spread.stream, kind="stable")
        ordinal[np.argsort(stream, kind="stable")] = spread.ordinal[by_stream]
        return MixedPositions(stream, ordinal)


class MixTable:
    """Weights of a stage after each change, and the draws of each stream before it.

    It grows with the changes of a run: what it holds of earlier changes stays as it is.

    Args:
        first: draws of the stage before its first change; None if the first change is at its start.
        start: position of the first change.
        streams: number of streams, at least those of ``first``.
        unit: samples of a draw: those of a batch if every batch is of one stream, else 1.
    """

    def __init__(self, first: FixedMixing | None, start: int, streams: int, unit: int) -> None:
        check_streams(streams)
        self.first, self.streams, self.unit = first, streams, unit
        self.size = 0
        self._starts = np.empty(0, np.int64)
        self._shares = np.empty((0, streams), np.uint32)
        self._deficits = np.zeros((1, streams), np.int64)
        self._counts = np.zeros((1, streams), np.int64)
        if first is not None:
            drawn = first.counts(start)
            self._counts[0, : drawn.size] = drawn // unit

    def add(self, starts: I64, shares: U32) -> None:
        """Append changes: their positions in draws, int64[n], and rows of weights that sum to
        UNIT."""
        size, new = self.size, self.size + starts.size
        if new > len(self._starts):
            room = max(new, 2 * len(self._starts), 16)
            self._starts, self._shares, self._deficits, self._counts = (
                np.concatenate((old, np.zeros((room - len(old), *old.shape[1:]), old.dtype)))
                for old in (self._starts, self._shares, self._deficits, self._counts)
            )
        self._starts[size:new], self._shares[size:new] = starts, shares
        begin = max(size - 1, 0)
        active().mix_table(
            self._shares[begin : new - 1],
            np.diff(self._starts[begin:new]),
            self._deficits[begin:new],
            self._counts[begin:new],
        )
        self.size = new

    def rows(self, size: int) -> tuple[U32, I64, I64, I64]:
        """Return shares, starts, deficits and counts of the first ``size`` changes."""
        return (
            self._shares[:size],
            self._starts[:size],
            self._deficits[:size],
            self._counts[:size],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChangedMixing(Mixing):
    """Draws of a stage whose weights change; see `megaindex.kernels.reference.blending`.

    A stream may have weight 0 for a time. Its draws go on where they stopped.
    """

    table: MixTable
    size: int
    """Number of changes, of those that the table holds."""
    rows: tuple[int, int]
    """Range of these changes in the record of the run."""
    columns: tuple[int, ...]
    """Column of each stream in the record of the run; -1 for a weight of 0 throughout."""
    piece: int = 0
    """First position of the draws, as the record counts."""
    path: str = ""
    """File of the record; empty if none holds it."""

    @property
    def first(self) -> FixedMixing | None:
        """Draws before the first change."""
        return self.table.first

    @property
    def start(self) -> int:
        """Position of the first change."""
        return int(self.table.rows(1)[1][0]) * self.table.unit

    def weights_at(self, position: int) -> U32 | None:
        """Return the weights in force at a position, uint32[streams] that sum to 2**31; None
        before the first change."""
        shares, starts, _, _ = self.table.rows(self.size)
        row = int(np.searchsorted(starts, position // self.table.unit, "right")) - 1
        return None if row < 0 else shares[row]

    def streams_before(self, position: int) -> list[int]:
        """Return the streams that have a weight at some position before ``position``."""
        shares, starts, _, _ = self.table.rows(self.size)
        size = int(np.searchsorted(starts * self.table.unit, position))
        drawn = set(np.flatnonzero(shares[:size].any(axis=0)).tolist())
        if self.first is not None:
            drawn |= set(range(len(self.first.shares)))
        return sorted(drawn)

    def counts(self, samples: int) -> I64:
        shares, starts, deficits, counts = self.table.rows(self.size)
        draw, rest = divmod(samples, self.table.unit)
        if samples <= self.start and self.first is not None:
            before = self.first.counts(samples)
            return np.pad(before, (0, self.table.streams - before.size))
        row = max(int(np.searchsorted(starts, draw, "right")) - 1, 0)
        owed, drawn = np.zeros((2, 2, self.table.streams), np.int64)
        owed[0], drawn[0] = deficits[row], counts[row]
        length = np.array([draw - starts[row]], np.int64)
        active().mix_table(shares[row : row + 1], length, owed, drawn)
        found: I64 = drawn[1] * self.table.unit
        if rest:
            found[self._range(samples, samples + 1).stream[0]] += rest
        return found

    def _block(self, number: int) -> MixedPositions:
        return self._range(number * BLOCK, (number + 1) * BLOCK)

    def lookup(self, positions: I64) -> MixedPositions:
        """Return the streams and samples of positions; at once where they follow each other."""
        begin, end = (int(positions[0]), int(positions[-1]) + 1) if positions.size else (0, 0)
        if end - begin == positions.size > 1 and (np.diff(positions) == 1).all():
            return self._range(begin, end)
        return super().lookup(positions)

    def streams_between(self, begin: int, end: int) -> tuple[I16, I64]:
        return self._range(begin, end).stream, self.counts(begin)

    def _range(self, begin: int, end: int) -> MixedPositions:
        """Return positions begin to end - 1."""
        if end > _MOST_POSITIONS:
            raise InvalidArgument(f"a stage must have at most 2**60 positions, got {end}")
        cut = min(max(self.start, begin), end)
        if begin < cut and self.first is not None:
            before = self.first.lookup(np.arange(begin, cut))
            if cut == end:
                return before
            return _joined([before, self._range(cut, end)])
        unit = self.table.unit
        low, high = begin // unit, -(-end // unit)
        drawn = MixedPositions(np.empty(high - low, np.int16), np.empty(high - low, np.int64))
        rows = self.table.rows(self.size)
        active().mix_fill(*rows, low, drawn.stream, drawn.ordinal, num_threads())
        if unit == 1:
            return drawn
        draw, within = np.divmod(np.arange(begin, end), unit)
        return MixedPositions(drawn.stream[draw - low], drawn.ordinal[draw - low] * unit + within)


def row_of_weights(weights: Sequence[Fraction]) -> U32:
    """Return weights in units of 2**-31 of their sum, uint32[n] that sums to 2**31.

    Rounded down, with at least one unit for each weight above 0; the units left go to those cut
    most, the first of equals.
    """
    total = sum(weights)
    exact = [weight * UNIT / total for weight in weights]
    units = [max(int(value), int(value > 0)) for value in exact]
    by_cut = sorted(range(len(units)), key=lambda i: (units[i] - exact[i], i))
    missing = UNIT - sum(units)
    for i in by_cut[: max(missing, 0)]:
        units[i] += 1
    if missing < 0:  # more weights below a unit than units were cut
        units[max(range(len(units)), key=units.__getitem__)] += missing
    return np.array(units, np.uint32)
