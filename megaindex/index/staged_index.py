"""Index of consecutive stages, each a mixture of sources that continue from stage to stage.

Sample i of a run is computed directly: its stage, its stream and the number of that stream's draw
(`megaindex.index.mixing`), then the sample of the source. Stages of one sequence length are a
`StagedIndex`, those of several lengths one for each in a row (`megaindex.index.stretches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, IntArray
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ServedTokens, distinct, join_served, serve, served_tokens
from megaindex.index.counts import CountsByLength, Cursors
from megaindex.index.mixing import Mixing
from megaindex.index.orders.epoch import PassTables
from megaindex.index.spans import (
    Chunks,
    CombinedIndex,
    Index,
    Spans,
    check_sample_ids,
    datasets_of,
    iterate_in_order,
    iterate_spans,
    locate_each,
)
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import num_threads

WINDOW = 1 << 25
"""Positions sorted by source at a time, about 270 MB."""
WORTH_SORTING = 1 << 12
"""Positions for each source from which sorting them is faster than serving them in order."""
_SORTED = 1 << 21  # positions of which a thread sorts the sources
_WINDOWS_KEPT = 2  # threads may be a window apart


class Window(NamedTuple):
    """Positions of a range by the streams that serve them."""

    begin: int
    places: I32
    """int32[n]: positions less ``begin``, those of each stream together and rising."""
    bounds: I64
    """int64[streams + 1]: first of the places of each stream, and n."""
    firsts: I64
    """int64[streams]: sample of the stream that its first place serves; those that follow serve the
    next samples. -1 where they do not."""

    def iterate(self, stream: int, index: Index, source: int, part: int, parts: int) -> Chunks:
        """Iterate over the positions of a stream, which serve samples of ``index``."""
        low, high = self.bounds[stream : stream + 2].tolist()
        places, first = self.places[low:high], int(self.firsts[stream])
        for samples, spans in iterate_spans(index, first, first + places.size, part, parts):
            if source:
                spans = replace(spans, source=np.full(len(spans), source, np.int32))
            samples -= first
            yield places[samples].astype(np.int64) + self.begin, spans


def places_by_stream(
    streams_between: Callable[[int, int], IntArray], begin: int, end: int, num_streams: int
) -> tuple[I32, I64]:
    """Return places and bounds of a `Window` of positions ``begin`` to ``end - 1``, in threads.

    ``streams_between`` returns the streams of a range of positions.
    """

    def sort(first: int) -> tuple[I32, I64]:
        streams = streams_between(first, min(first + _SORTED, end))
        order = np.argsort(streams, kind="stable").astype(np.int32)
        order += first - begin
        return order, np.bincount(streams, minlength=num_streams)

    pieces = map_interruptibly(sort, range(begin, end, _SORTED), num_threads())
    counts = np.array([count for _, count in pieces])
    bounds = np.concatenate(([0], np.cumsum(counts.sum(axis=0))))
    targets = bounds[:-1] + np.cumsum(counts, axis=0) - counts
    places = np.empty(end - begin, np.int32)
    for (order, count), target in zip(pieces, targets, strict=True):
        ends = np.cumsum(count)
        for stream in np.flatnonzero(count).tolist():
            low, size = int(target[stream]), int(count[stream])
            places[low : low + size] = order[ends[stream] - size : ends[stream]]
    return places, bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedStage:
    """Samples that a stage draws from some of the sources."""

    mixing: Mixing
    sources: tuple[int, ...]
    """Source number of each stream of the mixing."""
    begins: tuple[int, ...]
    """First sample of the source that each stream reads."""
    num_samples: int

    def reads(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield source, first sample and end of the draws of each stream in a range of positions.

        The range ends before ``end``; default: the end of the stage.
        """
        bounds = (begin, self.num_samples if end is None else end)
        counts = (self.mixing.counts(at).tolist() for at in bounds)
        for source, first, low, high in zip(self.sources, self.begins, *counts, strict=True):
            yield source, first + low, first + high


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StagedIndex(CombinedIndex):
    """Index of the samples of all stages.

    Raises:
        InvalidArgument: sources that are drawn differ in sequence_length or add_extra_token, or
            have fewer samples than are drawn.
    """

    sources: tuple[Index, ...]
    """Those that no stage draws may have another sequence length."""
    stages: tuple[MixedStage, ...]

    @cached_property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """Dataset of each source; empty if a source was built from lengths alone."""
        each = [datasets_of(index) for index in self.sources]
        return tuple(found[0] for found in each) if all(each) else ()

    @property
    def _combined(self) -> tuple[Index, ...]:
        return self.sources

    def __post_init__(self) -> None:
        drawn = {source for stage in self.stages for source in stage.sources}
        read = [self.sources[source] for source in sorted(drawn)] or self.sources
        shapes = {(index.sequence_length, index.add_extra_token) for index in read}
        if len(shapes) != 1:
            raise InvalidArgument(
                "all sources must have the same (sequence_length, add_extra_token), got "
                f"{sorted(shapes)}"
            )
        for number, stage in enumerate(self.stages):
            for source, _, end in stage.reads():
                if end > self.sources[source].num_samples:
                    raise InvalidArgument(
                        f"source {source} must have {end} samples for stage {number}, got "
                        f"{self.sources[source].num_samples}; extend it"
                    )

    @property
    def num_samples(self) -> int:
        return int(self._bounds[-1])

    @property
    def sequence_length(self) -> int:
        first = self.stages[0].sources[0] if self.stages else 0
        return self.sources[first].sequence_length

    def origin(self, sample_ids: npt.ArrayLike) -> tuple[I64, I64]:
        """Return the source and the sample of that source of each sample, int64[n] each."""
        ids = check_sample_ids(sample_ids, self.num_samples)
        source, sample = np.empty_like(ids), np.empty_like(ids)
        stages = np.searchsorted(self._bounds, ids, side="right") - 1
        for number in np.unique(stages).tolist():
            stage, mine = self.stages[number], stages == number
            drawn = stage.mixing.lookup(ids[mine] - self._bounds[number])
            source[mine] = np.array(stage.sources)[drawn.stream]
            sample[mine] = np.array(stage.begins)[drawn.stream] + drawn.ordinal
        return source, sample

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        return locate_each(self.sources, *self.origin(sample_ids))

    def counts_by_length(self, begin: int, end: int) -> CountsByLength:
        """Return the samples of a range, see `megaindex.index.counts.counts_by_length`."""
        counts = np.zeros(len(self.sources), np.int64)
        for stage, first in zip(self.stages, self._bounds.tolist(), strict=False):
            low, high = (min(max(at - first, 0), stage.num_samples) for at in (begin, end))
            if low < high:
                drawn = stage.mixing.counts(high) - stage.mixing.counts(low)
                np.add.at(counts, list(stage.sources), drawn)
        return {self.sequence_length: counts}

    def cursors(self, position: int) -> Cursors:
        """Return the next sample of each reading, see `megaindex.index.counts.cursors`."""
        begun: dict[int, int] = {}
        ahead: dict[int, int] = {}
        for stage, first in zip(self.stages, self._bounds.tolist(), strict=False):
            served = min(max(position - first, 0), stage.num_samples)
            for (source, _, end), begin in zip(stage.reads(0, served), stage.begins, strict=True):
                if begin < end:
                    begun[source] = end
                else:
                    ahead.setdefault(source, begin)
        return {(source, self.sequence_length): at for source, at in {**ahead, **begun}.items()}

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        """Iterate over the samples of each source in its fastest order, window by window."""
        if end - begin < WORTH_SORTING * len(self.sources):
            yield from iterate_in_order(self, begin, end, part, parts)
            return
        for number, (first, last) in enumerate(pairwise(self._bounds.tolist())):
            stage = self.stages[number]
            for start in range(max(begin, first), min(end, last), WINDOW):
                window = self._windows.get((number, start, min(start + WINDOW, end, last)))
                for stream in np.flatnonzero(np.diff(window.bounds)).tolist():
                    source = stage.sources[stream]
                    yield from window.iterate(stream, self.sources[source], source, part, parts)

    @cached_property
    def _windows(self) -> PassTables[tuple[int, int, int], Window]:
        """The last windows, which the threads of an iteration share."""
        return PassTables(self._make_window, _WINDOWS_KEPT)

    def _make_window(self, key: tuple[int, int, int], _: int) -> Window:
        number, begin, end = key
        stage, first = self.stages[number], int(self._bounds[number])
        places, bounds = places_by_stream(
            lambda low, high: stage.mixing.streams_between(low - first, high - first)[0],
            begin,
            end,
            len(stage.sources),
        )
        drawn = np.array(stage.begins) + stage.mixing.counts(begin - first)
        return Window(begin, places, bounds, drawn)

    def served_tokens(self, documents: I64, source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        found = served_tokens(self.sources[source], documents)
        samples = distinct(found.sample)
        pieces = []
        for stage, first in zip(self.stages, self._bounds[:-1].tolist(), strict=True):
            for stream, (number, begin, end) in enumerate(stage.reads()):
                low, high = np.searchsorted(samples, (begin, end))
                if number == source and low < high:
                    drawn = samples[low:high]
                    at = stage.mixing.positions(stream, drawn - begin, stage.num_samples)
                    pieces.append(serve(found, drawn, at + first))
        return join_served(pieces)

    @cached_property
    def _bounds(self) -> I64:
        """int64[stages + 1]: first sample of each stage, and the number of samples."""
        counts = [stage.num_samples for stage in self.stages]
        return np.cumsum([0, *counts], dtype=np.int64)
