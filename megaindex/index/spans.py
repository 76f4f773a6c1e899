"""Interface of every index, the spans it returns, and iteration in its fastest order.

Receipts and counts are sums and do not depend on the order of iteration. An index may therefore
iterate over its samples in the order in which they were cut, which reads memory sequentially.
Labels and reference values, one for each token of a text, are datasets of their own that are cut
at the same spans.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, IntArray
from megaindex.arithmetic import ceil_div
from megaindex.errors import FormatError, InvalidArgument, OutOfRange
from megaindex.index.exposures import PassRuns, join_runs, runs_of_size
from megaindex.markup import html_table
from megaindex.validation import check_integer, count_of, shown

if TYPE_CHECKING:
    from megaindex.format import IndexedDataset


@dataclass(frozen=True, eq=False)
class Spans:
    """Token ranges of samples, in reading order.

    Span ``i`` is the non-empty range of ``length[i]`` tokens at ``offset[i]`` of sequence
    ``document[i]`` in source ``source[i]``. The spans of the k-th requested sample are
    ``row_splits[k]:row_splits[k + 1]``. Unpacks as ``source, document, offset, length``.

    Attributes:
        source (int32[n]): number of the source; 0 for an index of one source.
        document (int64[n]): sequence id in the source.
        offset (int64[n]): first token, counted from the start of the sequence.
        length (int64[n]): number of tokens, at least 1.
        row_splits (int64[samples + 1]): first span of each sample, and the number of spans.
        masked (bool[n]): True for spans whose tokens carry no loss as labels, see `megaindex.Skip`;
            None if every token of the index carries loss.
        padding (int64[n]): tokens of padding in its row before each span, those before earlier
            spans included; None without any.
        removed (bool[n]): True for masked spans whose places are padding: their tokens are neither
            inputs nor labels; None without any.
    """

    source: I32
    document: I64
    offset: I64
    length: I64
    row_splits: I64
    masked: npt.NDArray[np.bool_] | None = None
    padding: I64 | None = None
    removed: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of_one_source(cls, document: I64, offset: I64, length: I64, row_splits: I64) -> Spans:
        """Return spans of source 0."""
        return cls(np.zeros(document.size, np.int32), document, offset, length, row_splits)

    def __iter__(self) -> Iterator[IntArray]:
        return iter((self.source, self.document, self.offset, self.length))

    def __len__(self) -> int:
        return int(self.document.size)

    def input_lengths(self, sequence_length: int | I64) -> I64:
        """Return the number of input tokens of each span, int64[n].

        The first ``sequence_length`` tokens of a sample are input, a number for all samples or one
        for each; a further token is only a label.
        With ``sequence_length=8``, spans of 3 and 6 tokens in one sample have 3 and 5 input tokens.
        """
        begins, _ = self.bounds_in_samples()
        if isinstance(sequence_length, np.ndarray):
            sequence_length = self.per_span(sequence_length)
        return np.asarray(np.clip(sequence_length - begins, 0, self.length), np.int64)

    def covered(self, width: int) -> npt.NDArray[np.bool_]:
        """Return bool[samples, width]: True where a row has a token of a span."""
        if self.padding is None:
            tokens = np.diff(np.concatenate(([0], np.cumsum(self.length)))[self.row_splits])
            return np.asarray(np.arange(width) < tokens[:, None])
        return self.ranges(*self.bounds_in_samples(), width)

    def tokens_removed(self, width: int) -> npt.NDArray[np.bool_]:
        """Return bool[samples, width]: True where a row has a token of a removed span."""
        assert self.removed is not None, "the samples have removed spans"
        return self.ranges(*self.bounds_in_samples(), width, self.removed)

    def ranges(
        self,
        begins: I64,
        ends: I64,
        width: int,
        chosen: npt.NDArray[np.bool_] | slice = slice(None),
    ) -> npt.NDArray[np.bool_]:
        """Return bool[samples, width]: True at places ``begins`` to ``ends - 1`` in rows.

        Args:
            begins, ends: int64[n], a range of each span, clipped to the row.
            chosen: the spans whose ranges count.
        """
        edges = np.zeros((self.row_splits.size - 1, width + 1), np.int8)
        for sign, places in ((1, begins), (-1, ends)):
            at = np.clip(places[chosen], 0, width)
            # not `+=`, which would add once where two spans share an edge
            np.add.at(edges, (self.rows[chosen], at), sign)
        return np.asarray(np.cumsum(edges[:, :width], axis=1, dtype=np.int8) > 0)

    @property
    def rows(self) -> I64:
        """int64[n]: number of the sample of each span."""
        return self.per_span(np.arange(self.row_splits.size - 1))

    def per_span(self, values: I64) -> I64:
        """Return values of the samples, int64[samples], for each span."""
        return np.repeat(values, np.diff(self.row_splits))

    def bounds_in_samples(self) -> tuple[I64, I64]:
        """Return the places in its row at which each span begins and ends, int64[n] each."""
        ends = np.cumsum(self.length)
        # tokens of all rows before each row: sums over all spans start at 0 in each
        before = np.concatenate(([0], ends))[self.row_splits[:-1]]
        ends -= self.per_span(before)
        if self.padding is not None:
            ends += self.padding
        return ends - self.length, ends


@runtime_checkable
class Index(Protocol):
    """Interface of an index: the samples of a run and the tokens that each of them reads.

    Planner, loader, receipts and audit use only this interface. The indices of megaindex also have
    ``len``, their number of samples, and ``datasets``, the dataset of each source, which `Loader`
    reads by default. ``isinstance(index, megaindex.Index)`` is True for any class with the members.
    """

    @property
    def num_samples(self) -> int:
        """Number of samples; ids 0 to ``num_samples - 1`` are in the order of training."""

    @property
    def num_epochs(self) -> int:
        """Number of epochs that the index was built for."""

    @property
    def tokens_per_epoch(self) -> int:
        """Number of tokens of the selected documents, each counted once."""

    @property
    def sequence_length(self) -> int:
        """Number of input tokens per sample."""

    @property
    def add_extra_token(self) -> int:
        """1 if a sample reads one more token for the shifted label, else 0."""

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Return the spans that samples read, including the extra token.

        Args:
            sample_ids: integer or int[n], each from 0 to ``num_samples - 1``, in any order.

        Raises:
            OutOfRange: an id is outside that range.
        """
        ...


def check_index(index: object) -> None:
    """Raise InvalidArgument unless an object has the members of `Index`."""
    members = [name for name in vars(Index) if not name.startswith("_")]
    missing = [name for name in members if not hasattr(index, name)]
    if missing:
        raise InvalidArgument(
            f"index must have the members of megaindex.Index, {', '.join(members)}; a "
            f"{type(index).__name__} has no {', '.join(missing)}"
        )


_SHOWN_PATHS = 3


class ShownIndex:
    """Base class of the indices, with their length and their text."""

    def __len__(self: Any) -> int:
        """Return the number of samples."""
        return int(self.num_samples)

    def __repr__(self: Any) -> str:
        """Return one line: samples, epochs and sources."""
        order, epochs = getattr(self, "order", ""), self.num_epochs
        paths = self._paths
        more = f" and {len(paths) - _SHOWN_PATHS} more" * (len(paths) > _SHOWN_PATHS)
        facts = [
            *([f"order {order}"] if order else []),
            f"{self.num_samples:,} samples of {self.sequence_length} tokens",
            f"{count_of(epochs, 'epoch')} of {self.tokens_per_epoch:,} tokens",
            *([", ".join(map(repr, paths[:_SHOWN_PATHS])) + more] if paths else []),
        ]
        return f"{type(self).__name__}({', '.join(facts)})"

    @property
    def separates_documents(self: Any) -> tuple[bool, ...]:
        """Whether no label lies in another document, for each source."""
        return (getattr(self, "order", "") == "packed",)

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch, see `epoch_sizes`; by volume, as frameworks cut them."""
        return _volume(self)

    def counts_by_length(self: Any, begin: int, end: int) -> dict[int, I64]:
        """Return the samples of a range, see `megaindex.index.counts.counts_by_length`."""
        return {self.sequence_length: np.array([end - begin], np.int64)}

    def origin(self: Any, sample_ids: npt.ArrayLike) -> tuple[I64, I64]:
        """Return the source and the sample of that source of each sample, int64[n] each."""
        ids = check_sample_ids(sample_ids, self.num_samples)
        return np.zeros_like(ids), ids

    @property
    def is_one_order(self) -> bool:
        """True if the index has the order of one source, not draws of several."""
        return not isinstance(self, CombinedIndex)

    @property
    def pass_counts(self: Any) -> I64:
        """int64[sources]: number of passes of each source."""
        return np.array([self.num_epochs], np.int64)

    @cached_property
    def pass_runs(self: Any) -> PassRuns:
        """The samples in runs of one pass, by `pass_numbers`."""
        size = self.epoch_sizes()[0, self.sequence_length]
        return runs_of_size(size, self.num_epochs, self.num_samples)

    def pass_numbers(self, sample_ids: I64) -> I64:
        """Return the number of each sample in `pass_runs`, int64[n]: of one source, its id.

        Sample id -1 gives any number.
        """
        return sample_ids

    def __getstate__(self) -> dict[str, Any]:
        """Return `uncached_state`; a copy opens its datasets on first use, from any directory."""
        state = uncached_state(self)
        if state.get("datasets"):
            # mappings cannot be pickled, and a worker may never read most of them
            state["datasets"] = [dataset.lazy_arguments() for dataset in state["datasets"]]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("datasets"):
            from megaindex.format import IndexedDataset

            datasets = (
                IndexedDataset.lazy(path, identity, **options)
                for path, identity, options in state["datasets"]
            )
            state = {**state, "datasets": tuple(datasets)}
        vars(self).update(state)

    @property
    def _paths(self: Any) -> list[str]:
        return [dataset.path_prefix for dataset in datasets_of(self)]


def uncached_state(instance: object) -> dict[str, Any]:
    """Return the attributes of an instance without the values of its cached properties."""
    kind = type(instance)
    return {
        name: value
        for name, value in vars(instance).items()
        if not isinstance(getattr(kind, name, None), cached_property)
    }


class CombinedIndex(ShownIndex):
    """Base class of the indices over other indices, which have the same sequence length."""

    @property
    def _combined(self) -> tuple[Index, ...]:
        """The other indices, at least one; their sources together are those of this index."""
        raise NotImplementedError

    @property
    def num_epochs(self) -> int:
        return max(index.num_epochs for index in self._combined)

    @property
    def tokens_per_epoch(self) -> int:
        return sum(index.tokens_per_epoch for index in self._combined)

    @property
    def sequence_length(self) -> int:
        return self._combined[0].sequence_length

    @property
    def add_extra_token(self) -> int:
        return self._combined[0].add_extra_token

    @cached_property
    def separates_documents(self) -> tuple[bool, ...]:
        """Whether no label lies in another document, for each source."""
        return tuple(each for index in self._combined for each in separates_documents(index))

    @property
    def pass_counts(self) -> I64:
        """int64[sources]: number of passes of each source."""
        return np.concatenate([pass_counts(index) for index in self._combined])

    @cached_property
    def pass_runs(self) -> PassRuns:
        """The samples of all sources, one source after another, in runs of one pass."""
        return join_runs(pass_runs(index) for index in self._combined)

    @cached_property
    def _first_samples(self) -> I64:
        """int64[sources]: samples of the sources before each."""
        counts = [index.num_samples for index in self._combined]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)

    def pass_numbers(self: Any, sample_ids: I64) -> I64:
        """Return the number of each sample among those of all sources, int64[n]."""
        source, sample = self.origin(np.maximum(sample_ids, 0))
        numbers: I64 = self._first_samples[source]
        numbers += sample
        return numbers

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch of each source, see `epoch_sizes`."""
        return {
            (number, length): size
            for number, index in enumerate(self._combined)
            for (_, length), size in epoch_sizes(index).items()
        }

    def _repr_html_(self) -> str:
        return sources_html(repr(self), self._combined, self._paths)


EpochSizes: TypeAlias = dict[tuple[int, int], Fraction]
"""Samples of an epoch, by number of the source and sequence length."""


def epoch_sizes(index: Index) -> EpochSizes:
    """Return the samples of an epoch of each source at each sequence length.

    They are the mean where epochs are cut together or mixed, and those of the first epoch in order
    blocks.
    """
    return index.epoch_sizes() if isinstance(index, ShownIndex) else _volume(index)


def _volume(index: Any) -> EpochSizes:
    return {(0, index.sequence_length): Fraction(index.tokens_per_epoch, index.sequence_length)}


def pass_runs(index: Index) -> PassRuns:
    """Return the samples of an index in runs of one pass, see `ShownIndex.pass_runs`.

    Raises:
        InvalidArgument: the index does not know them, or a source has too many passes.
    """
    if not isinstance(index, ShownIndex):
        raise InvalidArgument(
            f"keys: {shown(index)} of type {type(index).__name__} does not know the passes of its "
            "samples; use an index of megaindex.build_index, build_blend or a recipe"
        )
    return index.pass_runs


def pass_counts(index: Index) -> I64:
    """Return int64[sources], the number of passes of each source of an index."""
    if isinstance(index, ShownIndex):
        return index.pass_counts
    return np.array([index.num_epochs], np.int64)


def later_runs(index: Index, first_passes: I64) -> PassRuns:
    """Return the `pass_runs` of an index after so many passes of each source, int64[sources]."""
    runs = pass_runs(index)
    if not first_passes.any():
        return runs
    if isinstance(index, ShownIndex) and index.is_one_order:
        return runs.later(first_passes)
    assert isinstance(index, CombinedIndex), "several sources"
    return runs.later(first_passes[np.searchsorted(index._first_samples, runs.starts, "right") - 1])


def exposures_of(index: Index, sample_ids: I64) -> I64:
    """Return the exposure of samples that exist, int64[n], see `megaindex.index.exposures`.

    Raises:
        InvalidArgument: as `pass_runs`.
    """
    return pass_runs(index).at(pass_numbers(index, sample_ids))


def pass_numbers(index: Index, sample_ids: I64) -> I64:
    """Return the numbers of samples in the `pass_runs` of an index that has them."""
    return index.pass_numbers(sample_ids) if isinstance(index, ShownIndex) else sample_ids


def sources_of(index: Index) -> tuple[Index, ...]:
    """Return the index of each source of an index."""
    if not isinstance(index, CombinedIndex):
        return (index,)
    return tuple(each for part in index._combined for each in sources_of(part))


def alignments(index: Index) -> set[int]:
    """Return the multiples of tokens at which documents begin in rows, 1 for any place."""
    return {getattr(source, "align", 1) for source in sources_of(index)}


def datasets_of(index: Any) -> tuple[IndexedDataset, ...]:
    """Return the dataset of each source of an index; empty if the index does not hold them."""
    return tuple(getattr(index, "datasets", ()))


def separates_documents(index: Any) -> tuple[bool, ...]:
    """Return for each source of an index whether no label lies in another document (order packed).

    One entry for an index of one source.
    """
    found: tuple[bool, ...] = getattr(index, "separates_documents", (False,))
    return found


def sources_html(name: str, indices: Sequence[Any], paths: Sequence[str]) -> str:
    """Return a table of the sources of an index, in HTML."""
    numbers = ("num_samples", "num_epochs", "tokens_per_epoch")
    rows = [
        [path, *(f"{getattr(index, number):,}" for number in numbers)]
        for index, path in zip(indices, paths or [""] * len(indices), strict=True)
    ]
    heads = ["source", "samples built", "epochs", "tokens an epoch"]
    return html_table(heads, rows, labels=1, caption=name)


def sequence_lengths_at(index: Any, sample_ids: I64) -> int | I64:
    """Return the input tokens of samples: one number, or int64[n] if the index has several."""
    find = getattr(index, "sequence_lengths_at", None)
    lengths: int | I64 = index.sequence_length if find is None else find(sample_ids)
    return lengths


_BOOLS = {bool, np.bool_}  # NumPy makes 1 of True beside integers


def check_sample_ids(sample_ids: npt.ArrayLike, num_samples: int) -> I64:
    """Return the ids as int64[n]; OutOfRange unless each is from 0 to ``num_samples - 1``."""
    # Datasets request one sample at a time; comparing in NumPy would take longer than the kernel.
    if isinstance(sample_ids, list) and len(sample_ids) == 1:
        only: Any = sample_ids[0]
        if type(only) is int and 0 <= only < num_samples:
            return np.array(sample_ids, np.int64)
    if isinstance(sample_ids, (list, tuple)) and _BOOLS.intersection(map(type, sample_ids)):
        raise OutOfRange(
            f"sample ids must be integers, got a bool in {reprlib.repr(sample_ids)}; give the "
            "numbers of samples"
        )
    ids = np.asarray(sample_ids)
    if ids.ndim == 0:
        ids = ids.reshape(1)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise OutOfRange(
            f"sample ids must be integers in one dimension, got {ids.dtype} of shape {ids.shape}"
        )
    few = ids.tolist() if ids.size <= 8 else (ids.min(), ids.max())
    if few and not 0 <= min(few) <= max(few) < num_samples:
        wrong = ids[(ids < 0) | (ids >= num_samples)]
        raise OutOfRange(
            f"sample {int(wrong[0])} does not exist, the index holds samples 0 to "
            f"{num_samples - 1}; request one of them or build an index with more"
        )
    return ids.astype(np.int64)


PADDING = -1
"""Sample id of a row of padding."""


def locate_rows(index: Index, sample_ids: I64) -> Spans:
    """Return the spans of samples; id -1, a row of padding, has none.

    Raises:
        OutOfRange: the index does not hold another id.
    """
    real = sample_ids != PADDING
    spans = index.locate(sample_ids[real])
    counts = np.zeros(sample_ids.size, np.int64)
    counts[real] = np.diff(spans.row_splits)
    return replace(spans, row_splits=np.concatenate(([0], np.cumsum(counts))))


def locate_each(indices: Sequence[Index], source: I64, sample: I64) -> Spans:
    """Return the spans of sample ``sample[k]`` of ``indices[source[k]]``, int64[n] each;
    InvalidArgument for a source that does not exist."""
    check_sources(source, len(indices))
    pieces = []
    for number in np.unique(source).tolist():
        places = np.flatnonzero(source == number)
        spans = indices[number].locate(sample[places])
        numbered = replace(spans, source=np.full(len(spans), number, np.int32))
        pieces.append((places, numbered))
    return join_spans(pieces, source.size)


def check_sources(dataset_index: IntArray, num_sources: int) -> None:
    """Raise InvalidArgument unless each entry is the number of a source."""
    if not dataset_index.size:
        return
    low, high = int(dataset_index.min()), int(dataset_index.max())
    if low < 0 or high >= num_sources:
        raise InvalidArgument(
            f"dataset_index: an entry is {low if low < 0 else high}, the blend has sources 0 to "
            f"{num_sources - 1}; build it again"
        )


def join_spans(pieces: Sequence[tuple[I64, Spans]], num_samples: int) -> Spans:
    """Return spans of samples 0 to ``num_samples - 1`` from (sample numbers, spans) pieces."""
    is_padded = any(spans.padding is not None for _, spans in pieces)
    counts = np.zeros(num_samples, np.int64)
    for places, spans in pieces:
        counts[places] = np.diff(spans.row_splits)
    splits = np.concatenate(([0], np.cumsum(counts)))
    whole = Spans(
        source=np.empty(splits[-1], np.int32),
        document=np.empty(splits[-1], np.int64),
        offset=np.empty(splits[-1], np.int64),
        length=np.empty(splits[-1], np.int64),
        row_splits=splits,
        padding=np.zeros(splits[-1], np.int64) if is_padded else None,
    )
    for places, spans in pieces:
        shift = np.repeat(splits[places] - spans.row_splits[:-1], counts[places])
        rows = np.arange(len(spans)) + shift
        for target, part in zip(whole, spans, strict=True):
            target[rows] = part
        if whole.padding is not None and spans.padding is not None:
            whole.padding[rows] = spans.padding
    return whole


CHUNK = 1 << 14
"""Samples per chunk: the arrays passed between kernels stay in the L2 cache."""

SCATTERED = 8
"""Ranges of less than 1/8 of a block are located faster in training order than in cutting order."""

Chunks: TypeAlias = Iterator[tuple[I64, Spans]]
"""Positions in training order, int64[n], and the spans of the samples at these positions."""


class _HasLocate(Protocol):
    def locate(self, sample_ids: I64) -> Spans: ...


@runtime_checkable
class IterableIndex(Protocol):
    """Index with an iteration faster than `locate` in training order."""

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks: ...


def iterate_spans(index: Index, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
    """Iterate over samples ``begin`` to ``end - 1``, each once, in any order, in chunks.

    The iterations with ``part`` 0 to ``parts - 1`` are disjoint, cover the range together, and may
    run in threads.

    Raises:
        OutOfRange: the range is outside the index.
    """
    begin, end = check_range(index, begin, end)
    if isinstance(index, IterableIndex):
        return index.iterate_spans(begin, end, part, parts)
    return iterate_in_order(index, begin, end, part, parts)


def iterate_in_order(index: _HasLocate, begin: int, end: int, part: int, parts: int) -> Chunks:
    """Iterate over samples in training order."""
    first, stop = part_bounds(begin, end, part, parts)
    for start in range(first, stop, CHUNK):
        positions = np.arange(start, min(stop, start + CHUNK))
        yield positions, index.locate(positions)


def part_bounds(begin: int, end: int, part: int, parts: int) -> tuple[int, int]:
    """Return the bounds of one of ``parts`` equal parts; 0 to 10 in three parts: 0, 3, 6, 10."""
    return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts


def locate_range(index: Index, begin: int, end: int) -> Spans:
    """Return the spans of samples ``begin`` to ``end - 1`` in training order."""
    begin, end = check_range(index, begin, end)
    pieces = [(positions - begin, spans) for positions, spans in iterate_spans(index, begin, end)]
    return join_spans(pieces, end - begin)


def check_range(index: Index, begin: int, end: int) -> tuple[int, int]:
    """Return both as Python integers; OutOfRange unless the index has the samples between them."""
    begin, end = check_integer("begin", begin), check_integer("end", end)
    if not 0 <= begin <= end <= index.num_samples:
        raise OutOfRange(
            f"samples {begin} to {end} do not all exist, the index holds samples 0 to "
            f"{index.num_samples}; request a range inside"
        )
    return begin, end


IGNORED_LABEL = -100
"""Label of a token that carries no loss."""

_MOST_LABELS = 1 << 22  # labels read in one step, which bounds the memory


def check_same_lengths(text: IndexedDataset, other: IndexedDataset, role: str) -> None:
    """Raise FormatError unless both datasets have the same sequence lengths."""
    if len(text) != len(other):
        raise FormatError(
            f"{other.path_prefix}.idx: the {role} of {text.path_prefix} must have {len(text)} "
            f"sequences, one for each of the text, got {len(other)}; write it again from the same "
            "text"
        )
    differ = text.sequence_lengths != other.sequence_lengths
    if differ.any():
        first = int(differ.argmax())
        raise FormatError(
            f"{other.path_prefix}.idx: the {role} of {text.path_prefix} must have one entry for "
            f"each token; sequence {first} has {int(other.sequence_lengths[first])} and "
            f"{int(text.sequence_lengths[first])} tokens in the text; write it again from the same "
            "text"
        )


def documents_with_labels(
    labels: IndexedDataset, documents: I64, limit: int
) -> npt.NDArray[np.bool_]:
    """Return bool[n]: documents with a label other than -100 among their first ``limit``.

    Reads each document up to its first label, in growing windows.
    """
    labels.validate()
    begin = labels.sequence_pointers[documents] // labels.dtype.itemsize
    end = begin + np.minimum(labels.sequence_lengths[documents], limit)
    found = np.zeros(documents.size, bool)
    open_ones, window = np.flatnonzero(begin < end), 16
    while open_ones.size:
        for part in np.array_split(open_ones, ceil_div(open_ones.size * window, _MOST_LABELS)):
            at = np.minimum(begin[part, None] + np.arange(window), end[part, None] - 1)
            found[part] = (labels.tokens[at] != IGNORED_LABEL).any(axis=1)
        begin[open_ones] += window
        open_ones = open_ones[~found[open_ones] & (begin[open_ones] < end[open_ones])]
        window = min(2 * window, _MOST_LABELS)
    return found
