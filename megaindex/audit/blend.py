"""Several indices blended into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.index.draws import DivisorDraws, GreedyDraws
from megaindex.index.spans import Index, Spans, check_sample_ids
from megaindex.kernels import active
from megaindex.kernels.types import I16, I64
from megaindex.plan.sizing import Sizing

_MOST_SOURCES = 2**15 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendedIndex:
    """Sample ``i`` is sample ``dataset_sample_index[i]`` of ``indices[dataset_index[i]]``."""

    indices: tuple[Index, ...]
    dataset_index: I16
    """int16[num_samples]."""
    dataset_sample_index: I64
    """int64[num_samples]."""

    @property
    def num_samples(self) -> int:
        return int(self.dataset_index.size)

    @property
    def num_epochs(self) -> int:
        return max(index.num_epochs for index in self.indices)

    @property
    def tokens_per_epoch(self) -> int:
        return sum(index.tokens_per_epoch for index in self.indices)

    @property
    def sequence_length(self) -> int:
        return self.indices[0].sequence_length

    @property
    def add_extra_token(self) -> int:
        return self.indices[0].add_extra_token

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        which = self.dataset_index[ids]
        # positions of the samples asked for, source by source
        grouped = np.argsort(which, kind="stable")
        present, first = np.unique(which[grouped], return_index=True)
        parts: list[tuple[int, I64, Spans]] = []
        counts = np.zeros(ids.size, np.int64)
        for source, at in zip(present.tolist(), np.split(grouped, first[1:]), strict=True):
            spans = self.indices[source].locate(self.dataset_sample_index[ids[at]])
            counts[at] = np.diff(spans.row_splits)
            parts.append((source, at, spans))
        return _interleaved(parts, counts)


def _interleaved(parts: Sequence[tuple[int, I64, Spans]], counts: I64) -> Spans:
    """The runs of all sources in the order of the samples; ``counts`` runs for each sample."""
    splits = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=splits[1:])
    source = np.empty(splits[-1], np.int32)
    document, offset, length = (np.empty(splits[-1], np.int64) for _ in range(3))
    for number, at, spans in parts:
        place = np.repeat(splits[at] - spans.row_splits[:-1], counts[at]) + np.arange(len(spans))
        source[place] = number
        document[place] = spans.document
        offset[place] = spans.offset
        length[place] = spans.length
    return Spans(source=source, document=document, offset=offset, length=length, row_splits=splits)


def blended(indices: Sequence[Index], sizing: Sizing, num_samples: int) -> Index:
    """The first ``num_samples`` of the blend that ``sizing`` describes; one source is itself.

    Raises:
        InvalidArgument: a source is drawn more often than it was built, where the framework fails
            or repeats, or there are too many sources.
    """
    if len(indices) == 1:
        return indices[0]
    if len(indices) > _MOST_SOURCES:
        raise InvalidArgument(f"a blend has at most {_MOST_SOURCES} sources, got {len(indices)}")
    dataset_index = np.empty(num_samples, np.int16)
    dataset_sample_index = np.empty(num_samples, np.int64)
    counts = np.zeros(len(indices), np.int64)
    draws = sizing.draws
    if isinstance(draws, GreedyDraws):
        active().blend_greedy(
            draws.weights, 0, num_samples, counts, dataset_index, dataset_sample_index
        )
    else:
        assert isinstance(draws, DivisorDraws), "several sources are blended by one of the two"
        active().divisor_fill(
            draws.weights, 0, num_samples, counts, dataset_index, dataset_sample_index
        )
    for name, index, drawn in zip(sizing.names, indices, counts.tolist(), strict=True):
        if drawn > index.num_samples:
            raise InvalidArgument(
                f"{name}: {num_samples} samples of the blend draw {drawn} of it, and "
                f"{index.num_samples} were built: the run fails or repeats there; raise "
                "--variance-buffer"
            )
    return BlendedIndex(
        indices=tuple(indices),
        dataset_index=dataset_index,
        dataset_sample_index=dataset_sample_index,
    )
