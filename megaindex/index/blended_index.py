"""Blend of several indices, whose sources may be opened at their first read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex._types import F64, I32, I64, IndexArrays, IntArray
from megaindex.errors import InvalidArgument, StorageError
from megaindex.format import IndexedDataset
from megaindex.index.array_index import (
    ArrayIndex,
    ServedTokens,
    contains,
    membership,
    places_of,
    serve,
    served_tokens,
)
from megaindex.index.counts import CountsByLength, drawn_counts
from megaindex.index.draws import BlendDraws, Rule
from megaindex.index.exposures import PassRuns
from megaindex.index.orders.epoch import PassTables
from megaindex.index.spans import (
    CHUNK,
    Chunks,
    CombinedIndex,
    EpochSizes,
    Index,
    ShownIndex,
    Spans,
    check_sample_ids,
    datasets_of,
    epoch_sizes,
    iterate_in_order,
    locate_each,
    part_bounds,
    pass_runs,
)
from megaindex.index.staged_index import WINDOW, WORTH_SORTING, Window, places_by_stream
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import active, num_threads

Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LazyIndex(ShownIndex):
    """Index of known size that is opened when its samples are first located."""

    name: str
    """Name of the source in messages."""
    num_samples: int
    num_epochs: int
    tokens_per_epoch: int
    sequence_length: int
    add_extra_token: int
    has_arrays: bool
    """True if it is an `ArrayIndex`."""
    order: str
    """Name of its order."""
    open: Callable[[], Index]
    """Function that opens it; must be picklable for the index to be."""

    @cached_property
    def index(self) -> Index:
        """The opened index; StorageError if its size differs from the recorded one."""
        index = self.open()
        if index.num_samples != self.num_samples:
            raise StorageError(
                f"{self.name}: the index must have {self.num_samples} samples, as when the blend "
                f"was built, got {index.num_samples}; build the blend again"
            )
        return index

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The dataset of the index, which is opened for it."""
        return datasets_of(self.index)

    @property
    def _paths(self) -> list[str]:
        return [self.name]

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch; opens the index if its order decides them."""
        return super().epoch_sizes() if self.has_arrays else epoch_sizes(self.index)

    @cached_property
    def pass_runs(self) -> PassRuns:
        """The samples in runs of one pass; opens the index if its order decides them."""
        return super().pass_runs if self.has_arrays else pass_runs(self.index)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        return self.index.locate(sample_ids)

    def served_tokens(self, documents: I64, source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        return served_tokens(self.index, documents, source)


class Tables(Generic[Entry]):
    """Kernel table of the sources used so far; safe to share between threads.

    Args:
        count: number of sources.
        entry: function that returns the table row of a source and opens it if necessary.
        build: function that builds a kernel table from rows.
        ready: add all sources now.
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
        # row of each source, -1 if it has none yet; None once row and source number are equal
        slots = None if ready else np.full(count, -1, np.int32)
        self._state: tuple[Any, I32 | None] = (build(self._entries), slots)

    def holding(self, sources: IntArray) -> tuple[Any, I32 | None]:
        """Return a table of these sources and their rows; None if rows equal source numbers.

        Numbers out of range are kept, so that the kernel raises its error.
        """
        table, slots = self._state
        if slots is None:
            return table, None
        known = (sources >= 0) & (sources < slots.size)
        if not known.all():
            return table, np.where(known, -1, sources).astype(np.int32)
        # sources are opened on first use: a rank of a wide blend reads few of them early on
        if (slots[sources] < 0).any():
            table, slots = self._grown(np.unique(sources).tolist())
        return table, None if slots is None else slots[sources]

    def _grown(self, sources: Sequence[int]) -> tuple[Any, I32 | None]:
        with self._lock:
            table, slots = self._state
            if slots is None:  # another thread added the last sources
                return table, None
            missing = [source for source in sources if slots[source] < 0]
            if missing:
                slots = slots.copy()  # other threads may read the old array
                for source in missing:
                    self._entries.append(self._entry(source))
                    slots[source] = len(self._entries) - 1
                if len(self._entries) == slots.size:  # complete: sort by source number
                    self._entries = [self._entries[slot] for slot in slots.tolist()]
                    slots = None
                table = self._build(self._entries)
                self._state = table, slots
        return table, slots


MOST_SOURCES = 2**15 - 1
"""Largest number of sources in an int16 dataset_index."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlendedIndex(CombinedIndex):
    """Blend of indices: sample ``i`` is ``dataset_sample_index[i]`` of source ``dataset_index[i]``.

    The arrays are those of `BlendedDataset` of megatron-core 0.16.1 and ``BlendableDataset`` of
    GPT-NeoX.
    """

    indices: tuple[Index, ...]
    """Index of each source."""
    dataset_index: IntArray
    """int16[n] (uint8 in GPT-NeoX): number of the source."""
    dataset_sample_index: I64
    """int64[n]: sample id in the source."""
    end: int | None = None
    """Number of samples, where fewer than the arrays draw: in GPT-NeoX one draw of a source may be
    behind its last sample. None: all."""
    datasets: tuple[IndexedDataset, ...] = ()
    """Datasets of the sources, if opened by `megaindex.build_blend`."""
    rule: Rule | None = None
    """Rule that filled the arrays from their beginning; None if another program may have."""
    weights: IntArray | F64 | None = None
    """`BlendDraws.values`."""
    uncounted_samples: int = 0
    """`FrameworkRules.uncounted_samples` by which draws beyond a source were changed; 0: none."""

    @property
    def num_samples(self) -> int:
        return int(self.dataset_index.size) if self.end is None else self.end

    @property
    def _combined(self) -> tuple[Index, ...]:
        return self.indices

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Return the spans of samples, see `megaindex.Index`.

        Raises:
            OutOfRange: an id is not from 0 to ``num_samples - 1``, or the blend draws a sample that
                its source does not have.
            InvalidArgument: an array has a wrong entry.
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
        # the kernel knows rows of a table, not names: sources raise errors that say which file
        except InvalidArgument:
            return locate_each(self.indices, which, samples)  # raises the error of the source
        source, document, offset, length, row_splits = runs
        if slots is not None:
            source = np.repeat(which, np.diff(row_splits)).astype(np.int32)
        return Spans(source, document, offset, length, row_splits)

    def origin(self, sample_ids: npt.ArrayLike) -> tuple[I64, I64]:
        """Return the source and the sample of that source of each sample, int64[n] each."""
        ids = check_sample_ids(sample_ids, self.num_samples)
        return self.dataset_index[ids].astype(np.int64), self.dataset_sample_index[ids]

    def counts_by_length(self, begin: int, end: int) -> CountsByLength:
        """Return the samples of a range, see `megaindex.index.counts.counts_by_length`."""
        drawn = drawn_counts(self.dataset_index[begin:end], len(self.indices))
        return {self.sequence_length: drawn}

    def served_tokens(self, documents: I64, source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        found = served_tokens(self.indices[source], documents)
        drawn = places_of(
            self.dataset_index[: self.num_samples], np.array([source]), len(self.indices)
        )
        samples = self.dataset_sample_index[drawn]
        wanted = contains(membership(found.sample), samples)
        return serve(found, samples[wanted], drawn[wanted])

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        """Iterate over the samples of each source in its fastest order, window by window."""
        # too few samples of each source for its own order to be of use
        if end - begin < WORTH_SORTING * len(self.indices):
            yield from iterate_in_order(self, begin, end, part, parts)
            return
        for start in range(begin, end, WINDOW):
            stop = min(start + WINDOW, end)
            window = self._windows.get((start, stop))
            if window is None:
                yield from iterate_in_order(self, start, stop, part, parts)
                continue
            for source in np.flatnonzero(np.diff(window.bounds)).tolist():
                # successive samples need no list of positions
                if window.firsts[source] >= 0:
                    yield from window.iterate(source, self.indices[source], source, part, parts)
                    continue
                places = window.places[window.bounds[source] : window.bounds[source + 1]]
                low, high = part_bounds(0, places.size, part, parts)
                for at in range(low, high, CHUNK):
                    positions = places[at : min(at + CHUNK, high)].astype(np.int64) + start
                    yield positions, self.locate(positions)

    @cached_property
    def _windows(self) -> PassTables[tuple[int, int], Window | None]:
        """The last windows, which the threads of an iteration share."""
        return PassTables(self._make_window, 2)

    def _make_window(self, key: tuple[int, int], _: int) -> Window | None:
        """Return a window; None if the arrays name sources that do not exist."""
        begin, end = key
        sources, samples = self.dataset_index[begin:end], self.dataset_sample_index[begin:end]
        if sources.min() < 0 or sources.max() >= len(self.indices):
            return None
        places, bounds = places_by_stream(
            lambda low, high: self.dataset_index[low:high], begin, end, len(self.indices)
        )

        def first_of(source: int) -> int:
            """Return the first sample; -1 unless successive samples follow, all in the source."""
            drawn = samples[places[bounds[source] : bounds[source + 1]]]
            if not drawn.size:
                return -1
            first = int(drawn[0])
            inside = 0 <= first <= self.indices[source].num_samples - drawn.size
            drawn -= first
            return first if inside and (drawn == np.arange(drawn.size)).all() else -1

        firsts = map_interruptibly(first_of, range(len(self.indices)), num_threads())
        return Window(begin, places, bounds, np.array(firsts, np.int64))

    @cached_property
    def _tables(self) -> Tables[Any] | None:
        """Kernel table for one call per batch, if all sources have arrays."""
        if not all(has_arrays(index) for index in self.indices):
            return None
        return Tables(
            len(self.indices),
            lambda number: arrays_of(self.indices[number]),
            active().span_table,
            ready=not any(isinstance(index, LazyIndex) for index in self.indices),
        )


def blend_index(
    draws: BlendDraws,
    indices: Sequence[Index],
    num_samples: int,
    uncounted: int,
    names: Sequence[str] = (),
) -> BlendedIndex:
    """Return the index of the first ``num_samples`` draws.

    Args:
        indices: of the sources.
        uncounted: samples that the framework does not count of each source; a draw beyond a source
            is taken modulo those that it counts.
        names: of the sources, for messages.

    Raises:
        InvalidArgument: there are too many sources, or more samples of one are drawn than built, at
            which the framework fails.
    """
    if len(indices) > MOST_SOURCES:
        raise InvalidArgument(f"a blend has at most {MOST_SOURCES} sources, got {len(indices)}")
    which, samples, counts = draws.arrays(num_samples)
    built = np.array([index.num_samples for index in indices], np.int64)
    short = np.flatnonzero(counts > built).tolist()
    if short and not uncounted:
        name = names[short[0]] if names else f"source {short[0]}"
        raise InvalidArgument(
            f"{name}: {num_samples} samples of the blend draw {counts[short[0]]} of it, and "
            f"{built[short[0]]} were built: the run fails or repeats samples; follow the advice of "
            "`megaindex plan`"
        )
    if short:
        _wrap(which, samples, built, uncounted)
    return BlendedIndex(
        indices=tuple(indices),
        dataset_index=which,
        dataset_sample_index=samples,
        rule=draws.rule,
        weights=draws.values,
        uncounted_samples=uncounted if short else 0,
        datasets=tuple(dataset for index in indices for dataset in datasets_of(index)),
    )


def _wrap(which: IntArray, samples: I64, built: I64, uncounted: int) -> None:
    """Take the draws beyond a source modulo the samples that the framework counts."""
    for begin in range(0, which.size, CHUNK):
        sources, numbers = which[begin : begin + CHUNK], samples[begin : begin + CHUNK]
        beyond = np.flatnonzero(numbers >= built[sources])
        numbers[beyond] %= np.maximum(1, built[sources[beyond]] - uncounted)


def fill_uncounted(index: Index, uncounted: int) -> Index:
    """Return a framework's blend with the samples that it reads for draws beyond a source."""
    if not isinstance(index, BlendedIndex) or not uncounted:
        return index
    samples = np.array(index.dataset_sample_index)
    built = np.array([each.num_samples for each in index.indices], np.int64)
    _wrap(index.dataset_index, samples, built, uncounted)
    return replace(index, dataset_sample_index=samples)


def has_arrays(index: Index) -> bool:
    """Return True if its samples are stored in arrays."""
    return isinstance(index, ArrayIndex) or (isinstance(index, LazyIndex) and index.has_arrays)


def arrays_of(index: Index) -> IndexArrays:
    """Return the arrays of an index that `has_arrays`, as the kernels take them."""
    arrays: Any = index.index if isinstance(index, LazyIndex) else index
    return (
        arrays.shuffle_index,
        arrays.sample_index,
        arrays.document_index,
        arrays.sequence_lengths,
        arrays.add_extra_token,
    )
