"""Map each position of a stage to a stream and to the index of that stream's sample.

Streams are mixed in the proportions of integer shares by Webster's divisor rule, so at any position
every stream has been drawn as often as its share says, to within one draw or so. Three ways to lay
the draws out, with shares 2 and 1 of streams a and b:

    stratified   a b a  a b a     draws spread as evenly as they can be
    per stream   aaaa bbbb aaaa   the same, of whole batches (here of 4 samples)
    random       b a a  a a b     stratified draws, shuffled within blocks

All of them are computed, block by block, at any position: nothing grows with the length of a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from megaindex._types import I16, I64, U64
from megaindex.errors import InvalidArgument
from megaindex.index.orders.keyed import key_of
from megaindex.kernels import active
from megaindex.validation import check_between

BLOCK = 1 << 16  # positions computed at once
SHUFFLED = 1 << 11  # positions shuffled together where draws are random
MOST_STREAMS = 2**15 - 1
_MOST_POSITIONS = 2**60
_BLOCKS_KEPT = 4


class MixedPositions(NamedTuple):
    """Consecutive positions of a stage."""

    stream: I16
    """int16[n]: number of the stream that serves each position."""
    ordinal: I64
    """int64[n]: how many samples of it the stage drew before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixing(ABC):
    """Draws of one stage; shares are in the proportions of what each stream serves.

    Raises:
        InvalidArgument: no stream, too many, or shares that are not positive.
    """

    shares: tuple[int, ...]
    """One for each stream, positive, each below 2**53."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.shares) <= MOST_STREAMS:
            raise InvalidArgument(
                f"a stage mixes 1 to {MOST_STREAMS} streams, got {len(self.shares)}"
            )
        if min(self.shares) < 1 or max(self.shares) >= 2**53:
            raise InvalidArgument(
                f"shares of streams must be from 1 to 2**53 - 1, got {list(self.shares)[:8]}; "
                "leave out a stream that is not drawn"
            )

    @abstractmethod
    def counts(self, position: int) -> I64:
        """int64[streams]: draws of each stream before ``position``."""

    @abstractmethod
    def _block(self, number: int) -> MixedPositions:
        """Positions number * _block_size to (number + 1) * _block_size - 1."""

    @property
    def _block_size(self) -> int:
        return BLOCK

    def lookup(self, positions: I64) -> MixedPositions:
        """Streams and ordinals of positions in any order."""
        size = self._block_size
        numbers = positions // size
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

    def longest(self, limits: Sequence[int], most: int) -> int:
        """Positions, at most ``most``, before any stream is drawn more often than its limit."""
        limit = np.array(limits, np.int64)
        low, high = 0, min(most, sum(limits))
        while low < high:
            middle = (low + high + 1) // 2
            if (self.counts(middle) <= limit).all():
                low = middle
            else:
                high = middle - 1
        return low

    @cached_property
    def _weights(self) -> U64:
        return np.array(self.shares, np.uint64)

    @cached_property
    def _blocks(self) -> Callable[[int], MixedPositions]:
        return lru_cache(_BLOCKS_KEPT)(self._block)

    def _spread(self, begin: int, end: int) -> MixedPositions:
        """Draws [begin, end) of the divisor rule itself."""
        if end > _MOST_POSITIONS:
            raise InvalidArgument(f"a stage has at most 2**60 positions, got {end}")
        drawn = MixedPositions(np.empty(end - begin, np.int16), np.empty(end - begin, np.int64))
        counts = active().divisor_counts(self._weights, begin)
        active().divisor_fill(self._weights, begin, end, counts, drawn.stream, drawn.ordinal)
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_weights", "_blocks")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Stratified(Mixing):
    """Draws spread as evenly as they can be; of equals the first stream."""

    def counts(self, position: int) -> I64:
        return active().divisor_counts(self._weights, position)

    def _block(self, number: int) -> MixedPositions:
        return self._spread(number * BLOCK, (number + 1) * BLOCK)


@dataclass(frozen=True, kw_only=True, eq=False)
class PerStream(Mixing):
    """Every batch of one stream; batches of the streams spread as evenly as they can be."""

    batch_size: int
    """Samples of a batch, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("batch_size", self.batch_size, 1)

    def counts(self, position: int) -> I64:
        batches, rest = divmod(position, self.batch_size)
        counts: I64 = active().divisor_counts(self._weights, batches) * self.batch_size
        if rest:
            counts[self._spread(batches, batches + 1).stream[0]] += rest
        return counts

    def _block(self, number: int) -> MixedPositions:
        position = np.arange(number * BLOCK, (number + 1) * BLOCK)
        batch, within = np.divmod(position, self.batch_size)
        drawn = self._spread(int(batch[0]), int(batch[-1]) + 1)
        which = batch - batch[0]
        return MixedPositions(drawn.stream[which], drawn.ordinal[which] * self.batch_size + within)


@dataclass(frozen=True, kw_only=True, eq=False)
class Random(Mixing):
    """Stratified draws, shuffled within blocks of 2048: without pattern, each block with its share.

    Blocks also end where a period ends, so that each period draws exactly its shares.
    """

    seed: int
    name: str
    """What the shuffle depends on besides the seed, such as the stage's name."""
    period: int = _MOST_POSITIONS
    """Positions after which the shares have been drawn exactly; their sum, where that matters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("period", self.period, 1)

    def counts(self, position: int) -> I64:
        begin, _ = self._bounds(position)
        counts = active().divisor_counts(self._weights, begin)
        if position > begin:
            served = self._shuffled(begin).stream[: position - begin]
            counts += np.bincount(served, minlength=counts.size)
        return counts

    def _block(self, number: int) -> MixedPositions:
        """Pieces of shuffled blocks, which begin anew with every period."""
        position, end = number * SHUFFLED, (number + 1) * SHUFFLED
        pieces: list[MixedPositions] = []
        while position < end:
            begin, stop = self._bounds(position)
            shuffled = self._shuffled(begin)
            part = slice(position - begin, min(stop, end) - begin)
            pieces.append(MixedPositions(shuffled.stream[part], shuffled.ordinal[part]))
            position = min(stop, end)
        if len(pieces) == 1:
            return pieces[0]
        streams, ordinals = zip(*pieces, strict=True)
        return MixedPositions(np.concatenate(streams), np.concatenate(ordinals))

    @property
    def _block_size(self) -> int:
        return SHUFFLED  # many periods may lie in a block, each shuffled by itself

    def _bounds(self, position: int) -> tuple[int, int]:
        """Return the shuffled block that holds a position."""
        period = position // self.period * self.period
        begin = period + (position - period) // SHUFFLED * SHUFFLED
        return begin, min(begin + SHUFFLED, period + self.period)

    @cached_property
    def _shuffled(self) -> Callable[[int], MixedPositions]:
        return lru_cache(_BLOCKS_KEPT)(self._shuffle)

    def _shuffle(self, begin: int) -> MixedPositions:
        """The shuffled block that begins there: which stream is shuffled, not their samples."""
        _, end = self._bounds(begin)
        spread = self._spread(begin, end)
        key = key_of(f"megaindex/{self.seed}/{begin}/mixing/{self.name}")
        order = np.empty(end - begin, np.int64)
        active().bijection_range(key, end - begin, 0, order)
        stream = spread.stream[order]
        # the samples of each stream keep their order: sorted by stream, both lists run alike
        ordinal = np.empty(end - begin, np.int64)
        by_stream = np.argsort(spread.stream, kind="stable")
        ordinal[np.argsort(stream, kind="stable")] = spread.ordinal[by_stream]
        return MixedPositions(stream, ordinal)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_shuffled"}
