"""What a blend draws from its sources; drawn while the arrays of the sources are built.

The draws follow from weights and size, which are known before any source is read, and those of 500
sources take about as long as their arrays.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from megaindex.adapters.megatron.core import SIZES, core
from megaindex.errors import FormatError
from megaindex.helpers import build_blending_indices, build_exhaustive_blending_indices
from megaindex.kernels.types import I16, I64, IntArray
from megaindex.store.array_set import Arrays

Drawn = tuple[Arrays, list[int]]
"""The arrays of a blend, and how many draws there are of each source."""
DRAWN = ("dataset_index", "dataset_sample_index")
_COMPARED = 1_000_000  # draws of found arrays that are compared with our own


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What is drawn from how many sources."""

    weights: list[Any]
    """Normalised weights, or, without a size, the samples of each source."""
    size: int | None

    @property
    def num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else int(self.size)

    def first(self, count: int) -> tuple[I16, I64]:
        """The first ``count`` draws, int16 and int64."""
        dataset_index: I16 = np.zeros(count, np.int16)
        dataset_sample_index: I64 = np.zeros(count, np.int64)
        build_blending_indices(
            dataset_index, dataset_sample_index, self.weights, len(self.weights), count
        )
        return dataset_index, dataset_sample_index

    def arrays_and_counts(self) -> Drawn:
        """All draws, and how many there are of each source."""
        if self.size is not None:
            drawn = self.first(self.num_samples)
        else:
            drawn = np.zeros(self.num_samples, np.int16), np.zeros(self.num_samples, np.int64)
            sizes = [int(size) for size in self.weights]
            build_exhaustive_blending_indices(*drawn, sizes, len(sizes))
        arrays: Arrays = dict(zip(DRAWN, drawn, strict=True))
        return arrays, self.counts(drawn[0])

    def counts(self, dataset_index: IntArray) -> list[int]:
        counted: list[int] = np.bincount(dataset_index, minlength=len(self.weights)).tolist()
        return counted

    def check(self, arrays: Arrays) -> None:
        """Whether arrays that Megatron wrote are this draw.

        Raises:
            FormatError: they are not.
        """
        which, sample = (arrays[name] for name in DRAWN)
        shape = (self.num_samples,)
        if which.dtype != np.int16 or sample.dtype != np.int64 or not which.shape == sample.shape:
            raise FormatError(f"must be int16 and int64, are {which.dtype} and {sample.dtype}")
        if which.shape != shape:
            raise FormatError(f"must have shape {shape}, have {which.shape}")
        if shape[0] and not 0 <= which.min() <= which.max() < len(self.weights):
            raise FormatError(f"must draw from {len(self.weights)} sources")
        if self.size is None:
            matches = self.counts(which) == [int(size) for size in self.weights]
        else:
            count = min(self.num_samples, _COMPARED)
            ours = self.first(count)
            matches = np.array_equal(ours[0], which[:count]) and np.array_equal(
                ours[1], sample[:count]
            )
        if not matches:
            raise FormatError("are not the draws of these weights and this size")


def expected_draws(config: Any, sizes: Sequence[Any], split: Sequence[Any]) -> list[Draw | None]:
    """What the blend of each split will ask for, as Megatron's builder works it out; None where
    there is no blend, or its weights are the sizes of its sources."""
    return [
        None if share is None or size is None else _expected(config, number, size)
        for number, (size, share) in enumerate(zip(sizes, split, strict=True))
    ]


def _expected(config: Any, number: int, size: int) -> Draw | None:
    blend = config.blend or config.blend_per_split[number]
    if blend is None or blend[1] is None:
        return None
    weights = _normalized(blend[1])
    exact = core().policy.variance_buffer == "exact"
    total = size if exact else sum(math.ceil(size * weight) for weight in weights)
    return Draw(weights=_normalized(weights), size=total)  # once by the builder, once by the blend


def sizes_per_dataset(
    normalized_weights: Sequence[float], target_size_per_split: Sequence[int], **surplus: float
) -> list[list[int]]:
    """``_get_size_per_split_per_dataset`` under a variance buffer: for each dataset what each split
    asks of it, with a surplus where Megatron asks for its own.

    Exactly, a blend is as long as was asked, and its length is the sum of what is drawn.
    """
    policy = core().policy
    asks_for_surplus = surplus or policy.variance_buffer == "exact"
    if not asks_for_surplus or None in target_size_per_split:  # which Megatron refuses
        original = core().originals["", SIZES]
        return cast("list[list[int]]", original(normalized_weights, target_size_per_split))
    twice = np.array(_normalized(normalized_weights))
    columns = [
        policy.requests(size, list(normalized_weights), twice) for size in target_size_per_split
    ]
    return [list(sizes) for sizes in zip(*columns, strict=True)]


def _normalized(weights: Sequence[float]) -> list[float]:
    values = np.array(weights, np.float64)
    normalized: list[float] = (values / values.sum()).tolist()
    return normalized


class Ahead:
    """Draws in a thread of its own, from `start` on."""

    def __init__(self, draws: Sequence[Draw | None]) -> None:
        self._draws = draws
        self._begun: list[tuple[Draw, Future[Drawn]]] = []

    def start(self) -> None:
        """Begin to draw, unless that was done."""
        if self._begun:
            return
        draws = [draw for draw in self._draws if draw is not None]
        pool = ThreadPoolExecutor(1, "megaindex-draw")
        self._begun = [(draw, pool.submit(draw.arrays_and_counts)) for draw in draws]
        pool.shutdown(wait=False)

    def leave_for(self, columns: Sequence[Sequence[Any]]) -> None:
        """Let the blends of these datasets, a column for each split, have the draws."""
        for column in columns:
            if self._begun and column and column[0] is not None:
                _left[column[0]] = self._begun


_left: weakref.WeakKeyDictionary[Any, list[tuple[Draw, Future[Drawn]]]] = (
    weakref.WeakKeyDictionary()
)
"""What was begun for the blend that has this dataset first."""


def maker_of(draw: Draw, datasets: Sequence[Any]) -> Callable[[], Drawn]:
    """What makes the draws from ``datasets``, or waits for those that were begun ahead."""
    for begun, made in _left.pop(datasets[0], []):
        if begun == draw:
            return made.result
    return draw.arrays_and_counts
