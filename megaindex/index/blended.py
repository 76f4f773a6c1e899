"""Several indices blended into one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.arrays import ArrayIndex
from megaindex.index.on_demand import LaterIndex, Tables
from megaindex.index.spans import Index, Spans, check_sample_ids, locate_each
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
    datasets: tuple[IndexedDataset, ...] = ()
    """Of the indices, where `megaindex.build_blend` opened them."""

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
        if self._tables is None:
            return locate_each(self.indices, which, samples)
        table, slots = self._tables.holding(which)
        try:
            runs = active().blended_spans(
                table, which if slots is None else slots.astype(np.int64), samples
            )
        except InvalidArgument:
            return locate_each(self.indices, which, samples)  # which says what is wrong
        source, document, offset, length, row_splits = runs
        if slots is not None:
            source = np.repeat(which, np.diff(row_splits)).astype(np.int32)
        return Spans(source, document, offset, length, row_splits)

    @cached_property
    def _tables(self) -> Tables[Any] | None:
        """Of the arrays of the sources, if all have arrays: a batch is then one call."""
        if not all(_has_arrays(index) for index in self.indices):
            return None
        return Tables(
            len(self.indices),
            lambda number: _arrays_of(self.indices[number]),
            active().span_table,
            ready=not any(isinstance(index, LaterIndex) for index in self.indices),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}


def _has_arrays(index: Index) -> bool:
    return isinstance(index, ArrayIndex) or (isinstance(index, LaterIndex) and index.has_arrays)


def _arrays_of(index: Index) -> Any:
    """A row of the kernel's table."""
    arrays: Any = index.index if isinstance(index, LaterIndex) else index
    return (
        arrays.shuffle_index,
        arrays.sample_index,
        arrays.document_index,
        arrays.sequence_lengths,
        arrays.add_extra_token,
    )
