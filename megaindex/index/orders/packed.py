"""Order ``packed``: samples of whole documents, packed by best-fit decreasing.

What a bin holds follows from the histogram of document lengths alone (`Packing`). Which document
takes which place is decided in every epoch by a keyed permutation of the documents of each length,
and a keyed bijection orders the bins. Stored are the documents sorted by length, 4 bytes each; a
sample of any epoch is located by itself.

With ``align`` above 1 every piece begins at a multiple of it: lengths are counted in units of
``align`` tokens, rounded up, and packed as those of ``align`` 1 are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megaindex._types import I32, I64, IntArray
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import ServedTokens, join_blocks
from megaindex.index.frameworks import LONG_DOCUMENTS, LongDocuments
from megaindex.index.orders.framework import Sink
from megaindex.index.orders.keyed import Block, DocumentOrder
from megaindex.index.spans import Spans, check_range
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import active, num_threads

MOST_SEQUENCE_LENGTH = 2**24
_STRIDE = 64  # documents between two entries of sample_starts
_LOOKED_UP = 1 << 14  # documents whose pieces a thread finds at once
_FEWEST = 16
_SUMMED = 1 << 20  # lengths added at once

ARRAYS: Mapping[str, tuple[tuple[int | None, ...], str]] = {
    "piece_starts": ((None,), "int64"),
    "piece_documents": ((None,), "int32"),
    "sample_starts": ((None,), "int64"),
    "layers": ((None, 6), "int64"),
    "runs": ((None, 3), "int64"),
}
"""Shape and dtype of each array; None for a size that depends on the lengths."""


def most_documents(max_documents: int | None, sequence_length: int) -> int:
    """Return the most pieces of a sample; by default a 32nd of its tokens, at least 16."""
    return max_documents or max(_FEWEST, sequence_length // 32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Bins of one epoch, as far as the histogram of the lengths decides them."""

    counts: I64
    """int64[S / align + 1]: number of pieces of each length in units of ``align`` tokens; the last
    are those that fill a sample."""
    layers: I64
    """int64[n, 6], see `megaindex.kernels.reference.packing.pack_pieces`."""
    runs: I64
    """int64[m + 1, 3], see there."""
    input_tokens: int
    """Tokens of one epoch that are the input of a sample."""
    align: int = 1
    """Tokens of a unit: each piece begins at a multiple of it."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return int(self.runs[-1, 2])

    @property
    def sequence_length(self) -> int:
        return (self.counts.size - 1) * self.align

    @property
    def padding(self) -> int:
        """Positions of one epoch that no token fills."""
        return self.num_samples * self.sequence_length - self.input_tokens

    @cached_property
    def pieces(self) -> tuple[I64, I64]:
        """Numbers of pieces of a sample, int64[n] in rising order, and the samples with as many."""
        held = np.zeros(len(self.layers) + 1, np.int64)  # the last is that of no layer
        for number, (below, _, _, each, _, _) in enumerate(self.layers.tolist()):
            held[number] = held[below] + each
        pieces = held[self.runs[:-1, 0]]
        found, where = np.unique(pieces, return_inverse=True)
        samples = np.bincount(where, np.diff(self.runs[:, 2]), found.size)
        return found, samples.astype(np.int64)

    @cached_property
    def likeness(self) -> float:
        """Mean quotient of the shortest and the longest piece of a sample, of several pieces."""
        longest = np.ones(len(self.layers) + 1)
        for number, (below, _, length, *_) in enumerate(self.layers.tolist()):
            longest[number] = length if below < 0 else longest[below]
        last = self.runs[:-1, 0]
        several = (self.layers[last, 0] >= 0) | (self.layers[last, 3] > 1)
        samples = np.diff(self.runs[:, 2])[several]
        quotients = (self.layers[last, 2] / longest[last])[several]
        return float(quotients @ samples / samples.sum()) if samples.size else 1.0

    @property
    def rare_tokens(self) -> int:
        """Input tokens of pieces that share their length, in units, with at most one other.

        Epochs change least of what they share a sample with. In units above a token it counts the
        padding of these pieces too.
        """
        counts = self.counts[:-1]
        lengths = np.arange(counts.size) * self.align
        return min(self.input_tokens, int((lengths * counts)[counts <= 2].sum()))


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How documents are cut into the pieces that are packed."""

    sequence_length: int
    long_documents: LongDocuments = "split"
    align: int = 1
    """Tokens of a unit; ``sequence_length`` is a multiple of it."""

    def __post_init__(self) -> None:
        check_align(self.align, self.sequence_length)
        if self.sequence_length > MOST_SEQUENCE_LENGTH:
            raise InvalidArgument(
                f"sequence_length must be at most {MOST_SEQUENCE_LENGTH} in order packed, got "
                f"{self.sequence_length}; lower it or use another order"
            )

    @property
    def capacity(self) -> int:
        """Units of a sample."""
        return self.sequence_length // self.align

    @property
    def rule(self) -> int:
        """Number of ``long_documents`` in the kernels."""
        return LONG_DOCUMENTS.index(self.long_documents)

    def units(self, lengths: IntArray) -> IntArray:
        """Return lengths in units, rounded up; a negative one, which kernels refuse, as it is."""
        if self.align == 1:
            return lengths
        units: IntArray = np.minimum(-(-lengths // self.align), lengths)
        return units

    def used(self, lengths: IntArray) -> I64:
        """Return the tokens of documents that are placed, int64[n]."""
        used = lengths.astype(np.int64)
        if self.long_documents == "truncate":
            return np.minimum(used, self.sequence_length)
        skips = self.long_documents == "skip"
        return np.where(used > self.sequence_length, 0, used) if skips else used

    def count(self, lengths: I32) -> I64:
        """Return the number of pieces of each length in units, int64[capacity + 1]."""
        return active().count_pieces(self.units(lengths), self.capacity, self.rule, num_threads())

    def pack(self, counts: I64, input_tokens: int, max_documents: int | None) -> Packing:
        """Return the packing of pieces; InvalidArgument for 0 pieces.

        Args:
            counts: the result of `count` or `count_histogram`.
            input_tokens: tokens of these pieces.
            max_documents: see `most_documents`.
        """
        if not counts.any():
            raise InvalidArgument(
                "no document gives a sample: a document must have at least one token and, with "
                f"long_documents skip, at most {self.sequence_length}; change the documents or the "
                "rule"
            )
        limit = most_documents(max_documents, self.sequence_length)
        layers, runs = active().pack_pieces(counts, limit, 1, True)
        return Packing(
            counts=counts, layers=layers, runs=runs, input_tokens=input_tokens, align=self.align
        )

    def pack_lengths(self, lengths: I32, max_documents: int | None) -> Packing:
        """Return the packing of documents of these lengths."""
        counts = self.count(lengths)
        return self.pack(counts, self.tokens_of(counts, lengths), max_documents)

    def tokens_of(self, counts: I64, lengths: I32) -> int:
        """Return the tokens of the pieces, which their counts hold where a unit is a token."""
        if self.align == 1:
            return int(counts @ np.arange(counts.size))
        return self.tokens(lengths)

    def tokens(self, lengths: IntArray, documents: I64 | None = None) -> int:
        """Return the tokens of documents that are placed, of ``documents[k]`` of each length."""
        total = 0
        for first in range(0, lengths.size, _SUMMED):
            used = self.used(lengths[first : first + _SUMMED])
            times = 1 if documents is None else documents[first : first + _SUMMED]
            total += int((used * times).sum())
        return total

    def pack_histogram(self, lengths: I64, documents: I64, max_documents: int | None) -> Packing:
        """Return the packing of ``documents[k]`` documents of ``lengths[k]`` tokens each."""
        units = self.units(self.used(lengths))
        counts = np.zeros(self.capacity + 1, np.int64)
        counts[-1] = (units // self.capacity * documents).sum()
        np.add.at(counts[:-1], units % self.capacity, documents)
        counts[0] = 0
        return self.pack(counts, self.tokens(lengths, documents), max_documents)


def check_align(align: int, sequence_length: int) -> None:
    """Raise InvalidArgument unless ``sequence_length`` is a multiple of ``align``."""
    if align < 1 or sequence_length % align:
        raise InvalidArgument(
            f"align must be at least 1 and divide the sequence length {sequence_length}, got "
            f"{align}; it is 2 x the context-parallel size, or a multiple of that"
        )


def build(lengths: I32, cutting: Cutting, max_documents: int | None, sink: Sink) -> None:
    """Fill the arrays of `ARRAYS` in ``sink``, for documents of these lengths."""
    packing = cutting.pack_lengths(lengths, max_documents)
    counts = packing.counts
    arrays: dict[str, IntArray] = {
        "piece_starts": np.concatenate(([0], np.cumsum(counts[:-1]))),
        "layers": packing.layers,
        "runs": packing.runs,
    }
    for name, array in arrays.items():
        sink.allocate(name, array.shape, "int64")[:] = array
        sink.seal(name)
    documents = sink.allocate("piece_documents", (int(counts[:-1].sum()),), "int32")
    starts = sink.allocate("sample_starts", (ceil_div(lengths.size, _STRIDE) + 1,), "int64")
    active().sort_pieces(
        cutting.units(lengths), cutting.capacity, cutting.rule, counts, documents, starts,
        num_threads(),
    )  # fmt: skip
    sink.seal("piece_documents")
    sink.seal("sample_starts")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedIndex(DocumentOrder):
    """Index of order packed. Samples may be shorter than ``sequence_length``: the rest is padding.

    A whole sample of a document that goes on reads one more token, for its last label. The label of
    the last token of a document carries no loss; `megaindex.loader` masks it.
    """

    arrays: Mapping[str, IntArray]
    """Arrays of `ARRAYS`, built by `build` or mapped from the cache."""
    max_documents: int
    """Most pieces of documents in a sample, see `most_documents`."""
    long_documents: LongDocuments = "split"
    align: int = 1
    order: Literal["packed"] = field(default="packed", init=False)

    @property
    def samples_per_epoch(self) -> int:
        return int(self.arrays["runs"][-1, 2])

    @cached_property
    def packing(self) -> Packing:
        """Facts about the bins of an epoch: padding, pieces a sample."""
        counts = np.diff(self.arrays["piece_starts"], append=0)
        # whole samples have no pieces of their own; their number ends `sample_starts`
        counts[-1] = self.arrays["sample_starts"][-1]
        return Packing(
            counts=counts,
            layers=self.arrays["layers"],
            runs=self.arrays["runs"],
            input_tokens=self._cutting.tokens_of(counts, self._lengths),
            align=self.align,
        )

    @cached_property
    def _cutting(self) -> Cutting:
        return Cutting(
            sequence_length=self.sequence_length,
            long_documents=self.long_documents,
            align=self.align,
        )

    @cached_property
    def _units(self) -> I32:
        """Lengths of the documents in units."""
        return self._cutting.units(self._lengths)

    @property
    def cut_tokens(self) -> int:
        """Tokens of the documents that are in no sample, because they are truncated or skipped."""
        return self.tokens_per_epoch - self.packing.input_tokens

    @property
    def num_long_documents(self) -> int:
        """Documents longer than a sample, which are split, truncated or skipped."""
        return int(np.count_nonzero(self._lengths > self.sequence_length))

    @property
    def tokens_left_over(self) -> int:
        """Number of tokens of all epochs that no sample has as input."""
        return self.num_epochs * self.cut_tokens

    def count_inputs(self, begin: int, end: int) -> int:
        """Return the input tokens of samples ``begin`` to ``end - 1``.

        Samples of complete epochs are not located.
        """
        begin, end = check_range(self, begin, end)
        size, total = self.samples_per_epoch, 0
        while begin < end:
            first = begin - begin % size
            stop = min(end, first + size)
            if stop - begin == size:
                epochs = (end - begin) // size
                total += epochs * self.packing.input_tokens
                stop = begin + epochs * size
            # the smaller part of the epoch is located, the rest subtracted
            elif 2 * (stop - begin) <= size:
                total += self._locate_inputs(begin, stop)
            else:
                others = self._locate_inputs(first, begin) + self._locate_inputs(stop, first + size)
                total += self.packing.input_tokens - others
            begin = stop
        return total

    def _locate_inputs(self, begin: int, end: int) -> int:
        return sum(
            int(spans.input_lengths(self.sequence_length).sum())
            for _, spans in self.iterate_spans(begin, end, part=0, parts=1)
        )

    def _cut(self, block: Block, numbers: I64) -> Spans:
        arrays: Any = self.arrays
        local, offset, length, splits = active().packed_spans(
            self._document_key(block.number),
            self._units,
            self._cutting.rule,
            # a kernel that counts units cannot add a token; `_aligned` does
            self.add_extra_token if self.align == 1 else 0,
            arrays["piece_starts"],
            arrays["piece_documents"],
            arrays["sample_starts"],
            arrays["layers"],
            arrays["runs"],
            numbers,
        )
        if self.align == 1:
            return Spans.of_one_source(self._sequence_ids(local), offset, length, splits)
        return self._aligned(local, offset, length, splits)

    def _aligned(self, local: I64, offset: I64, length: I64, splits: I64) -> Spans:
        """Return the spans of pieces whose offset and length are counted in units."""
        offset, width = offset * self.align, length * self.align
        whole = self._lengths[local].astype(np.int64)
        tokens = np.minimum(width, self._cutting.used(whole) - offset)
        goes_on = (width == self.sequence_length) & (offset + width < whole)
        tokens += self.add_extra_token * goes_on
        filled = np.cumsum(width - tokens) - (width - tokens)
        padding = filled - np.repeat(filled[splits[:-1]], np.diff(splits))
        spans = Spans.of_one_source(self._sequence_ids(local), offset, tokens, splits)
        return replace(spans, padding=padding)

    def served_tokens(self, documents: I64, _source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        arrays: Any = self.arrays
        places = self._places_of(documents)
        pieces = map_interruptibly(
            lambda first: self._pieces(places[first : first + _LOOKED_UP]),
            range(0, max(1, places.size), _LOOKED_UP),
            num_threads(),
        )
        place, offset, units, rank = map(np.concatenate, zip(*pieces, strict=True))
        used = self._cutting.used(self._lengths[place])
        length = np.minimum(units * self.align, used - offset)
        served = ServedTokens(rank, self._sequence_ids(place), offset, length)
        # epochs are searched side by side, each with its share of the threads
        threads = max(1, num_threads() // self.num_epochs)

        def find(epoch: int) -> ServedTokens:
            bins = active().packed_bins(
                self._document_key(epoch),
                arrays["piece_starts"],
                arrays["layers"],
                arrays["runs"],
                units,
                rank,
                threads,
            )
            return served._replace(sample=self._serving_order(epoch, bins))

        return join_blocks(find, self.num_epochs)

    def _pieces(self, places: I64) -> tuple[I64, I64, I64, I64]:
        """Return the pieces of documents: document, offset, length in units, and number among
        those of its length."""
        size = self._cutting.capacity
        used = self._used_units(self._lengths[places])
        whole, rest = np.divmod(used, size)
        last = rest > 0
        run = np.repeat(np.arange(places.size), whole)
        part = np.arange(run.size) - np.repeat(np.cumsum(whole) - whole, whole)
        long = np.flatnonzero(whole)
        before = np.zeros(places.size, np.int64)
        before[long] = self._whole_before(places[long])
        return (
            np.concatenate((places[run], places[last])),
            np.concatenate((part * size, (used - rest)[last])) * self.align,
            np.concatenate((np.full(run.size, size), rest[last])),
            np.concatenate((before[run] + part, self._numbers(places[last], rest[last]))),
        )

    def _used_units(self, lengths: I32) -> I64:
        used: I64 = self._cutting.units(self._cutting.used(lengths))
        return used

    def _whole_before(self, places: I64) -> I64:
        """Return the number of whole samples of all documents before each of these."""
        row = places // _STRIDE
        near = row[:, None] * _STRIDE + np.arange(_STRIDE)
        before = near < places[:, None]
        lengths = self._lengths[np.where(before, near, 0)]
        whole = np.where(before, self._used_units(lengths) // self._cutting.capacity, 0)
        found: I64 = self.arrays["sample_starts"][row] + whole.sum(axis=1)
        return found

    def _numbers(self, places: I64, lengths: I64) -> I64:
        """Return the number of each piece among those of its length, in document order."""
        starts, documents = self.arrays["piece_starts"], self.arrays["piece_documents"]
        low = starts[lengths].astype(np.int64)
        high = starts[lengths + 1].astype(np.int64)
        begin = low
        while (low < high).any():  # bisect for all pieces together
            middle = (low + high) // 2
            # a finished search may stand behind the last document
            right = documents[np.minimum(middle, documents.size - 1)] < places
            right &= low < high
            low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
        return low - begin
