"""Several indices blended into one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.index.arrays import ArrayIndex
from megaindex.index.spans import Index, Spans, check_sample_ids, joined
from megaindex.kernels import active
from megaindex.kernels.types import I64, IntArray

MOST_SOURCES = 2**15 - 1
"""Sources that an int16 dataset_index tells apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendedIndex:
    """Sample ``i`` is sample ``dataset_sample_index[i]`` of ``indices[dataset_index[i]]``."""

    indices: tuple[Index, ...]
    dataset_index: IntArray
    """int16[num_samples]; uint8 in GPT-NeoX."""
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
        """See `megaindex.index.spans.Index`.

        Raises:
            OutOfRange: an id below 0 or not below ``num_samples``, or the blend draws a sample that
                its source does not hold.
        """
        ids = check_sample_ids(sample_ids, self.num_samples)
        which = self.dataset_index[ids].astype(np.int64)
        samples = self.dataset_sample_index[ids]
        if self._table is None:
            return self._locate_each(which, samples)
        try:
            runs = active().blended_spans(self._table, which, samples)
        except InvalidArgument:
            return self._locate_each(which, samples)  # which says what is wrong
        source, document, offset, length, row_splits = runs
        return Spans(source, document, offset, length, row_splits)

    def _locate_each(self, which: I64, samples: I64) -> Spans:
        """Source by source."""
        pieces = []
        for source in np.unique(which).tolist():
            places = np.flatnonzero(which == source)
            spans = self.indices[source].locate(samples[places])
            numbered = replace(spans, source=np.full(len(spans), source, np.int32))
            pieces.append((places, numbered))
        return joined(pieces, which.size)

    @cached_property
    def _table(self) -> Any:
        """Of the arrays of all sources, if all have arrays: a batch is then one call."""
        arrays = [index for index in self.indices if isinstance(index, ArrayIndex)]
        if len(arrays) < len(self.indices):
            return None
        return active().span_table(
            [
                (
                    index.shuffle_index,
                    index.sample_index,
                    index.document_index,
                    index.sequence_lengths,
                    index.add_extra_token,
                )
                for index in arrays
            ]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}
