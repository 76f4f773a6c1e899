"""Blends as a run's planner sizes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.index.blended import MOST_SOURCES, BlendedIndex
from megaindex.index.draws import DivisorDraws, GreedyDraws, fill_blend
from megaindex.index.spans import Index
from megaindex.plan.sizing import Sizing


def blended(indices: Sequence[Index], sizing: Sizing, num_samples: int) -> Index:
    """The first ``num_samples`` of the blend that ``sizing`` describes; one source is itself.

    Raises:
        InvalidArgument: a source is drawn more often than it was built, where the framework fails,
            or there are too many sources.
    """
    if len(indices) == 1:
        return indices[0]
    if len(indices) > MOST_SOURCES:
        raise InvalidArgument(f"a blend has at most {MOST_SOURCES} sources, got {len(indices)}")
    dataset_index = np.empty(num_samples, np.int16)
    dataset_sample_index = np.empty(num_samples, np.int64)
    draws = sizing.draws
    assert isinstance(draws, (GreedyDraws, DivisorDraws)), "several sources are blended by these"
    counts = fill_blend(draws.rule, draws.weights, dataset_index, dataset_sample_index)
    short = sizing.row.uncounted_samples
    for number, (index, drawn) in enumerate(zip(indices, counts.tolist(), strict=True)):
        if drawn <= index.num_samples:
            continue
        if not short:
            name = sizing.names[number]
            raise InvalidArgument(
                f"{name}: {num_samples} samples of the blend draw {drawn} of it, and "
                f"{index.num_samples} were built: the run fails or repeats there; raise "
                "--variance-buffer"
            )
        beyond = (dataset_index == number) & (dataset_sample_index >= index.num_samples)
        dataset_sample_index[beyond] %= max(1, index.num_samples - short)
    return BlendedIndex(
        indices=tuple(indices),
        dataset_index=dataset_index,
        dataset_sample_index=dataset_sample_index,
    )
