"""Draws of a blend: the source of each position, and how often each source was drawn before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from megaindex._types import F64, I64, IntArray
from megaindex.arithmetic import ceil_div
from megaindex.errors import FormatError
from megaindex.index.counts import drawn_counts
from megaindex.kernels import active

Progress = Callable[[int, int], None]
"""Function called with the samples counted so far and the total."""

FREE_WORK = 5 * 10**9
"""Work of the counting mode auto, in nanoseconds of the native kernel."""
_CHUNK_WORK = 2 * 10**8
_COMPARED = 1_000_000  # draws that are compared at once; of arrays of others, all that are

Rule = Literal["greedy", "exhaustive", "divisor"]
"""greedy, exhaustive: `build_blending_indices` and `build_exhaustive_blending_indices` of Megatron;
divisor: Webster's method."""


class Draws(ABC):
    """Draws of the sources of a blend, or of the streams of a mixture."""

    @abstractmethod
    def counts(self, samples: int) -> I64 | None:
        """Return int64[sources]: draws of each source in the first ``samples``; None if too
        expensive."""

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        """Return bounds of the draws of each source in the first ``samples``, computed quickly."""
        counts = self.counts(samples)
        assert counts is not None, "counted by a formula"
        return [(count, count) for count in counts.tolist()]

    @abstractmethod
    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        """Return the most samples with no source above its limit, and True if that is exact.

        If it is not exact, it is a lower bound.
        """


class BlendArrays(NamedTuple):
    """Arrays of a blend."""

    dataset_index: IntArray
    """int16[n] (uint8 in GPT-NeoX): number of the source."""
    dataset_sample_index: I64
    """int64[n]: number of earlier draws of that source."""
    counts: I64
    """int64[sources]: draws of each source."""


class BlendDraws(Draws):
    """Draws by a rule and values, which fill the arrays of a blend."""

    rule: ClassVar[Rule]

    @property
    @abstractmethod
    def values(self) -> IntArray | F64:
        """Weights of the sources; for the exhaustive rule their sample counts."""

    def fill(
        self,
        dataset_index: IntArray,
        dataset_sample_index: I64,
        begin: int = 0,
        counts: I64 | None = None,
    ) -> I64:
        """Fill the source, and the sample of that source, of each position from ``begin`` on.

        Args:
            counts: int64[sources], draws of each source before ``begin``; updated in place.

        Returns:
            int64[sources]: draws of each source up to the last position.
        """
        if counts is None:
            counts = np.zeros(self.values.size, np.int64)
        end = begin + dataset_index.size
        self._kernel(self.values, begin, end, counts, dataset_index, dataset_sample_index)
        return counts

    def arrays(self, size: int) -> BlendArrays:
        """Return the arrays of the first ``size`` positions."""
        index, samples = np.empty(size, np.int16), np.empty(size, np.int64)
        return BlendArrays(index, samples, self.fill(index, samples))

    def check(self, dataset_index: IntArray, dataset_sample_index: IntArray, size: int) -> I64:
        """Return the counts of arrays that another program wrote; compare their first draws.

        Raises:
            FormatError: they are not the arrays of ``size`` positions.
        """
        found = f"{dataset_index.dtype} and {dataset_sample_index.dtype}"
        if found != "int16 and int64" or dataset_index.shape != dataset_sample_index.shape:
            raise FormatError(f"must be int16 and int64, are {found}")
        if dataset_index.shape != (size,):
            raise FormatError(f"must have shape {(size,)}, have {dataset_index.shape}")
        sources = self.values.size
        if size and not 0 <= dataset_index.min() <= dataset_index.max() < sources:
            raise FormatError(f"must draw from {sources} sources")
        # all draws would take as long as building the arrays; counts and a beginning find other
        # weights
        counts, ours = drawn_counts(dataset_index, sources), self.arrays(min(size, _COMPARED))
        if (
            (self.rule == "exhaustive" and not np.array_equal(counts, self.values))
            or not np.array_equal(ours.dataset_index, dataset_index[:_COMPARED])
            or not np.array_equal(ours.dataset_sample_index, dataset_sample_index[:_COMPARED])
        ):
            raise FormatError("are not the draws of these weights and this size")
        return counts

    def end(self, arrays: BlendArrays, sizes: I64) -> int:
        """Return the positions before the first draw of a sample that its source does not have."""
        end = arrays.dataset_index.size
        if (arrays.counts <= sizes).all():
            return end
        # rounding can let a source be drawn once more than its share
        for begin in range(self.certain((sizes - 1).tolist()), end, _COMPARED):
            part = slice(begin, begin + _COMPARED)
            beyond = arrays.dataset_sample_index[part] >= sizes[arrays.dataset_index[part]]
            if beyond.any():
                return begin + int(beyond.argmax())
        raise AssertionError("a source is drawn more often than it has samples")

    def certain(self, limits: Sequence[int]) -> int:
        """Return samples that draw no source above its limit, computed quickly."""
        return self.longest(limits)[0]

    @property
    def _kernel(self) -> Callable[..., None]:
        kernels: dict[Rule, Callable[..., None]] = {
            "greedy": active().blend_greedy,
            "exhaustive": active().blend_exhaustive,
            "divisor": active().divisor_fill,
        }
        return kernels[self.rule]


@dataclass(frozen=True)
class SingleDraws(Draws):
    """Draws of a single source."""

    def counts(self, samples: int) -> I64:
        return np.array([samples], np.int64)

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        return limits[0], True


@dataclass
class GreedyDraws(BlendDraws):
    """Draws of the frameworks' greedy blend, counted by iteration from the last position."""

    weights: F64 | I64
    counting: str = "auto"
    """auto: count up to `FREE_WORK`; exact: count always; bounds: never count."""
    progress: Progress | None = None
    rule: ClassVar[Rule] = "greedy"
    _position: int = 0
    _counts: I64 = field(init=False)
    _known: dict[int, I64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = np.zeros(len(self.weights), np.int64)

    @property
    def values(self) -> IntArray | F64:
        return self.weights

    def counts(self, samples: int) -> I64 | None:
        if samples in self._known:
            return self._known[samples]
        if not self._may_count(samples):
            return None
        # the greedy rule has no inverse: an earlier position is counted from the start
        if samples < self._position:
            self._position = 0
            self._counts[:] = 0
        for end in self._steps(samples):
            self._advance(end, samples)
        # plans ask again for the same few positions
        self._known[samples] = self._counts.copy()
        return self._known[samples]

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        most = self._most(samples)
        # each count is at most its bound, so what one lacks of it all others cannot exceed
        surplus = sum(most) - samples
        return [(max(0, count - surplus), min(count, samples)) for count in most]

    def _most(self, samples: int) -> list[int]:
        # the greedy rule never draws a source more than ceil(weight * samples) times, and one of
        # weight 0 at most once, where the others are not behind
        return [max(1, int(value)) for value in np.ceil(self.weights * samples)]

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        if not self._may_count(sum(limits)):
            return self.certain(limits), False
        self._position = 0
        self._counts[:] = 0
        limit, last = np.array(limits, np.int64), sum(limits) + 1
        for end in self._steps(last):
            # kept, so that the step that goes too far is repeated in parts, not from the start
            before, start = self._counts.copy(), self._position
            self._advance(end, last)
            if (self._counts > limit).any():
                return self._bisect(limit, before, start, end), True
        raise AssertionError("more samples than the sum of all limits must exceed one limit")

    def certain(self, limits: Sequence[int]) -> int:
        """Return the samples for which ceil(weight * samples) stays within every limit."""
        low, high = 0, sum(limits)
        while low < high:
            middle = (low + high + 1) // 2
            if all(m <= limit for m, limit in zip(self._most(middle), limits, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def _bisect(self, limit: I64, counts: I64, start: int, end: int) -> int:
        """Return the last position in [start, end) with no count above its limit."""
        while end - start > 1:
            middle = (start + end) // 2
            self._position, self._counts = start, counts.copy()
            self._advance(middle, middle)
            if (self._counts > limit).any():
                end = middle
            else:
                start, counts = middle, self._counts
        self._position, self._counts = start, counts
        return start

    @property
    def _work_per_sample(self) -> int:
        return min(8 + len(self.weights), 80)

    def _may_count(self, samples: int) -> bool:
        affordable = samples * self._work_per_sample <= FREE_WORK
        return self.counting == "exact" or (self.counting == "auto" and affordable)

    def _steps(self, samples: int) -> list[int]:
        chunk = max(1, _CHUNK_WORK // self._work_per_sample)
        return [*range(self._position + chunk, samples, chunk), samples]

    def _advance(self, end: int, goal: int) -> None:
        if end > self._position:
            self._kernel(self.weights, self._position, end, self._counts, None, None)
            self._position = end
            if self.progress is not None:
                self.progress(end, goal)


@dataclass
class ExhaustiveDraws(GreedyDraws):
    """Draws of a blend of each sample of its sources once; the weights are their samples."""

    rule: ClassVar[Rule] = "exhaustive"

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        return sum(limits), True

    def _most(self, samples: int) -> list[int]:
        total = max(1, int(self.weights.sum()))
        return [ceil_div(int(size) * samples, total) for size in self.weights]
