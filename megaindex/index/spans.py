"""The interface of every index, and iteration in its fastest order.

Receipts and counts are sums, which do not ask for the order of training: an index whose samples lie
one after another in some other order may give them in that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, IntArray
from megaindex.errors import OutOfRange
from megaindex.validation import check_integer


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of tokens, in the order in which samples read them; no run is empty.

    Unpacks as ``source, document, offset, length``. The runs of the k-th sample asked for are
    ``row_splits[k]:row_splits[k + 1]``.
    """

    source: I32
    """int32[n]: which source, 0 where there is one."""
    document: I64
    """int64[n]: sequence id in that source."""
    offset: I64
    """int64[n]: first token, counted from the start of the sequence."""
    length: I64
    """int64[n]: tokens, at least 1."""
    row_splits: I64
    """int64[samples + 1]: where each sample's runs begin."""

    @classmethod
    def of_one_source(cls, document: I64, offset: I64, length: I64, row_splits: I64) -> Spans:
        """What the kernels find: runs of source 0."""
        return cls(np.zeros(document.size, np.int32), document, offset, length, row_splits)

    def __iter__(self) -> Iterator[IntArray]:
        return iter((self.source, self.document, self.offset, self.length))

    def __len__(self) -> int:
        return int(self.document.size)

    def input_lengths(self, sequence_length: int) -> I64:
        """Return how many tokens of each run are input, int64[n]: the first S of each sample.

        What follows them is a label alone. A sample of S tokens or fewer is fed as a whole, such as
        a bin of documents or a shorter last sample. Of runs of 3 and 6 tokens in one sample, with
        S = 8, 3 and 5 are.
        """
        ends = np.concatenate(([0], np.cumsum(self.length)))
        first = np.repeat(ends[self.row_splits[:-1]], np.diff(self.row_splits))
        room = sequence_length - (ends[:-1] - first)
        return np.asarray(np.clip(room, 0, self.length), np.int64)


class Index(Protocol):
    """The interface through which planner, loader, audit and demo use an index."""

    @property
    def num_samples(self) -> int:
        """Samples that can be located: 0 ... num_samples - 1, in the order of training."""
        ...

    @property
    def num_epochs(self) -> int:
        """Epochs the index was built for."""
        ...

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the documents, once each."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens per sample, the shifted label's extra token not counted."""
        ...

    @property
    def add_extra_token(self) -> int:
        """1 if samples hold one token more for the shifted label, else 0."""
        ...

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        """Where the tokens of these samples lie, the extra token included.

        Raises:
            OutOfRange: an id below 0 or not below ``num_samples``.
        """
        ...


def check_sample_ids(sample_ids: npt.ArrayLike, num_samples: int) -> I64:
    """Return the ids as int64[n].

    Raises:
        OutOfRange: an id below 0 or not below ``num_samples``.
    """
    # A dataset asks for one at a time, and a comparison in NumPy takes longer than its kernel.
    if isinstance(sample_ids, list) and len(sample_ids) == 1:
        only: Any = sample_ids[0]
        if type(only) is int and 0 <= only < num_samples:
            return np.array(sample_ids, np.int64)
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
            f"sample {int(wrong[0])} was asked for, the index holds samples 0 to "
            f"{num_samples - 1}; nothing is served in its place"
        )
    return ids.astype(np.int64)


def locate_each(indices: Sequence[Index], source: I64, sample: I64) -> Spans:
    """Sample ``sample[k]`` of ``indices[source[k]]``, int64[n] each, located source by source.

    Raises:
        OutOfRange: a sample that its source does not hold.
    """
    pieces = []
    for number in np.unique(source).tolist():
        places = np.flatnonzero(source == number)
        spans = indices[number].locate(sample[places])
        numbered = replace(spans, source=np.full(len(spans), number, np.int32))
        pieces.append((places, numbered))
    return joined(pieces, source.size)


def joined(pieces: Sequence[tuple[I64, Spans]], num_samples: int) -> Spans:
    """One Spans of samples 0 ... num_samples - 1, given pieces by the places of their samples."""
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
    )
    for places, spans in pieces:
        shift = np.repeat(splits[places] - spans.row_splits[:-1], counts[places])
        rows = np.arange(len(spans)) + shift
        for target, part in zip(whole, spans, strict=True):
            target[rows] = part
    return whole


CHUNK = 1 << 14
"""Samples given at once: what passes from kernel to kernel stays in a near cache."""

SCATTERED = 8
"""One sample in so few, or fewer, is found faster in the order of training than by passing over all
of them in the order in which they lie."""

Chunks: TypeAlias = Iterator[tuple[I64, Spans]]
"""Positions in the order of training, int64[n], and the runs of the samples there."""


class Locating(Protocol):
    """The part of an index that finds samples."""

    def locate(self, sample_ids: I64) -> Spans: ...


@runtime_checkable
class Walkable(Protocol):
    """An index with a fast walk of its own."""

    def walk(self, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
        """See `walk`; the range lies inside."""
        ...


def walk(index: Index, begin: int, end: int, part: int = 0, parts: int = 1) -> Chunks:
    """Iterate over samples begin ... end - 1, each once, in any order, in chunks.

    ``parts`` walks with part 0, 1, ..., parts - 1 give them all together; each may run in a thread
    of its own.

    Raises:
        OutOfRange: the index does not hold them.
    """
    begin, end = check_range(index, begin, end)
    if isinstance(index, Walkable):
        return index.walk(begin, end, part, parts)
    return located(index, begin, end, part, parts)


def located(index: Locating, begin: int, end: int, part: int, parts: int) -> Chunks:
    """Iterate over samples of any index, in the order of training."""
    first, stop = share(begin, end, part, parts)
    for start in range(first, stop, CHUNK):
        positions = np.arange(start, min(stop, start + CHUNK))
        yield positions, index.locate(positions)


def share(begin: int, end: int, part: int, parts: int) -> tuple[int, int]:
    """The part-th of ``parts`` stretches of begin ... end - 1: 0 to 10 in three: 0 3 6 10."""
    return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts


def in_order(index: Index, begin: int, end: int) -> Spans:
    """Return the spans of samples begin ... end - 1, as ``index.locate`` gives them."""
    begin, end = check_range(index, begin, end)
    pieces = [(positions - begin, spans) for positions, spans in walk(index, begin, end)]
    return joined(pieces, end - begin)


def check_range(index: Index, begin: int, end: int) -> tuple[int, int]:
    """Return both as plain integers.

    Raises:
        OutOfRange: the index does not hold samples begin ... end - 1.
        InvalidArgument: they are not integers.
    """
    begin, end = check_integer("begin", begin), check_integer("end", end)
    if not 0 <= begin <= end <= index.num_samples:
        raise OutOfRange(
            f"samples {begin} to {end} were asked for, the index holds samples 0 to "
            f"{index.num_samples}; ask for a range inside"
        )
    return begin, end
