"""A framework's blend: its weights, the samples requested of each source, its size and its draws.

The rounding of the weights decides how many samples are requested of a source and which source a
greedy blend draws in a tie. GPT-NeoX sums with Python's `sum`, which is compensated from Python
3.12 on, so the last bit depends on the Python version (`FrameworkRules.python_sum`);
Megatron-DeepSpeed and PaddleNLP use a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megaindex._types import F64, IntArray
from megaindex.errors import InvalidArgument
from megaindex.index.draws import (
    BlendDraws,
    Draws,
    ExhaustiveDraws,
    GreedyDraws,
    Progress,
    Rule,
    SingleDraws,
)
from megaindex.index.frameworks import FrameworkRules, sum_as
from megaindex.index.mixing import Stratified

_MOST_SAMPLES = 1 << 62

_DIVISOR_WEIGHT_BITS = 52


def request_weights(weights: Sequence[float], row: FrameworkRules) -> list[float]:
    """Return the weights that decide the samples requested of each source.

    Raises:
        InvalidArgument: no positive sum, or a weight that is negative or not finite.
    """
    once = normalized(weights)
    if row.weight_sum not in ("python", "loop"):
        shares: list[float] = once.tolist()
        return shares
    total = sum_as("plain" if row.weight_sum == "loop" else row.python_sum, weights)
    return [weight / total for weight in weights]


def normalized(weights: Sequence[float]) -> F64:
    """Return weights divided by NumPy's sum of them, as a greedy blend compares them.

    Raises:
        InvalidArgument: no positive sum, or a weight that is negative or not finite.
    """
    values = np.array(weights, np.float64)
    total = np.sum(values)
    if not np.isfinite(values).all() or (values < 0).any() or not total > 0:
        raise InvalidArgument(
            f"weights must be finite, not negative, and not all 0, got {values.tolist()}"
        )
    divided: F64 = values / total
    return divided


def divisor_weights(weights: Sequence[float | int | Fraction]) -> list[int]:
    """Return integers in proportion to ``weights`` for the divisor rule.

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
    if largest * denominator < 2**_DIVISOR_WEIGHT_BITS:
        return [int(value * denominator) for value in exact]
    unit = Fraction(2**_DIVISOR_WEIGHT_BITS - 1) / largest
    return [max(1, round(value * unit)) for value in exact]


def _as_written(weight: float | int | Fraction) -> Fraction:
    return Fraction(repr(float(weight))) if isinstance(weight, float) else Fraction(weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blend:
    """Weights of a blend, and the rules by which a framework requests and draws its samples."""

    row: FrameworkRules
    weights: Sequence[float]
    explicit: bool = True
    """False for weights that are normalised once only: sizes of sources, and weights that the
    framework normalised already."""
    buffer: float | Literal["exact"] = 1.0
    """Variance buffer; ``"exact"``: request the samples that are drawn."""
    counting: str = "auto"
    """Counting of `GreedyDraws`."""
    progress: Progress | None = None

    @classmethod
    def of_sources(
        cls,
        weights: Sequence[float] | None,
        sizes: Callable[[], Sequence[int]],
        count: int,
        row: FrameworkRules,
        **settings: Any,
    ) -> Blend:
        """Return the blend of ``count`` sources with weights or, by default, those of the row.

        Args:
            sizes: function that returns the samples of one epoch of each source.
        """
        explicit = weights is not None or row.request != "megatron"
        if weights is None:
            weights = sizes() if row.blends_by_size else [1.0] * count
        return cls(row=row, weights=weights, explicit=explicit, **settings)

    @property
    def exact(self) -> bool:
        """True if requests are exactly the samples that the blend draws."""
        return self.buffer == "exact" or not self.row.is_framework

    @cached_property
    def shares(self) -> list[float]:
        """The weights that decide the samples requested of each source."""
        if len(self.weights) == 1:
            return [1.0]
        return request_weights(self.weights, self.row) if self.explicit else list(self.weights)

    @cached_property
    def draws(self) -> BlendDraws:
        """The draws; the frameworks normalise weights for them once more."""
        if not self.row.is_framework:
            return Stratified(shares=tuple(divisor_weights(self.weights)))
        if self.row.train_epochs == "reshuffled":
            sizes = np.array(self.weights, np.int64)
            return ExhaustiveDraws(sizes, self.counting, self.progress)
        return GreedyDraws(normalized(self.shares), self.counting, self.progress)

    @cached_property
    def counted(self) -> Draws:
        """The draws where their arrays are not needed."""
        return SingleDraws() if len(self.weights) == 1 else self.draws

    def requests(self, samples: int) -> list[int] | None:
        """Return the samples requested of each source for ``samples`` of the blend.

        None: the draws of the blend were not counted.
        """
        if not self.exact:
            return self._requests(samples, self.buffer)
        counts = self.counted.counts(samples)
        if counts is None:
            return None
        least = int(self.row.order == "neox")  # a dataset of none has length -1
        return [max(least, count) for count in counts.tolist()]

    def _requests(self, samples: int, buffer: Any) -> list[int]:
        count = len(self.shares)
        return [self.row.samples_requested(samples, w, buffer, count) for w in self.shares]

    def size(self, samples: int) -> int:
        """Return the positions that are filled for ``samples``, whatever is built of the sources.

        See `FrameworkRules.blend_size`.
        """
        requested = self.row.blend_size == "requested" and not self.exact
        return sum(self._requests(samples, 1.0)) if requested else samples

    def longest(self, limits: Sequence[int]) -> tuple[int, bool]:
        """Return the most samples for which no source is requested beyond its limit.

        The second value is False if the first is a lower bound.
        """
        if self.exact:
            return self.counted.longest(limits)
        shares = zip(self.shares, limits, strict=True)
        return min(self._longest(share, limit) for share, limit in shares if share), True

    def _longest(self, share: float, limit: int) -> int:
        """Return the largest n with a request within ``limit``; requests rise with n."""

        def request(samples: int) -> int:
            return self.row.samples_requested(samples, share, buffer, len(self.shares))

        assert not isinstance(self.buffer, str)
        buffer = self.buffer
        if request(0) > limit:
            return 0
        most = limit / (share * buffer) if share * buffer else math.inf
        low, step = 0, max(1, int(min(most, _MOST_SAMPLES)))
        while low < _MOST_SAMPLES and request(low + step) <= limit:
            low += step
        while step > 1:  # low is within the limit, low + step is not
            half = step // 2
            if request(low + half) <= limit:
                low, step = low + half, step - half
            else:
                step = half
        return low


def draws_by(rule: Rule, values: Sequence[int | str]) -> BlendDraws:
    """Return the draws of a rule by the values of `exact_values`."""
    numbers = [float.fromhex(value) if isinstance(value, str) else value for value in values]
    if rule == "divisor":
        return Stratified(shares=tuple(map(int, numbers)))
    if rule == "exhaustive":
        return ExhaustiveDraws(np.array(numbers, np.int64))
    return GreedyDraws(np.array(numbers, np.float64))


def exact_values(values: IntArray | F64) -> list[int | str]:
    """Return weights or sizes as exact JSON values for a cache key."""
    return [v.hex() if isinstance(v, float) else v for v in values.tolist()]
