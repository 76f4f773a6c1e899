"""Weights of a blend, normalised as each framework does, in its own double expressions.

Rounding matters: the normalised weights decide how many samples a source is asked for, and which
source a greedy blend draws where two are equally far behind. NeoX sums with Python's `sum`, which
is compensated from Python 3.12 on, so its last bit depends on the Python that trains;
Megatron-DeepSpeed and PaddleNLP add in a plain loop.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megaindex.index.dialect import Dialect
from megaindex.kernels.types import F64, U64

_DIVISOR_WEIGHT_BITS = 52


def request_weights(weights: Sequence[float], row: Dialect) -> list[float]:
    """The weights from which the samples asked of each source are computed."""
    if row.weight_sum == "python":
        total = sum(weights)
        return [weight / total for weight in weights]
    if row.weight_sum == "loop":
        total = functools.reduce(operator.add, weights, 0.0)
        return [weight / total for weight in weights]
    once: list[float] = _normalized(np.array(weights, np.float64)).tolist()
    return once


def blend_weights(weights: Sequence[float], row: Dialect, *, explicit: bool = True) -> F64:
    """The weights that the greedy blend compares, float64 of shape (len(weights),).

    Explicit weights come here normalised once already (`request_weights`) and are normalised a
    second time; the sizes of unweighted sources are normalised once.
    """
    once = request_weights(weights, row) if explicit else list(weights)
    return _normalized(np.array(once, np.float64))


def divisor_weights(weights: Sequence[float | int | Fraction]) -> U64:
    """Integers in the proportions of ``weights``, for the divisor rule, shape (len(weights),).

    Exact where a common denominator keeps each below 2**52 (0.5, 0.25, 0.25 give 2, 1, 1), else
    rounded to 2**-52 of the largest. A decimal such as 0.1 counts as written, not as its double.
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
