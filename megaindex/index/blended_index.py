"""Several indices blended into one; members open when first read.

A blend of thousands of sources is ready at once; a batch opens the few that it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, IntArray
from megaindex.errors import InvalidArgument, StorageError
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.spans import Index, Spans, check_sample_ids, locate_each
from megaindex.kernels import active

Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, eq=False)
class LazyIndex:
    """An index of which the sizes are known, opened when its samples are first located."""

    name: str
    """For messages."""
    num_samples: int
    num_epochs: int
    tokens_per_epoch: int
    sequence_length: int
    add_extra_token: int
    has_arrays: bool
    """Whether it is an ArrayIndex."""
    open: Callable[[], Index]
    """Opens it; must pickle for the index to."""

    @cached_property
    def index(self) -> Index:
        """The index itself.

        Raises:
            StorageError: it is not of the size that was known.
        """
        index = self.open()
        if index.num_samples != self.num_samples:
            raise StorageError(
                f"{self.name}: its index holds {index.num_samples} samples, it held "
                f"{self.num_samples} when the blend was built; build the blend anew"
            )
        return index

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        return self.index.locate(sample_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "index"}


class Tables(Generic[Entry]):
    """A kernel's table of the sources that were needed so far. Safe to share between threads.

    Args:
        count: sources in all.
        entry: what the table holds of a source; opens it if need be.
        build: makes a table of entries.
    """

    def __init__(
        self,
        count: int,
        entry: Callable[[int], Entry],
        build: Callable[[Sequence[Entry]], Any],
        *,
        ready: bool,
    ) -> None:
        self._entry = entry
        self._build = build
        self._lock = threading.Lock()
        self._entries = [entry(number) for number in range(count)] if ready else []
        # for each source its place in the table, -1 where it has none yet; None where all have
        # their own number
        slots = None if ready else np.full(count, -1, np.int32)
        self._state: tuple[Any, I32 | None] = (build(self._entries), slots)

    def holding(self, sources: IntArray) -> tuple[Any, I32 | None]:
        """A table that holds these sources, and the place of each; None where it is its number.

        Numbers outside the sources stay as they are, for the kernel to refuse.
        """
        table, slots = self._state
        if slots is None:
            return table, None
        known = (sources >= 0) & (sources < slots.size)
        if not known.all():
            return table, np.where(known, -1, sources).astype(np.int32)
        if (slots[sources] < 0).any():
            table, slots = self._grown(np.unique(sources).tolist())
        return table, None if slots is None else slots[sources]

    def _grown(self, sources: Sequence[int]) -> tuple[Any, I32 | None]:
        with self._lock:
            table, slots = self._state
            if slots is None:  # another thread has added the last ones
                return table, None
            missing = [source for source in sources if slots[source] < 0]
            if missing:
                slots = slots.copy()  # others may be reading the old ones
                for source in missing:
                    self._entries.append(self._entry(source))
                    slots[source] = len(self._entries) - 1
                if len(self._entries) == slots.size:  # all: each under its own number from now on
                    self._entries = [self._entries[slot] for slot in slots.tolist()]
                    slots = None
                table = self._build(self._entries)
                self._state = table, slots
        return table, slots


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
            ready=not any(isinstance(index, LazyIndex) for index in self.indices),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}


def _has_arrays(index: Index) -> bool:
    return isinstance(index, ArrayIndex) or (isinstance(index, LazyIndex) and index.has_arrays)


def _arrays_of(index: Index) -> Any:
    """Return a row of the kernel's table."""
    arrays: Any = index.index if isinstance(index, LazyIndex) else index
    return (
        arrays.shuffle_index,
        arrays.sample_index,
        arrays.document_index,
        arrays.sequence_lengths,
        arrays.add_extra_token,
    )
