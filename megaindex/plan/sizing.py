"""Tokens, requests and epochs of the sources of a blend, and the samples that a loader serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaindex.arithmetic import ceil_div
from megaindex.configs.run import Buffer, RunSettings, Source
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.blending import (
    DivisorDraws,
    Draws,
    ExhaustiveDraws,
    GreedyDraws,
    Progress,
    SingleDraws,
    blend_weights,
    divisor_weights,
    request_weights,
)
from megaindex.index.frameworks import FrameworkRules
from megaindex.index.orders.packed import Packing, most_documents
from megaindex.plan.model import PackingFacts

BUILD_LIMIT = 10**8
"""Documents x epochs up to which ``--coverage auto`` counts in the built index."""
_CHUNK = 1 << 22
_MOST_LOCATED = 1 << 22  # samples of which a plan counts the tokens


@dataclass(frozen=True, kw_only=True)
class SplitPart:
    """The sequences [begin, end) of one source that one split uses."""

    source: Source
    begin: int
    end: int
    tokens: int
    pass_samples: int | None = None
    """Samples of one pass, for samples of whole documents; the fewest for pack_until_overflow."""
    leaves_out: int = 0
    """Documents that are not served, because they have no label or are too long."""
    packing: Packing | None = None
    """Bins of one epoch, in order packed."""
    long_documents: int = 0
    """Documents longer than a sample, in order packed."""
    shuffle_name: str | None = None
    """Name by which an order of megaindex shuffles the source; None: its fingerprint."""

    @property
    def sequences(self) -> int:
        return self.end - self.begin


def measure(source: Source, row: FrameworkRules, split: str | None) -> list[SplitPart]:
    """Return a source as one part, or the train, valid and test parts of ``split``.

    Raises:
        MissingFile, StorageError, FormatError: the pair cannot be read, or a length is negative.
    """
    if source.tokens is not None:
        return [SplitPart(source=source, begin=0, end=0, tokens=source.tokens)]
    dataset = IndexedDataset(source.path, dialect=row.file_dialect)
    bounds = [(0, len(dataset))] if split is None else row.split_bounds(split, len(dataset))
    lengths, path = dataset.sequence_lengths, f"{source.path}.idx"
    return [
        SplitPart(source=source, begin=a, end=b, tokens=_sum(lengths, a, b, path))
        for a, b in bounds
    ]


def _sum(lengths: npt.NDArray[np.int32], begin: int, end: int, path: str) -> int:
    total = 0
    for start in range(begin, end, _CHUNK):  # the sum copies its block as int64
        block = lengths[start : min(start + _CHUNK, end)]
        if int(block.min()) < 0:
            at = int(np.argmax(block < 0))
            raise FormatError(
                f"{path}: sequence {start + at} has the length {int(block[at])}, and lengths must "
                "be at least 0; write the file again"
            )
        total += int(block.sum(dtype=np.int64))
    return total


def packing_facts(
    packing: Packing | None, tokens: int, long_documents: int, max_documents: int | None
) -> PackingFacts | None:
    """Return the facts about samples of order packed; None in other orders."""
    if packing is None:
        return None
    pieces, samples = packing.pieces
    return PackingFacts(
        fill=packing.input_tokens / (packing.num_samples * packing.sequence_length),
        padding=packing.padding,
        cut_tokens=tokens - packing.input_tokens,
        long_documents=long_documents,
        max_documents=most_documents(max_documents, packing.sequence_length),
        pieces_per_sample=float(pieces @ samples / packing.num_samples),
        most_pieces=int(pieces[-1]),
        likeness=packing.likeness,
        rare_tokens=packing.rare_tokens / packing.input_tokens,
    )


class InputTokens(NamedTuple):
    """Input tokens of a range of samples in order packed."""

    tokens: int
    exact: bool
    """False for the mean over seeds."""


def mean_inputs(packing: Packing, begin: int, end: int) -> InputTokens:
    """Return the input tokens of samples ``begin`` to ``end - 1``: of complete epochs exactly, else
    the mean over seeds."""
    size, inputs = packing.num_samples, packing.input_tokens
    whole = begin % size == end % size == 0 or begin == end
    return InputTokens(end * inputs // size - begin * inputs // size, whole)


def is_countable(packing: Packing, documents: int, begin: int, end: int) -> bool:
    """Return whether the input tokens of samples ``begin`` to ``end - 1`` are cheap to count.

    Of an epoch that is read in part, the samples read or the others are located.
    """
    size = packing.num_samples
    parts = [end - begin] if begin // size == end // size else [-begin % size, end % size]
    located = sum(min(part, size - part) for part in parts)
    return documents <= BUILD_LIMIT and located <= _MOST_LOCATED


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Sources of the blend of one split, with the rules that turn requests into epochs."""

    row: FrameworkRules
    sequence_length: int
    names: tuple[str, ...]
    tokens: tuple[int, ...]
    """Tokens of one epoch of each source, positive."""
    weights: tuple[float | int, ...] | None
    """Explicit weights, or None."""
    buffer: Buffer
    asks_one_epoch: bool
    """True if one epoch of each source is requested: GPT-NeoX's train_epochs."""
    pass_samples: tuple[int, ...] | None = None
    """Samples of one pass over each source's documents, for samples of whole documents."""
    pass_samples_vary: bool
    """True if `pass_samples` are lower bounds over the orders of the documents."""
    walk: str = "auto"
    """`RunSettings.blend_counts`."""
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name, tokens in zip(self.names, self.tokens, strict=True):
            if tokens < 1:
                raise InvalidArgument(
                    f"{name} holds no tokens for this split; leave it out, or change --split"
                )
            samples = self.row.samples_in_epochs(1, tokens, self.sequence_length)
            if samples < 1 and not self.row.is_framework and self.pass_samples is None:
                raise InvalidArgument(
                    f"{name} holds {tokens} tokens, one sample needs {self.sequence_length + 1} "
                    f"(--seq-length {self.sequence_length} + 1); lower --seq-length"
                )

    def per_epoch(self) -> list[int]:
        """Return the samples of one epoch of each source."""
        return self.samples_of([1] * len(self.tokens))

    def samples_of(self, epochs: Sequence[Fraction | int]) -> list[int]:
        """Return the samples of these numbers of epochs of each source."""
        if self.pass_samples is not None:
            return [int(n * size) for n, size in zip(epochs, self.pass_samples, strict=True)]
        return [
            self.row.samples_in_epochs(count, size, self.sequence_length)
            for count, size in zip(epochs, self.tokens, strict=True)
        ]

    @property
    def single(self) -> bool:
        return len(self.tokens) == 1

    @property
    def one_epoch_only(self) -> bool:
        """True for several paths without weights, of which Megatron always builds one epoch."""
        unweighted = not self.single and self.weights is None
        return unweighted and self.row.request == "megatron" and self.buffer != "exact"

    @property
    def exact(self) -> bool:
        """True if requests are exactly the samples that the blend draws."""
        return not self.row.is_framework or self.buffer == "exact"

    @cached_property
    def draws(self) -> Draws:
        if self.single:
            return SingleDraws()
        if not any(self._weights):
            raise InvalidArgument(
                f"{' and '.join(self.names[:3])}: no sample of {self.sequence_length + 1} tokens "
                "in any source of this split; lower --seq-length, or give more documents"
            )
        if self.row.train_epochs == "reshuffled":
            return ExhaustiveDraws(np.array(self.per_epoch()), self.walk, self.progress)
        if not self.row.is_framework:
            return DivisorDraws(divisor_weights(self._weights))
        explicit = self.weights is not None or self.row.request != "megatron"
        weights = blend_weights(self._weights, self.row, explicit=explicit)
        return GreedyDraws(weights, self.walk, self.progress)

    @property
    def _weights(self) -> Sequence[float | int]:
        if self.weights is not None:
            return self.weights
        by_size = self.row.request in ("megatron", "exact")  # the other frameworks blend equally
        return self.per_epoch() if by_size else [1.0] * len(self.tokens)

    @cached_property
    def request_weights(self) -> list[float]:
        return [1.0] if self.single else request_weights(self._weights, self.row)

    def requested(self, samples: int) -> list[int] | None:
        """Return the samples requested of each source for ``samples`` of the blend.

        None: the draws of the blend were not counted.
        """
        if self.asks_one_epoch or self.one_epoch_only:
            return self.per_epoch()
        if self.exact:
            counts = self.draws.counts(samples)
            if counts is None or self.row.order != "neox":
                return counts
            return [max(1, count) for count in counts]  # a dataset of none has length -1
        return [self._request(i, samples) for i in range(len(self.tokens))]

    def blend_size(self, samples: int) -> int:
        """Return the positions that the framework fills for ``samples`` of the blend."""
        if self.row.blend_size != "requested" or self.exact or self.one_epoch_only or self.single:
            return samples
        return sum(
            self.row.samples_requested(samples, weight, 1.0, len(self.tokens))
            for weight in self.request_weights
        )

    def _request(self, i: int, samples: int) -> int:
        assert not isinstance(self.buffer, str)
        return self.row.samples_requested(
            samples, self.request_weights[i], self.buffer, len(self.tokens)
        )

    def epochs(self, requested: Sequence[int]) -> list[int]:
        """Return the epochs built for the samples requested of each source."""
        if self.pass_samples is not None:
            pairs = zip(requested, self.pass_samples, strict=True)
            return [max(1, ceil_div(count, size)) for count, size in pairs]
        return [
            self.row.epochs_for(count, size, self.sequence_length)
            for count, size in zip(requested, self.tokens, strict=True)
        ]

    def built(self, requested: Sequence[int], epochs: Sequence[int]) -> list[int]:
        """Return the samples built of each source; of NeoX's whole documents, those requested."""
        return list(requested) if self.built_as_requested else self.samples_of(epochs)

    @property
    def built_as_requested(self) -> bool:
        """True for NeoX's samples of whole documents, of which no more is built."""
        return self.pass_samples is not None and self.row.is_framework

    def longest(self, epochs: Sequence[int]) -> tuple[int, bool]:
        """Return the most samples of the blend for which no source needs more than its ``epochs``.

        The second value is False if the first is a lower bound.
        """
        limits = self.samples_of(epochs)
        if self.one_epoch_only:
            return sum(limits), True
        if self.exact or self.asks_one_epoch:
            return self.draws.longest(limits)
        longest = min(
            self._longest_request(i, limit)
            for i, limit in enumerate(limits)
            if self.request_weights[i]
        )
        return longest, not self.pass_samples_vary

    def _longest_request(self, i: int, limit: int) -> int:
        """Return the largest n with a request within ``limit``; requests rise with n."""
        if self._request(i, 0) > limit:
            return 0
        assert not isinstance(self.buffer, str)
        low, step = 0, max(1, int(limit / (self.request_weights[i] * self.buffer)))
        while self._request(i, low + step) <= limit:
            low += step
        while step > 1:  # low is within the limit, low + step is not
            half = step // 2
            if self._request(i, low + half) <= limit:
                low, step = low + half, step - half
            else:
                step = half
        return low


@dataclass(frozen=True)
class ServedRange:
    """Samples [begin, end), each served ``times`` times."""

    begin: int
    end: int
    times: int

    @property
    def size(self) -> int:
        """Number of samples served, repetitions included."""
        return (self.end - self.begin) * self.times


@dataclass(frozen=True, kw_only=True)
class LoaderPasses:
    """Passes of one loader over its blend, before and after a resume."""

    samples: int
    """Samples served in all."""
    limit: int | None
    """Positions of the blend served before the loader starts over; None if it does not."""
    before: int = 0
    """Samples served before the resume."""
    resumed_at: int = 0
    """Position at which the loader resumes, and to which it returns when it starts over."""
    whole: bool = False
    """True if it returns to the first position instead."""

    @property
    def is_empty(self) -> bool:
        """True for a loader without a micro batch, at which the framework ends with an error."""
        return self.limit is not None and self.limit <= 0

    def positions(self) -> tuple[ServedRange, ...]:
        """Return the positions of the blend that are served."""
        if self.is_empty:
            return ()
        resumes_in_place = self.before == self.resumed_at
        if self.limit is None or (self.samples <= self.limit and resumes_in_place):
            return (ServedRange(0, self.samples, 1),)
        before = _cycled(0, self.limit, self.before)
        rest = self.samples - self.before
        head = min(rest, self.limit - self.resumed_at)
        resumed = _cycled(self.resumed_at, self.limit, head)
        again = 0 if self.whole else self.resumed_at
        return (*before, *resumed, *_cycled(again, self.limit, rest - head))


def _cycled(start: int, end: int, count: int) -> Iterator[ServedRange]:
    """Yield the first ``count`` positions of [start, end) repeated."""
    passes, rest = divmod(count, end - start)
    if passes:
        yield ServedRange(start, end, passes)
    if rest:
        yield ServedRange(start, start + rest, 1)


def loader_limit(run: RunSettings, built: Sequence[int]) -> int | None:
    """Return the positions of a blend before its loader starts over; None if it does not."""
    if run.row.train_epochs == "none":
        return None
    unit = run.loader_batch
    return max(0, sum(built) - run.row.uncounted_samples * len(built)) // unit * unit


def loader_passes(run: RunSettings, built: Sequence[int], split: str, samples: int) -> LoaderPasses:
    """Return the passes of the loader of a split over its blend."""
    limit = loader_limit(run, built)
    if split != "train":
        return _evaluation(run, limit, split, samples)
    if run.row.train_epochs == "reshuffled":  # which continues in its pass
        return LoaderPasses(samples=samples, limit=limit)
    before = min(run.consumed_samples, samples)
    at = before % limit if limit else before
    return LoaderPasses(samples=samples, limit=limit, before=before, resumed_at=at)


def _evaluation(run: RunSettings, limit: int | None, split: str, samples: int) -> LoaderPasses:
    """Return the passes of validation or test.

    A resumed run of GPT-NeoX goes on with validation batch
    (micro batches of training // eval_interval) · eval_iters.
    """
    if not run.consumed_samples or not limit or split == "test":
        return LoaderPasses(samples=samples, limit=limit)
    evaluation, unit = run.evaluation, run.loader_batch
    size = evaluation.batch_size or run.batch.final
    rounds = run.batch.iterations_within(run.consumed_samples) // evaluation.interval
    batches = run.consumed_samples // unit // evaluation.interval * evaluation.iterations
    return LoaderPasses(
        samples=samples,
        limit=limit,
        before=min(rounds * evaluation.iterations * size, samples),
        resumed_at=batches * unit % limit,
        whole=run.row.train_epochs == "reshuffled",
    )


def drawn_from(sizing: Sizing, positions: Sequence[ServedRange]) -> list[list[ServedRange]] | None:
    """Return the draws of each source at ``positions`` of the blend; None where not counted."""
    counts: dict[int, list[int]] = {}
    for position in sorted({end for p in positions for end in (p.begin, p.end)}):
        drawn = sizing.draws.counts(position)
        if drawn is None:
            return None
        counts[position] = drawn
    return [
        [ServedRange(counts[p.begin][i], counts[p.end][i], p.times) for p in positions]
        for i in range(len(sizing.tokens))
    ]


def drawn_bounds(sizing: Sizing, positions: Sequence[ServedRange]) -> list[tuple[int, int]]:
    """Return least and most draws of each source, without counting."""
    least, most = [0] * len(sizing.tokens), [0] * len(sizing.tokens)
    for p in positions:
        sides = zip(sizing.draws.bounds(p.begin), sizing.draws.bounds(p.end), strict=True)
        for i, (begin, end) in enumerate(sides):
            least[i] += p.times * max(0, end[0] - begin[1])
            most[i] += p.times * min(p.end - p.begin, end[1] - begin[0])
    return list(zip(least, most, strict=True))


def samples_served(
    sizing: Sizing, drawn: Sequence[ServedRange], built: int
) -> tuple[ServedRange, ...]:
    """Return the samples of a source that its draws serve, in order and without overlap.

    NeoX serves draws beyond the samples built modulo the dataset's reported length.
    """
    if built == 0:
        return ()
    short = sizing.row.uncounted_samples
    length = max(1, built - short) if short else None  # NumPy's remainder by 0 is 0 too
    events: dict[int, int] = {}
    for part in drawn:
        for piece in _inside(part, built, length):
            events[piece.begin] = events.get(piece.begin, 0) + piece.times
            events[piece.end] = events.get(piece.end, 0) - piece.times
    served, times = [], 0
    for begin, end in pairwise(sorted(events)):
        times += events[begin]
        if times:
            served.append(ServedRange(begin, end, times))
    return tuple(served)


def _inside(part: ServedRange, built: int, length: int | None) -> Iterator[ServedRange]:
    """Yield the samples of a range of draws; those beyond ``built`` are modulo ``length``."""
    if part.begin < min(part.end, built):
        yield ServedRange(part.begin, min(part.end, built), part.times)
    beyond = max(part.begin, built)
    if beyond >= part.end or length is None:
        return
    head = min(part.end - beyond, length - beyond % length)
    yield ServedRange(beyond % length, beyond % length + head, part.times)
    for again in _cycled(0, length, part.end - beyond - head):
        yield ServedRange(again.begin, again.end, again.times * part.times)
