"""Positions that are stretches of other positions: skips, extensions, parts, passes of a loader.

A `Stretch` serves samples of an index in place of its own positions, or is a hole. A
`StretchedIndex` is a sequence of them, with the documents whose loss is masked from a position on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex._types import I64
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.array_index import (
    ServedTokens,
    contains,
    join_served,
    membership,
    serve,
    served_tokens,
)
from megaindex.index.counts import (
    CountsByLength,
    Cursors,
    add_counts,
    counts_by_length,
    counts_of,
    cursors,
    draws_before,
    origin_of,
)
from megaindex.index.exposures import PassRuns, join_runs, runs_of_samples
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
    exposures_of,
    iterate_spans,
    join_spans,
    later_runs,
    part_bounds,
    pass_counts,
    pass_numbers,
    pass_runs,
    separates_documents,
    sequence_lengths_at,
    sources_html,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretch:
    """Positions that serve samples of one index, in this order, ``times`` times in a row."""

    index: Index
    samples: range | I64
    """Sample ids of ``index``, consecutive or in any order; negative ones before a run that joined
    that of another system."""
    times: int = 1
    first_passes: I64 = field(default_factory=lambda: np.zeros(1, np.int64))
    """int64[sources]: passes of each source before those of ``index``, which has further ones."""
    hole: str = ""
    """Why the positions are not served, for messages; empty: they are."""

    @property
    def num_samples(self) -> int:
        """Number of positions."""
        return len(self.samples) * self.times

    @property
    def first(self) -> int:
        """Its first sample id; 0 without any."""
        return int(self.samples[0]) if len(self.samples) else 0

    def samples_at(self, places: I64) -> I64:
        """Return the sample ids at these places of the stretch."""
        if self.times > 1:
            places = places % len(self.samples)
        if isinstance(self.samples, range):
            return places + self.samples.start
        return self.samples[places]

    def serve(self, found: ServedTokens, first: int, *, is_sorted: bool) -> ServedTokens:
        """Return tokens in samples of the index at positions from ``first``."""
        if isinstance(self.samples, range):
            bounds = (self.samples.start, self.samples.stop)
            if is_sorted:
                once = found.select(slice(*np.searchsorted(found.sample, bounds)))
            else:
                once = found.select((found.sample >= bounds[0]) & (found.sample < bounds[1]))
            once = once._replace(sample=once.sample - self.samples.start + first)
        else:
            places = np.flatnonzero(contains(membership(found.sample), self.samples))
            once = serve(found, self.samples[places], places + first)
        # a stretch of no samples has no turn, and a range no step 0
        turns = range(0, self.num_samples, max(1, len(self.samples)))
        return join_served([once._replace(sample=once.sample + turn) for turn in turns])

    def counts_by_length(self, begin: int, end: int) -> CountsByLength:
        """Return the samples of each source at places ``begin`` to ``end - 1``."""
        size = max(1, len(self.samples))
        (first, low), (last, high) = divmod(begin, size), divmod(end, size)
        if first == last:
            return self._once(low, high)
        whole = self._once(0, size) if last - first > 1 else {}
        between = {length: counts * (last - first - 1) for length, counts in whole.items()}
        return add_counts([self._once(low, size), between, self._once(0, high)])

    @property
    def pass_runs(self) -> PassRuns:
        """The positions in runs of one pass, of an index of one source."""
        if isinstance(self.samples, range):
            once = pass_runs(self.index).between(self.samples.start, self.samples.stop)
        else:
            once = runs_of_samples(exposures_of(self.index, self.samples))
        return join_runs([once.later(self.first_passes)] * self.times)

    def _once(self, low: int, high: int) -> CountsByLength:
        """Return the samples of each source at places within one time."""
        samples = self.samples[low:high]
        if isinstance(samples, range):
            return counts_by_length(self.index, samples.start, samples.stop)
        return counts_of(self.index, samples)

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        """Iterate over places ``begin`` to ``end - 1`` and the spans of their samples."""
        size = max(1, len(self.samples))
        if not isinstance(self.samples, range):
            first, stop = part_bounds(begin, end, part, parts)
            for start in range(first, stop, CHUNK):
                places = np.arange(start, min(stop, start + CHUNK))
                yield places, self.index.locate(self.samples_at(places))
            return
        for turn in range(begin // size, -(-end // size)):
            shift = self.samples.start - turn * size
            low, high = max(begin, turn * size) + shift, min(end, (turn + 1) * size) + shift
            for samples, spans in iterate_spans(self.index, low, high, part, parts):
                yield samples - shift, spans


@dataclass(frozen=True, kw_only=True, eq=False)
class LossMask:
    """Documents of a source without loss, or removed, from a position on."""

    source: str | None
    first: int
    """First position with the mask."""
    documents: I64 | None
    """Sorted sequence ids; None: the whole source."""
    remove: bool = False

    @cached_property
    def record(self) -> dict[str, Any]:
        """The mask as JSON values, its documents as a number and a hash."""
        ids = self.documents
        return {
            "source": self.source,
            "from": self.first,
            "documents": None if ids is None else ids.size,
            "digest": None if ids is None else digest_of_ids(ids),
            **({"remove": True} if self.remove else {}),
        }


def digest_of_ids(ids: I64) -> str:
    """Return a hash of sequence ids."""
    return xxhash.xxh3_128_hexdigest(ids.astype("<i8").tobytes())


class MaskedDocuments:
    """Documents of a mask, looked up for many spans at once: a bitmap, or few ids sorted."""

    def __init__(self, mask: LossMask) -> None:
        self.mask = mask
        self.first = mask.first
        self.ids = mask.documents
        self._bits: npt.NDArray[np.uint8] | None = None
        # ids are sorted, so the last one sizes the bitmap
        if self.ids is not None and self.ids[-1] <= _BITS_PER_ID * self.ids.size:
            self._bits = np.zeros((int(self.ids[-1]) >> 3) + 1, np.uint8)
            np.bitwise_or.at(self._bits, self.ids >> 3, _BIT[self.ids & 7])

    def marks(self, documents: I64) -> npt.NDArray[np.bool_]:
        """Return bool[n]: True for documents of the mask."""
        if self.ids is None:
            return np.ones(documents.shape, bool)
        if self._bits is None:
            at = np.minimum(np.searchsorted(self.ids, documents), self.ids.size - 1)
            return np.asarray(self.ids[at] == documents)
        # documents behind the last id of the mask have no bit of their own
        within = np.minimum(documents >> 3, self._bits.size - 1)
        found = (self._bits[within] & _BIT[documents & 7]) != 0
        return np.asarray(found & (documents <= self.ids[-1]))


_COMPARED = 8  # stretches that are sought by comparing every sample
_BITS_PER_ID = 4096  # a bitmap of at most 64 times the bytes of its ids
_BIT = np.array([1 << k for k in range(8)], np.uint8)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StretchedIndex(CombinedIndex):
    """Index of the positions of stretches in a row.

    ``sequence_length`` is the longest; `sequence_lengths_at` has that of each sample. `locate`
    refuses the positions of holes and `iterate_spans` leaves them out. Spans of documents without
    loss are marked in ``Spans.masked``, removed ones in ``Spans.removed`` too.
    """

    stretches: tuple[Stretch, ...]
    """At least one; their sources are the first ones of those of the widest index."""
    masks: Mapping[int, Sequence[MaskedDocuments]] = field(default_factory=dict)
    """By the number of the source."""
    skips: object = None
    """The `Skips` of the run that made holes and masks; None without any."""
    further_seeds: tuple[int, ...] = ()
    """Seeds of the epochs that an extension adds."""
    least_seen: int | None = None
    """Of samples of one index, those before the ones that follow with the least-seen tokens first;
    None: they are in another order."""

    @cached_property
    def bases(self) -> list[Index]:
        """The indices of the stretches, each once."""
        return list({id(each.index): each.index for each in self.stretches}.values())

    @cached_property
    def widest(self) -> Index:
        """The first index of the most sources."""
        return max(self.bases, key=lambda index: len(separates_documents(index)))

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """Dataset of each source; empty if a source was built from lengths alone."""
        return datasets_of(self.widest)

    @property
    def order(self) -> str:
        """Name of the order; empty if it has none."""
        return getattr(self.widest, "order", "")

    @property
    def _combined(self) -> tuple[Index, ...]:
        return (self.widest,)

    @property
    def num_epochs(self) -> int:
        return int(self.pass_counts.max())

    @cached_property
    def pass_counts(self) -> I64:
        """int64[sources]: number of passes of each source."""
        found = np.zeros(len(separates_documents(self)), np.int64)
        for each in self.stretches:
            counts = pass_counts(each.index) + each.first_passes
            np.maximum(found[: counts.size], counts, out=found[: counts.size])
        return found

    @property
    def num_samples(self) -> int:
        return int(self._bounds[-1])

    @property
    def sequence_length(self) -> int:
        return max(index.sequence_length for index in self.bases)

    @cached_property
    def part_lengths(self) -> tuple[int, ...]:
        """Sequence length of each index, in the order of their first stretches."""
        found: list[int] = []
        for index in self.bases:
            found += getattr(index, "part_lengths", (index.sequence_length,))
        return tuple(found)

    @property
    def first_position(self) -> int:
        """First position of a run that joined that of another system, which served those before."""
        index, first = self.stretches[0].index, self.stretches[0].first
        return -first if first < 0 else 0 if first else getattr(index, "first_position", 0)

    @cached_property
    def _bounds(self) -> I64:
        """int64[stretches + 1]: first position of each stretch, and the number of positions."""
        counts = [each.num_samples for each in self.stretches]
        return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))

    @cached_property
    def _is_hole(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(each.hole) for each in self.stretches])

    def sequence_lengths_at(self, sample_ids: npt.ArrayLike) -> int | I64:
        """Return the number of input tokens of each sample, one number if all have the same."""
        ids = check_sample_ids(sample_ids, self.num_samples)
        # nearly every run: samples need not be looked up for it
        if len(set(self.part_lengths)) == 1:
            return self.part_lengths[0]
        lengths = np.empty_like(ids)
        for places, index, samples in self._divided(ids, self._stretches_at(ids)):
            lengths[places] = sequence_lengths_at(index, samples)
        return lengths

    def origin(self, sample_ids: npt.ArrayLike) -> tuple[I64, I64]:
        """Return the source and the sample of that source of each sample, int64[n] each.

        Samples of a source are numbered at each sequence length from its start.
        """
        ids, which = self._served(sample_ids)
        source, sample = np.empty_like(ids), np.empty_like(ids)
        for places, index, samples in self._divided(ids, which):
            source[places], sample[places] = origin_of(index, samples)
        return source, sample

    @cached_property
    def pass_runs(self) -> PassRuns:
        """The samples in runs of one pass, see `pass_numbers`."""
        if self.is_one_order:
            return join_runs(each.pass_runs for each in self.stretches)
        firsts = {id(each.index): each.first_passes for each in self.stretches}
        return join_runs(later_runs(index, firsts[id(index)]) for index in self.bases)

    def pass_numbers(self, sample_ids: I64) -> I64:
        """Return the numbers of samples in `pass_runs`, int64[n]: of one source their positions, of
        several their numbers in the indices, one after another."""
        if self.is_one_order:
            return sample_ids
        ids = np.maximum(sample_ids, 0)
        numbers = np.empty_like(ids)
        for places, index, samples in self._divided(ids, self._stretches_at(ids)):
            numbers[places] = pass_numbers(index, samples) + self._first_numbers[id(index)]
        return numbers

    @cached_property
    def _first_numbers(self) -> dict[int, int]:
        """Numbers in `pass_runs` before those of each index, by its identity."""
        sizes = [pass_runs(index).size for index in self.bases]
        return dict(zip(map(id, self.bases), accumulate(sizes, initial=0), strict=False))

    @cached_property
    def is_one_order(self) -> bool:
        """True if the index has the order of one source, not draws of several."""
        return all(isinstance(each, ShownIndex) and each.is_one_order for each in self.bases)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Return the spans that samples read, see `Index.locate`.

        Raises:
            OutOfRange: an id is not a position, or that of a hole.
        """
        ids, which = self._served(sample_ids)
        return self._marked(ids, self._locate(ids, which))

    def locate_any(self, positions: I64) -> Spans:
        """Return the spans at any positions, those of skipped samples too, without masks."""
        ids = check_sample_ids(positions, self.num_samples)
        return self._locate(ids, self._stretches_at(ids))

    def _locate(self, ids: I64, which: I64) -> Spans:
        pieces = [(at, index.locate(samples)) for at, index, samples in self._divided(ids, which)]
        return pieces[0][1] if len(pieces) == 1 else join_spans(pieces, ids.size)

    def _served(self, sample_ids: npt.ArrayLike) -> tuple[I64, I64]:
        """Return sample ids and their stretches, int64[n] each; OutOfRange for those of holes."""
        ids = check_sample_ids(sample_ids, self.num_samples)
        which = self._stretches_at(ids)
        wrong = self._is_hole[which]
        if wrong.any():
            first = int(wrong.argmax())
            raise OutOfRange(f"sample {int(ids[first])} {self.stretches[which[first]].hole}")
        return ids, which

    def _stretches_at(self, ids: I64) -> I64:
        return np.searchsorted(self._bounds, ids, side="right") - 1

    def _divided(self, ids: I64, which: I64) -> Iterator[tuple[I64, Index, I64]]:
        """Yield places in ``ids``, the index that serves them, and its sample at each."""
        bases, shifts, consecutive = self._table
        samples = ids + shifts[which]
        for number in np.unique(which[~consecutive[which]]).tolist():
            mine = which == number
            samples[mine] = self.stretches[number].samples_at(ids[mine] - self._bounds[number])
        for number in np.unique(bases[which]).tolist():
            places = np.flatnonzero(bases[which] == number)
            yield places, self.bases[number], samples[places]

    @cached_property
    def _table(self) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
        """Number of the index of each stretch; sample less position; if that is constant."""
        numbers = {id(index): number for number, index in enumerate(self.bases)}
        bases = [numbers[id(each.index)] for each in self.stretches]
        simple = [each.times == 1 and isinstance(each.samples, range) for each in self.stretches]
        shifts = np.array([each.first for each in self.stretches], np.int64) - self._bounds[:-1]
        return np.array(bases, np.int64), shifts, np.array(simple)

    def _marked(self, positions: I64, spans: Spans) -> Spans:
        """Return the spans of samples at these positions with their masks."""
        if not self.masks:
            return spans
        position = spans.per_span(positions)
        masked, removed = (
            np.zeros(len(spans), bool) if given is None else given.copy()
            for given in (spans.masked, spans.removed)
        )
        for number, sets in self.masks.items():
            for each in sets:
                chosen = spans.source == number
                # masks of the whole run, the usual ones, need no comparison
                if each.first > 0:
                    chosen &= position >= each.first
                mine = np.flatnonzero(chosen)
                marks = each.marks(spans.document[mine])
                masked[mine] |= marks
                if each.mask.remove:
                    removed[mine] |= marks
        return replace(spans, masked=masked, removed=removed if removed.any() else None)

    def served_tokens(self, documents: I64, source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        known: dict[int, ServedTokens] = {}
        pieces, is_sorted = [], len(self.stretches) > _COMPARED
        for each, first in zip(self.stretches, self._bounds[:-1].tolist(), strict=True):
            index = each.index
            if each.hole or source >= len(separates_documents(index)):
                continue
            if id(index) not in known:
                found = served_tokens(index, documents, source)
                # many stretches of an index take ranges of samples, sorted once for all
                order = np.argsort(found.sample, kind="stable") if is_sorted else slice(None)
                known[id(index)] = found.select(order)
            pieces.append(each.serve(known[id(index)], first, is_sorted=is_sorted))
        found = join_served(pieces)
        for removal in self.masks.get(source, ()):
            if removal.mask.remove:
                kept = found.sample < removal.first
                kept[~kept] = ~removal.marks(found.document[~kept])
                found = found.select(kept)
        return found

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        """Iterate over the positions that are served, each index in its fastest order."""
        for each, low, start, stop in self._between(begin, end):
            if each.hole:
                continue
            for places, spans in each.iterate_spans(start, stop, part, parts):
                positions = places + low
                yield positions, self._marked(positions, spans)

    def _between(self, begin: int, end: int) -> Iterator[tuple[Stretch, int, int, int]]:
        """Yield the stretches of a range of positions: first position, and range of places."""
        first = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        for number in range(first, len(self.stretches)):
            low, each = int(self._bounds[number]), self.stretches[number]
            if low >= end:
                break
            start, stop = max(begin - low, 0), min(end - low, each.num_samples)
            if start < stop:
                yield each, low, start, stop

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch of each source, see `megaindex.index.spans.epoch_sizes`.

        Of a source that several indices serve at one length, as after an extension, in the first.
        """
        found: EpochSizes = {}
        for index in self.bases:
            # the first index wins
            found = {**epoch_sizes(index), **found}
        return found

    def counts_by_length(self, begin: int, end: int) -> CountsByLength:
        """Return the samples of a range, see `megaindex.index.counts.counts_by_length`."""
        served = (each for each in self._between(begin, end) if not each[0].hole)
        return add_counts(each.counts_by_length(start, stop) for each, _, start, stop in served)

    def cursors(self, position: int) -> Cursors:
        """Return the next sample of each reading, see `megaindex.index.counts.cursors`.

        A reading that starts over stands at a sample of its current pass; moved samples, which are
        behind the end of a run with skips, move none.
        """
        moved = range(getattr(self.skips, "end", 0), getattr(self.skips, "run_end", 0))
        reached = {id(index): 0 for index in self.bases}
        for each, first, _, stop in self._between(0, position):
            end = int(each.samples[(stop - 1) % len(each.samples)]) + 1
            in_order = getattr(each.index, "least_seen", None)
            if not isinstance(each.samples, range) or (in_order is not None and end > in_order):
                raise InvalidArgument(
                    f"position {position} has no next samples: some before it are served in an "
                    "order of their own; end the run at an earlier one"
                )
            if end > 0 and first not in moved:  # nor of a past in another system
                reached[id(each.index)] = end
        found: Cursors = {}
        for index in self.bases:
            end = reached[id(index)]
            begun = draws_before(index, end)
            for reading, sample in cursors(index, end).items():
                if begun.get(reading) or reading not in found:
                    found[reading] = sample
        return found

    def _repr_html_(self) -> str:
        names = [f"samples of {index.sequence_length} tokens" for index in self.bases]
        return sources_html(repr(self), self.bases, names)


def sequence(indices: Sequence[Index], *, first: int = 0) -> Index:
    """Return the index of indices in a row; one alone without an offset is returned itself.

    Args:
        indices: the parts, at least one.
        first: positions before them, which another system served.
    """
    if len(indices) == 1 and not first:
        return indices[0]
    joined = f"lies before sample {first}, at which the run joined: another system served it"
    before = [Stretch(index=indices[0], samples=range(-first, 0), hole=joined)] if first else []
    parts = [Stretch(index=index, samples=range(index.num_samples)) for index in indices]
    return StretchedIndex(stretches=(*before, *parts))
