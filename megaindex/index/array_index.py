"""Index of Megatron's three arrays, checks of arrays of other programs, and inverse look-up.

Inverse look-up finds the samples that read given documents, in every order. Orders that are
computed invert their bijections; arrays, blends and stages are searched for the samples that
matter. Any other index is scanned. The result is that of a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, U32, IntArray
from megaindex.arithmetic import INT32_MAX, shuffle_dtype
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.documents import Documents, DocumentSubset
from megaindex.index.orders.framework import ShuffledOrder, StoredIndex
from megaindex.index.spans import (
    CHUNK,
    SCATTERED,
    Chunks,
    Index,
    Spans,
    check_sample_ids,
    iterate_in_order,
    iterate_spans,
    part_bounds,
    sequence_lengths_at,
)
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import active, num_threads

_SAMPLED_ROWS = 256


def check_arrays(
    order: ShuffledOrder,
    lengths: I32,
    document_index: IntArray,
    sample_index: IntArray,
    shuffle_index: IntArray,
) -> None:
    """Raise FormatError unless the arrays fit ``order`` and the sequence lengths.

    Checks shapes, dtypes, that both shuffles are complete, that rows increase within bounds, and
    the token count of up to 256 samples. The seed is not checked: framework file names include it.
    """
    samples, given = order.samples_built, (document_index, sample_index, shuffle_index)
    for array, (name, (shape, dtype)) in zip(given, order.arrays.items(), strict=True):
        if array.dtype != dtype or array.shape != shape:
            raise FormatError(
                f"{name} must be {dtype} of shape {shape}, got {array.dtype} of {array.shape}"
            )
    _check_documents(order, document_index)
    # a permutation has each value once; sorting it would take longer
    seen = np.zeros(samples, bool)
    if samples and int(shuffle_index.max()) < samples:
        seen[shuffle_index] = True
    if not seen.all():
        raise FormatError(f"shuffle_index must contain each of {samples} samples once")
    _check_rows(order, lengths, document_index, sample_index)


def _check_documents(order: ShuffledOrder, document_index: IntArray) -> None:
    documents = order.documents
    first, last = (
        (documents.start, documents.stop - 1)
        if isinstance(documents, range)
        else (int(documents.min()), int(documents.max()))
    )
    expected = np.bincount(np.asarray(documents) - first, minlength=last - first + 1)
    if document_index.min() >= first and document_index.max() <= last:
        times = np.bincount(document_index - first, minlength=last - first + 1)
        if np.array_equal(times, expected * order.num_epochs):
            return
    raise FormatError(
        f"document_index must contain each of {len(documents)} documents {order.num_epochs} times"
    )


def _check_ends(
    order: ShuffledOrder,
    lengths: I32,
    document_index: IntArray,
    position: IntArray,
    offset: IntArray,
) -> None:
    """Check that the last document of each complete sample has the tokens read from it."""
    if position.size == 0:
        return
    is_inside = int(position.max()) < document_index.size
    if not is_inside or np.any(offset > lengths[document_index[position]] - order.add_extra_token):
        raise FormatError(
            "sample_index has samples that end outside their last document: document lengths or "
            "add_extra_token differ from those it was built with"
        )


def _check_rows(
    order: ShuffledOrder, lengths: I32, document_index: IntArray, sample_index: IntArray
) -> None:
    position, offset = sample_index[:, 0], sample_index[:, 1]
    if position.min() < 0 or position.max() > document_index.size or offset.min() < 0:
        raise FormatError("sample_index has rows outside document_index")
    samples, size = order.samples_built, order.sequence_length
    whole = min(samples, (order.total_tokens - order.add_extra_token) // size)
    _check_ends(order, lengths, document_index, position[1 : whole + 1], offset[1 : whole + 1])
    if not rising_rows(sample_index[: whole + 1]).all():
        raise FormatError("sample_index must increase from row to row")
    # the sum of every sample would read the lengths once for each token cut
    rows = np.unique(np.linspace(0, max(whole - 1, 0), _SAMPLED_ROWS).astype(np.int64))
    for row in rows[rows < whole].tolist():
        (first, begin), (last, end) = sample_index[row : row + 2].tolist()
        between = int(lengths[document_index[first:last]].sum(dtype=np.int64))
        if first > last or between - begin + end != size:
            raise FormatError(
                f"sample {row} must have {size} tokens, got {between - begin + end}: document "
                "lengths differ from those it was built with"
            )


def rising_rows(sample_index: IntArray) -> npt.NDArray[np.bool_]:
    """Return bool[n - 1]: rows that point behind the previous row."""
    position, offset = sample_index[:, 0], sample_index[:, 1]
    farther = (position[1:] == position[:-1]) & (offset[1:] > offset[:-1])
    rising: npt.NDArray[np.bool_] = farther | (position[1:] > position[:-1])
    return rising


def _rows_at(begins: IntArray, places: I64) -> tuple[I64, I64]:
    """Return the number of ``begins`` below each place, and of those up to it, both sorted.

    Chunks of ``begins``, which may be a column, are copied and searched by several threads.
    """
    found = np.empty(places.size, np.int64), np.empty(places.size, np.int64)
    last = begins[_ROWS - 1 : begins.size - 1 : _ROWS]  # of each chunk but the last one
    bounds = [
        np.concatenate(([0], np.searchsorted(places, last, side), [places.size]))
        for side in ("right", "left")
    ]

    def find(chunk: int) -> None:
        rows = np.ascontiguousarray(begins[chunk * _ROWS : (chunk + 1) * _ROWS])
        for bound, out, side in zip(bounds, found, ("left", "right"), strict=True):
            those = slice(bound[chunk], bound[chunk + 1])
            wanted = places[those].astype(rows.dtype)  # else the longer one is converted
            out[those] = np.searchsorted(rows, wanted, side) + chunk * _ROWS  # type: ignore[call-overload]

    map_interruptibly(find, range(last.size + 1), num_threads())
    return found


_ROWS = 1 << 18  # rows searched at a time
_PLACED = 1 << 25  # samples whose positions are found at a time, 4 bytes each
_READ = 1 << 16  # entries of the shuffle read at a time
_NOWHERE = 2**32 - 1  # above every position of a shuffle of 32 bits


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ArrayIndex(StoredIndex):
    """Index of the frameworks' orders: document_index, sample_index and shuffle_index.

    Sample ``i`` of training is cut sample ``s = shuffle_index[i]`` of the concatenated documents
    ``document_index``, from row ``sample_index[s]`` to row ``sample_index[s + 1]`` (`GPTDataset` of
    megatron-core 0.16.1, ``GPT2Dataset`` of GPT-NeoX). The arrays are int32[num_epochs *
    documents], int32 or int64 [num_samples + 1, 2], and uint32 (int64 from 2**32 - 2 samples on)
    [num_samples].
    """

    cache_entry: str = ""
    """Path of the cache entry of the arrays; empty if they are only in memory."""
    request: ShuffledOrder | None = None
    """Request that the arrays were built for; None if another program may have written them."""

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Return the spans of samples; InvalidArgument if an array has a wrong entry."""
        return self._spans(self.shuffle_index, check_sample_ids(sample_ids, self.num_samples))

    def served_tokens(self, documents: I64, _source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        places = places_of(self.document_index, documents, self.sequence_lengths.size)
        low, high = _rows_at(self.sample_index[:, 0], places)
        # rows up to the last one that begins at a place, from the one that reaches it
        first = np.maximum(low - 1, 0)
        stop = np.minimum(high, len(self.sample_index) - 1)
        count = np.maximum(stop - first, 0)
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        cut = np.repeat(first, count) + within
        samples = places_of(self.shuffle_index, cut, len(self.sample_index) - 1)
        return served_in(self, samples, documents)

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        """Iterate in cutting order; InvalidArgument as `locate`, or if samples repeat."""
        samples = len(self.sample_index) - 1
        has_positions = self.shuffle_index.dtype == np.uint32
        if not has_positions or (end - begin) * SCATTERED < samples:
            yield from iterate_in_order(self, begin, end, part, parts)
            return
        first, stop = part_bounds(0, samples, part, parts)
        for low in range(first, stop, _PLACED):
            high = min(low + _PLACED, stop)
            positions = self._positions(begin, end, low, high)
            kept = None  # all
            if positions.size and positions.max() == _NOWHERE:
                kept = np.flatnonzero(positions != _NOWHERE).astype(np.uint32)
                positions = positions[kept]
                kept += np.uint32(low)
            for at in range(0, positions.size, CHUNK):
                served = positions[at : at + CHUNK].astype(np.int64)
                if kept is None:
                    cut = np.arange(low + at, low + at + served.size, dtype=np.uint32)
                else:
                    cut = kept[at : at + CHUNK]
                yield served, self._spans(cut, np.arange(cut.size))

    def _positions(self, begin: int, end: int, low: int, high: int) -> U32:
        """Return the positions of cut samples ``low`` to ``high - 1``, uint32[high - low].

        `_NOWHERE` stands for those outside positions ``begin`` to ``end - 1``.
        """
        samples, count = len(self.sample_index) - 1, 0
        positions = np.full(high - low, _NOWHERE, np.uint32)
        for at in range(begin, end, _READ):
            chunk = np.asarray(self.shuffle_index[at : min(at + _READ, end)])
            if (most := int(chunk.max())) >= samples:
                raise InvalidArgument(
                    f"shuffle_index: entry {at + int(chunk.argmax())} is {most}, sample_index "
                    f"holds {samples} samples; build the index again"
                )
            rows = chunk - np.uint32(low)  # those below wrap around
            places = np.flatnonzero(rows < high - low)
            positions[rows[places]] = places + at
            count += places.size
        if count != np.count_nonzero(positions != _NOWHERE):
            raise InvalidArgument(
                f"shuffle_index: samples {low} to {high - 1} repeat among its entries {begin} to "
                f"{end - 1}; build the index again"
            )
        return positions

    def _spans(self, shuffle_index: IntArray, ids: I64) -> Spans:
        runs = active().array_spans(
            shuffle_index,
            self.sample_index,
            self.document_index,
            self.sequence_lengths,
            self.add_extra_token,
            ids,
        )
        return Spans.of_one_source(*runs)


class OrderArrays(NamedTuple):
    """The samples of an index as Megatron's three arrays, see `ArrayIndex`."""

    document_index: I32
    """int32[n]: sequence ids. Documents that no sample reads are left out."""
    sample_index: IntArray
    """int32 or int64 [m + 1, 2]: rows between which the samples lie."""
    shuffle_index: IntArray
    """uint32 or int64 [num_samples]: row of each sample. Where a sample does not begin at the label
    of the one before, the row between them belongs to none."""
    short_samples: int
    """Samples of fewer than ``sequence_length + 1`` tokens, the rest of which is padding."""


def arrays_of(index: Index, lengths: I32, *, wide: bool = False) -> OrderArrays:
    """Return arrays from which a framework's reader serves the samples of an index.

    Args:
        index: an index of one dataset, of any order.
        lengths: sequence lengths of the dataset.
        wide: use int64 for sample_index also where int32 is enough.

    Raises:
        InvalidArgument: a sample is not a range of consecutive documents, or masks some of its
            loss; or the samples read no extra token for the label.
    """
    if index.add_extra_token != 1:
        raise InvalidArgument(
            "the samples of the index have no extra token for the label, which the readers of the "
            "frameworks add; build it with add_extra_token=1"
        )
    rows = _SampleIndexRows(index, lengths)
    for positions, spans in iterate_spans(index, 0, index.num_samples):
        rows.add(positions, spans)
    return rows.arrays(wide)


class _SampleIndexRows:
    """The arrays of an index, appended chunk by chunk."""

    def __init__(self, index: Index, lengths: I32) -> None:
        self._lengths, self._width = lengths, index.sequence_length + 1
        self._row_of = np.full(index.num_samples, -1, np.int64)
        self._documents: list[I32] = []
        self._rows: list[I64] = []
        self._num_documents = self._num_rows = self._short = 0
        self._end: tuple[int, int] | None = None  # document and offset of the last label

    def add(self, positions: I64, spans: Spans) -> None:
        """Append samples; one that begins at the label of the one before shares its row."""
        _check_ranges(positions, spans, self._lengths)
        splits = spans.row_splits
        first, last = splits[:-1], splits[1:] - 1
        labels = spans.offset[last] + spans.length[last] - 1
        ends = np.stack((spans.document[last], labels), axis=1)
        previous = np.concatenate(([self._end or (-1, -1)], ends[:-1]))
        joined = spans.document[first] == previous[:, 0]
        joined &= spans.offset[first] == previous[:, 1]
        # a joined sample begins in the last document of the one before
        begin = self._num_documents + first - np.cumsum(joined)
        broken = ~joined
        if self._end is None:
            broken[0] = False
        row = self._num_rows + np.arange(positions.size) + np.cumsum(broken)
        rows = np.empty((int(row[-1]) + 1 - self._num_rows, 2), np.int64)
        rows[row - self._num_rows, 0] = begin
        rows[row - self._num_rows, 1] = spans.offset[first]
        place = begin + (last - first)
        before = np.concatenate(([self._num_documents - 1], place[:-1]))
        rows[row[broken] - 1 - self._num_rows] = np.stack((before, previous[:, 1]), axis=1)[broken]
        kept = np.ones(len(spans), bool)
        kept[first[joined]] = False
        self._documents.append(spans.document[kept].astype(np.int32))
        self._rows.append(rows)
        self._row_of[positions] = row
        tokens = np.add.reduceat(spans.length, first)
        self._short += int(np.count_nonzero(tokens < self._width))
        self._num_documents += int(kept.sum())
        self._num_rows = int(row[-1]) + 1
        self._end = (int(ends[-1, 0]), int(ends[-1, 1]))

    def arrays(self, wide: bool) -> OrderArrays:
        if self._end is None or (self._row_of < 0).any():
            raise InvalidArgument("the index serves no samples, or leaves positions out")
        self._rows.append(np.array([[self._num_documents - 1, self._end[1]]], np.int64))
        narrow = self._num_documents <= INT32_MAX and not wide
        return OrderArrays(
            np.concatenate(self._documents),
            np.concatenate(self._rows, dtype=np.int32 if narrow else np.int64),
            self._row_of.astype(shuffle_dtype(self._num_rows)),
            self._short,
        )


def _check_ranges(positions: I64, spans: Spans, lengths: I32) -> None:
    """Raise InvalidArgument unless each sample is a range of the documents that it reads."""
    if spans.masked is not None and spans.masked.any():
        raise InvalidArgument(
            "some tokens carry no loss, which the arrays cannot say; leave the skips out"
        )
    is_first, is_last = np.zeros(len(spans), bool), np.zeros(len(spans), bool)
    is_first[spans.row_splits[:-1]] = is_last[spans.row_splits[1:] - 1] = True
    whole = spans.offset + spans.length == lengths[spans.document]
    wrong = np.flatnonzero(~((is_first | (spans.offset == 0)) & (is_last | whole)))
    if wrong.size:
        span = int(wrong[0])
        sample = int(positions[np.searchsorted(spans.row_splits, span, "right") - 1])
        begin = int(spans.offset[span])
        raise InvalidArgument(
            f"sample {sample} joins tokens {begin} to {begin + int(spans.length[span]) - 1} of "
            f"document {int(spans.document[span])} to other documents: the arrays have only ranges "
            "of whole documents, cut at both ends; use long_documents truncate or skip, or order "
            "epoch"
        )


_AT_ONCE = 1 << 16  # entries of an array
_LOCATED = 1 << 16  # samples


class ServedTokens(NamedTuple):
    """Tokens of documents that are input of samples, int64[n] each, in any order."""

    sample: I64
    document: I64
    """Sequence ids in the source."""
    offset: I64
    length: I64

    def select(self, which: IntArray | npt.NDArray[np.bool_] | slice) -> ServedTokens:
        """Return some of them."""
        return ServedTokens(*(column[which] for column in self))


@runtime_checkable
class InvertibleIndex(Protocol):
    """Index that finds the samples of documents without a scan."""

    def served_tokens(self, documents: I64, source: int, /) -> ServedTokens:
        """Return the input tokens of documents, sorted sequence ids of one source."""


def served_tokens(index: Index, documents: I64, source: int = 0) -> ServedTokens:
    """Return where an index reads documents of a source, sorted and distinct ids, as input."""
    if isinstance(index, InvertibleIndex):
        return index.served_tokens(documents, source)
    return scan(index, documents, source)


def scan(index: Index, documents: I64, source: int = 0) -> ServedTokens:
    """Return the same by reading every sample of the index."""
    chunks = iterate_spans(index, 0, index.num_samples)
    wanted = membership(documents)
    found = [_of_chunk(index, *chunk, wanted, source) for chunk in chunks]
    return join_served(found)


def served_in(index: Index, samples: I64, documents: I64, source: int = 0) -> ServedTokens:
    """Return the same for some samples only, each given once."""
    wanted = membership(documents)

    def find(first: int) -> ServedTokens:
        ids = samples[first : first + _LOCATED]
        return _of_chunk(index, ids, index.locate(ids), wanted, source)

    return join_served(map_interruptibly(find, range(0, samples.size, _LOCATED), num_threads()))


def _of_chunk(
    index: Index, positions: I64, spans: Spans, wanted: npt.NDArray[np.bool_], source: int
) -> ServedTokens:
    length = spans.input_lengths(sequence_lengths_at(index, positions))
    kept = (length > 0) & (spans.source == source) & contains(wanted, spans.document)
    sample = spans.per_span(positions)[kept]
    return ServedTokens(sample, spans.document[kept], spans.offset[kept], length[kept])


def join_blocks(find: Callable[[int], ServedTokens], blocks: int) -> ServedTokens:
    """Return what ``find`` finds in each block, such as an epoch, several of them at once."""
    return join_served(map_interruptibly(find, range(blocks), num_threads()))


def join_served(pieces: list[ServedTokens]) -> ServedTokens:
    """Return all in one."""
    nothing = np.empty(0, np.int64)
    pieces = [ServedTokens(nothing, nothing, nothing, nothing), *pieces]
    return ServedTokens(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def distinct(numbers: I64) -> I64:
    """Return the distinct numbers in rising order, for millions faster than `numpy.unique`."""
    ordered = np.sort(numbers)
    first = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def membership(numbers: I64, bound: int = 0) -> npt.NDArray[np.bool_]:
    """Return bool[max(bound, max + 1)]: True at these numbers, none negative."""
    member = np.zeros(max(bound, int(numbers.max(initial=-1)) + 1), bool)
    member[numbers] = True
    return member


def contains(member: npt.NDArray[np.bool_], numbers: IntArray) -> npt.NDArray[np.bool_]:
    """Return which numbers, none negative, are members."""
    if not member.size:
        return np.zeros(numbers.size, bool)
    inside = numbers < member.size
    found: npt.NDArray[np.bool_] = member[np.minimum(numbers, member.size - 1)] & inside
    return found


def places_of(array: IntArray, numbers: I64, bound: int) -> I64:
    """Return the places of an array, whose values lie in [0, bound), that hold any of the numbers.

    Numbers from ``bound`` on are in no place.
    """
    member = membership(numbers[numbers < bound], bound)
    bits = np.packbits(member, bitorder="little")  # which fit a cache

    def find(first: int) -> I64:
        chunk = np.asarray(array[first : first + _AT_ONCE])
        places = np.flatnonzero(bits.take(chunk >> 3))
        likely = chunk[places]
        found = bits.take(likely >> 3) >> (likely & 7).astype(np.uint8) & np.uint8(1)
        hits: I64 = places[found.view(bool)] + first
        return hits

    chunks = range(0, array.size, _AT_ONCE)
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *map_interruptibly(find, chunks, num_threads())])


def places_among(documents: Documents, ids: I64, num_sequences: int) -> I64:
    """Return the places of sequence ids among the documents of an epoch; others are left out."""
    if isinstance(documents, range):
        inside = (ids >= documents.start) & (ids < documents.stop)
        return ids[inside] - documents.start
    if isinstance(documents, DocumentSubset):
        return documents.places(ids)
    return places_of(documents, ids, num_sequences)


def serve(found: ServedTokens, samples: I64, positions: I64) -> ServedTokens:
    """Return tokens of an inner index at the positions that serve its samples.

    Args:
        found: tokens in samples of the inner index.
        samples: sample of the inner index at each position, any number of times.
        positions: of the outer index.
    """
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    by_sample = np.argsort(found.sample)  # neighbours are sought with one part of a cache
    keys, low, times = found.sample[by_sample], np.empty_like(by_sample), np.empty_like(by_sample)
    low[by_sample] = np.searchsorted(ordered, keys)
    times[by_sample] = np.searchsorted(ordered, keys, "right") - low[by_sample]
    which = np.repeat(np.arange(times.size), times)
    within = np.arange(which.size) - np.repeat(np.cumsum(times) - times, times)
    return found.select(which)._replace(sample=positions[order[low[which] + within]])


def cut_in_samples(begins: I64, lengths: I64, sequence_length: int) -> tuple[I64, I64, I64, I64]:
    """Cut runs of tokens where a sample of ``sequence_length`` tokens ends.

    Tokens 6 to 17 are, with samples of 8, in samples 0 to 2: 6 to 7, 8 to 15, 16 and 17.

    Returns:
        Number of the run, number of the sample, first token in the run, and tokens.
    """
    first = begins // sequence_length
    count = np.where(lengths > 0, (begins + lengths - 1) // sequence_length - first + 1, 0)
    run = np.repeat(np.arange(begins.size), count)
    sample = first[run] + np.arange(run.size) - np.repeat(np.cumsum(count) - count, count)
    begin, end = begins[run], (begins + lengths)[run]
    low = np.maximum(begin, sample * sequence_length)
    high = np.minimum(end, (sample + 1) * sequence_length)
    return run, sample, low - begin, high - low
