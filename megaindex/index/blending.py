"""Normalised weights of a blend and the counts of its draws.

The rounding of the weights decides how many samples are requested of a source and which source a
greedy blend draws in a tie. GPT-NeoX sums with Python's `sum`, which is compensated from Python
3.12 on, so the last bit depends on the Python version (`FrameworkRules.python_sum`);
Megatron-DeepSpeed and PaddleNLP use a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal, Protocol

import numpy as np

from megaindex._types import F64, I64, U64, IntArray
from megaindex.arithmetic import ceil_div
from megaindex.index.frameworks import FrameworkRules, sum_as
from megaindex.kernels import active

_DIVISOR_WEIGHT_BITS = 52


def request_weights(weights: Sequence[float], row: FrameworkRules) -> list[float]:
    """Return the weights that decide the samples requested of each source."""
    if row.weight_sum not in ("python", "loop"):
        once: list[float] = _normalized(np.array(weights, np.float64)).tolist()
        return once
    total = sum_as("plain" if row.weight_sum == "loop" else row.python_sum, weights)
    return [weight / total for weight in weights]


def blend_weights(weights: Sequence[float], row: FrameworkRules, *, explicit: bool = True) -> F64:
    """Return the weights of the greedy blend, float64[sources].

    Explicit weights are normalised twice, as the frameworks do; sizes of sources once.
    """
    once = request_weights(weights, row) if explicit else list(weights)
    return _normalized(np.array(once, np.float64))


def divisor_weights(weights: Sequence[float | int | Fraction]) -> U64:
    """Return integers in proportion to ``weights`` for the divisor rule, uint64[sources].

    Exact if a common denominator keeps each below 2**52 (0.5, 0.25, 0.25 give 2, 1, 1), otherwise
    rounded to 2**-52 of the largest. The float 0.1 is taken as 1/10.
    """
    exact = [_as_written(weight) for weight in weights]
    largest = max(exact)
    denominator = 1
    for value in exact:
        denominator = math.lcm(denominator, value.denominator)
        if largest * denominator >= 2**_DIVISOR_WEIGHT_BITS:
            break
    scaled = [value * denominator for value in exact]
    if largest * denominator >= 2**_DIVISOR_WEIGHT_BITS:
        unit = Fraction(2**_DIVISOR_WEIGHT_BITS - 1) / largest
        scaled = [Fraction(max(1, round(value * unit))) for value in exact]
    return np.array([int(value) for value in scaled], np.uint64)


def _normalized(weights: F64) -> F64:
    return weights / np.sum(weights)


def _as_written(weight: float | int | Fraction) -> Fraction:
    return Fraction(repr(float(weight))) if isinstance(weight, float) else Fraction(weight)


Progress = Callable[[int, int], None]
"""Function called with the samples counted so far and the total."""

FREE_WORK = 5 * 10**9
"""Work of the counting mode auto, in nanoseconds of the native kernel."""
_CHUNK_WORK = 2 * 10**8

Rule = Literal["greedy", "exhaustive", "divisor"]
"""greedy, exhaustive: `build_blending_indices` and `build_exhaustive_blending_indices` of Megatron;
divisor: Webster's method."""


def fill_blend(
    rule: Rule,
    values: IntArray | F64,
    dataset_index: IntArray,
    dataset_sample_index: I64,
    *,
    begin: int = 0,
    counts: I64 | None = None,
) -> I64:
    """Fill the source and the sample of that source for each position of a blend.

    Args:
        values: weights of the sources; for the exhaustive rule their sample counts.
        begin: the first position.
        counts: int64[sources], draws of each source before ``begin``; updated in place.

    Returns:
        int64[sources]: draws of each source up to the last position.
    """
    if counts is None:
        counts = np.zeros(values.size, np.int64)
    end = begin + dataset_index.size
    _kernel(rule)(values, begin, end, counts, dataset_index, dataset_sample_index)
    return counts


def _kernel(rule: Rule) -> Callable[..., None]:
    kernels: dict[Rule, Callable[..., None]] = {
        "greedy": active().blend_greedy,
        "exhaustive": active().blend_exhaustive,
        "divisor": active().divisor_fill,
    }
    return kernels[rule]


def exact_values(values: IntArray | F64) -> list[int | str]:
    """Return weights or sizes as exact JSON values for a cache key."""
    return [v.hex() if isinstance(v, float) else v for v in values.tolist()]


class Draws(Protocol):
    """Counts of the draws of a blend."""

    def counts(self, samples: int) -> list[int] | None:
        """Return the draws of each source in the first ``samples``; None if too expensive."""

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        """Return bounds of the draws of each source in the first ``samples``, computed quickly."""

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        """Return the most samples with no source above its limit, and True if that is exact.

        If it is not exact, it is a lower bound.
        """


@dataclass(frozen=True)
class SingleDraws:
    """Draws of a single source."""

    def counts(self, samples: int) -> list[int]:
        return [samples]

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        return [(samples, samples)]

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        return limits[0], True


@dataclass(frozen=True)
class DivisorDraws:
    """Draws by Webster's method, counted by a formula."""

    weights: U64
    rule: ClassVar[Rule] = "divisor"

    def counts(self, samples: int) -> list[int]:
        return [int(count) for count in active().divisor_counts(self.weights, samples)]

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        return [(count, count) for count in self.counts(samples)]

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        # Draw k of a source, from 0, has time (2k + 1) / weight; ties go to the lowest index. The
        # first draw above a limit is the least (2 limit + 1) / weight. Times are compared by
        # cross-multiplication.
        weights = [int(weight) for weight in self.weights]
        first = 0
        for i in range(1, len(weights)):
            if (2 * limits[i] + 1) * weights[first] < (2 * limits[first] + 1) * weights[i]:
                first = i
        odd, weight = 2 * limits[first] + 1, weights[first]
        before = 0
        for i, other in enumerate(weights):
            ties_count = i < first
            last_odd = (odd * other - (0 if ties_count else 1)) // weight
            before += (last_odd + 1) // 2
        return before, True


@dataclass
class GreedyDraws:
    """Draws of the frameworks' greedy blend, counted by iteration from the last position."""

    weights: F64 | I64
    counting: str = "auto"
    """auto: count up to `FREE_WORK`; exact: count always; bounds: never count."""
    progress: Progress | None = None
    rule: ClassVar[Rule] = "greedy"
    _position: int = 0
    _counts: I64 = field(init=False)
    _known: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = np.zeros(len(self.weights), np.int64)

    def counts(self, samples: int) -> list[int] | None:
        if samples in self._known:
            return self._known[samples]
        if not self._may_count(samples):
            return None
        if samples < self._position:
            self._position = 0
            self._counts[:] = 0
        for end in self._steps(samples):
            self._advance(end, samples)
        self._known[samples] = [int(count) for count in self._counts]
        return self._known[samples]

    def bounds(self, samples: int) -> list[tuple[int, int]]:
        most = self._most(samples)
        surplus = sum(most) - samples
        return [(max(0, count - surplus), min(count, samples)) for count in most]

    def _most(self, samples: int) -> list[int]:
        # the greedy rule never draws a source more than ceil(weight * samples) times, and one of
        # weight 0 at most once, where the others are not behind
        return [max(1, int(value)) for value in np.ceil(self.weights * samples)]

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        if not self._may_count(sum(limits)):
            return self._certain(limits), False
        self._position = 0
        self._counts[:] = 0
        limit, last = np.array(limits, np.int64), sum(limits) + 1
        for end in self._steps(last):
            before, start = self._counts.copy(), self._position
            self._advance(end, last)
            if (self._counts > limit).any():
                return self._bisect(limit, before, start, end), True
        raise AssertionError("more samples than the sum of all limits must exceed one limit")

    def _certain(self, limits: Sequence[int]) -> int:
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
            _kernel(self.rule)(self.weights, self._position, end, self._counts, None, None)
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
