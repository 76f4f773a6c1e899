"""Coverage: shares of the tokens by times served, counted, computed or expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from megaindex._types import F64, I32, I64
from megaindex.arithmetic import FinalEpoch, final_epoch
from megaindex.builders.single import index_of
from megaindex.format import IndexedDataset
from megaindex.index.counts import added
from megaindex.index.documents import lengths_within, members_of
from megaindex.index.draws import Progress
from megaindex.index.frameworks import FrameworkRules
from megaindex.index.order_settings import order_of_row
from megaindex.index.spans import Index
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.plan.model import Coverage
from megaindex.run.parts import SplitPart
from megaindex.run.passes import ServedRange
from megaindex.run.run import Run

COVERAGES = ("auto", "exact", "expected", "none")
BUILD_LIMIT = 10**8
"""Documents x epochs up to which ``--coverage auto`` counts in the built index."""

_SAMPLES_AT_ONCE = 1 << 17
_DOCUMENTS_AT_ONCE = 1 << 20
_MOST_TIMES = 10_000  # longest table of shares by times served
_MOST_COPIES = 40  # most epochs for expected coverage where samples are served again
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True, kw_only=True)
class SourceDraw:
    """Samples drawn from one source in one split."""

    row: FrameworkRules
    part: SplitPart
    sequence_length: int
    seed: int
    requested: int
    epochs: int
    built: int
    per_epoch: int
    drawn: int
    counted: bool
    """False if `drawn` is an estimate."""
    reshuffled: bool = False
    """True if each pass over the samples is in another order."""
    index: Callable[[], Index] | None = None
    """Returns the index of the source, of all its documents; None: that of the rules."""

    @property
    def served(self) -> int:
        return min(self.drawn, self.built)

    def final_epoch(self) -> FinalEpoch:
        return final_epoch(
            self.requested,
            self.epochs,
            self.part.tokens,
            self.sequence_length,
            policy=self.row.separate_final_epoch,
            threshold=self.row.final_epoch_threshold,
        )


def coverage_of(
    draw: SourceDraw,
    served: Sequence[ServedRange] | None,
    method: str,
    progress: Progress | None = None,
) -> Coverage:
    """Return the coverage by the cheapest exact method, or by ``method``.

    ``served`` are the samples that the draws serve; None where draws were not counted.
    """
    if served and tuple(served) != (ServedRange(0, draw.served, 1),):
        return _coverage_of_repeats(draw, served, method, progress)
    if method == "none" or draw.epochs > _MOST_TIMES:
        return Coverage(method="none")
    closed = closed_form(draw) if draw.counted else None
    if closed is not None and method == "auto":
        return closed
    cheap = method == "auto" and draw.part.sequences * draw.epochs <= BUILD_LIMIT
    if _can_build(draw) and (method == "exact" or cheap):
        return built_coverage(draw, progress)
    return closed or expected(draw)


def _can_build(draw: SourceDraw) -> bool:
    return bool(
        draw.counted
        and draw.row.order != "window"  # has a closed form
        and draw.part.source.path
        and draw.per_epoch > 0
        and draw.served > 0
    )


def closed_form(draw: SourceDraw) -> Coverage | None:
    """Return exact coverage where no permutation can change it, else None.

    The samples of one epoch never overlap: c of them serve c * S of its T tokens once. That holds
    for one epoch built, and for the first of two when the second is shuffled apart.
    """
    tokens, length, served = draw.part.tokens, draw.sequence_length, draw.served
    if draw.row.order == "window":
        return _windows(draw)
    if draw.part.packing is not None:
        return None if draw.served % draw.per_epoch else _packed(draw, "closed-form")
    one_pass = draw.epochs == 1 or served == 0
    if draw.row.is_framework and draw.epochs == 2:
        final = draw.final_epoch()
        one_pass = final.apart and served <= final.samples_before
    elif not draw.row.is_framework:
        one_pass = served <= draw.per_epoch and draw.row.epochs_mixed == 1
    if not one_pass:
        return None
    once = served * length / tokens
    return Coverage(method="closed-form", tokens=(1 - once, once))


def _windows(draw: SourceDraw) -> Coverage:
    """Return the coverage of order window: the windows, and the left-over, are fixed."""
    passes, rest = divmod(draw.served, draw.per_epoch)
    tokens, length = draw.part.tokens, draw.sequence_length
    shares = [0.0] * (passes + 2)
    shares[0] += (tokens - draw.per_epoch * length) / tokens
    shares[passes] += (draw.per_epoch - rest) * length / tokens
    shares[passes + 1] += rest * length / tokens
    return Coverage(method="closed-form", tokens=_trimmed(shares))


def _packed(draw: SourceDraw, method: str) -> Coverage:
    """Return the coverage of order packed: exact for whole epochs, else the mean over seeds."""
    assert draw.part.packing is not None
    passes, rest = divmod(draw.served, draw.per_epoch)
    placed = draw.part.packing.input_tokens / draw.part.tokens
    shares = [0.0] * (passes + 2)
    shares[passes] = placed * (1 - rest / draw.per_epoch)
    shares[passes + 1] = placed * rest / draw.per_epoch
    shares[0] += 1 - placed
    return Coverage(method=method, tokens=_trimmed(shares))


def expected(draw: SourceDraw) -> Coverage:
    """Return the mean coverage over seeds, for documents that are short against an epoch."""
    if draw.part.packing is not None:
        return _packed(draw, "expected")
    blocks = _framework_blocks(draw) if draw.row.is_framework else _epoch_blocks(draw)
    served = blocks.served * draw.sequence_length
    if blocks.carried == 0:
        shares = _chances(draw, blocks, blocks.carried, served)
    else:
        # With this chance the sample that begins in the block before is served.
        share = blocks.served / blocks.samples
        shares = share * _chances(draw, blocks, 0, served - blocks.carried)
        if share < 1:
            shares = shares + (1 - share) * _chances(draw, blocks, blocks.carried, served)
    return Coverage(method="expected", tokens=_trimmed(shares.tolist()))


@dataclass(frozen=True, kw_only=True)
class _ShuffledBlocks:
    """Blocks of epochs shuffled together: complete ones, and the last of which a part is served."""

    passed: int = 0
    """Number of blocks of which every sample is served."""
    passed_copies: int = 1
    """Epochs of each of these."""
    lost: int = 0
    """Tokens of each of these in no sample."""
    carried: int = 0
    """Last tokens of these that are in the first sample of the next block."""
    copies: int
    """Epochs of the last block."""
    samples: int
    """Samples of the last block."""
    served: int
    """Samples of the last block that are served; they may be any of them."""


def _framework_blocks(draw: SourceDraw) -> _ShuffledBlocks:
    """Return one block of all epochs, or one of all but the last and one of the last."""
    final, tokens = draw.final_epoch(), draw.part.tokens
    before = final.samples_before
    if not final.apart:
        return _ShuffledBlocks(copies=draw.epochs, samples=draw.built, served=draw.served)
    if draw.served <= before:
        return _ShuffledBlocks(copies=draw.epochs - 1, samples=before, served=draw.served)
    return _ShuffledBlocks(
        passed=1,
        passed_copies=draw.epochs - 1,
        carried=(draw.epochs - 1) * tokens - before * draw.sequence_length,
        copies=1,
        samples=draw.built - before,
        served=draw.served - before,
    )


def _epoch_blocks(draw: SourceDraw) -> _ShuffledBlocks:
    """Return the blocks of order epoch, which drop or carry over a last incomplete sample."""
    copies, length = draw.row.epochs_mixed, draw.sequence_length
    size, carries = copies * draw.part.tokens, draw.row.left_over == "carry"

    def samples_of(count: int) -> int:
        return draw.row.samples_in_epochs(count * copies, draw.part.tokens, length)

    passed = draw.served * length // size if carries else draw.served // samples_of(1)
    before = samples_of(passed)
    return _ShuffledBlocks(
        passed=passed,
        passed_copies=copies,
        lost=0 if carries else size - samples_of(1) * length,
        carried=passed * size - before * length if carries else 0,
        copies=copies,
        samples=samples_of(passed + 1) - before,
        served=draw.served - before,
    )


def _chances(draw: SourceDraw, blocks: _ShuffledBlocks, unserved: int, served: int) -> F64:
    """Return the chances of times served.

    Of the last complete block, ``unserved`` tokens are not served; of the next, ``served`` are.
    """
    tokens = draw.part.tokens
    now = _hypergeometric(blocks.copies, blocks.copies * tokens, served)
    if not blocks.passed:
        return now
    size = blocks.passed_copies * tokens - blocks.lost
    each, last = (
        _hypergeometric(blocks.passed_copies, blocks.passed_copies * tokens, count)
        for count in (size, size - unserved)
    )
    return np.convolve(np.convolve(_power(each, blocks.passed - 1), last), now)


def _power(shares: F64, exponent: int) -> F64:
    """Return the distribution of the sum of ``exponent`` numbers of distribution ``shares``."""
    result = np.ones(1)
    while exponent:
        if exponent % 2:
            result = np.convolve(result, shares)
        exponent //= 2
        if exponent:
            shares = np.convolve(shares, shares)
    return result


def _hypergeometric(copies: int, tokens: int, served: int) -> F64:
    """Return the chances of 0 … ``copies`` copies of a token in ``served`` of ``tokens``."""
    left = tokens - served

    def ratio(k: int) -> float:
        return (copies - k) * (served - k) / ((k + 1) * (left - copies + k + 1))

    return _from_ratios(copies, max(0, copies - left), min(copies, served), ratio)


def _from_ratios(last: int, low: int, high: int, ratio: Callable[[int], float]) -> F64:
    """Return the chances of 0 … last from p(k + 1) / p(k); 0 outside low … high.

    The computation starts at the most likely k and normalises at the end, so that no value over-
    or underflows.
    """
    mode = low
    while mode < high and ratio(mode) > 1:
        mode += 1
    shares = np.zeros(last + 1)
    shares[mode] = 1.0
    for k in range(mode, high):
        shares[k + 1] = shares[k] * ratio(k)
    for k in range(mode - 1, low - 1, -1):
        shares[k] = shares[k + 1] / ratio(k)
    return np.asarray(shares / shares.sum(), np.float64)


def _trimmed(shares: Sequence[float]) -> tuple[float, ...]:
    """Return the shares without the negligible tail, and at least those seen 0 and 1 times."""
    end = len(shares)
    while end > 2 and shares[end - 1] < _NEGLIGIBLE:
        end -= 1
    return tuple(shares[:end]) + (0.0,) * (2 - len(shares))


def _coverage_of_repeats(
    draw: SourceDraw, served: Sequence[ServedRange], method: str, progress: Progress | None
) -> Coverage:
    """Return the coverage where samples are served more than once, or skipped.

    One epoch has a closed form; more are counted where that is cheap, or expected.
    """
    most = max(part.times for part in served)
    if method == "none" or most > _MOST_TIMES:
        return Coverage(method="none")
    if draw.epochs == 1 and method != "exact" and draw.part.packing is None and not draw.reshuffled:
        shares = [0.0] * (most + 1)
        for part in served:
            shares[part.times] += (part.end - part.begin) * draw.sequence_length / draw.part.tokens
        shares[0] = 1 - sum(shares[1:])
        return Coverage(method="closed-form", tokens=tuple(shares))
    passes = sum(part.times for part in served) if draw.reshuffled else 1
    work = sum(part.size for part in served) + draw.part.sequences * draw.epochs * passes
    cheap = method == "auto" and work <= BUILD_LIMIT
    if draw.part.source.path and (method == "exact" or cheap):
        return built_coverage(draw, progress, served)
    if draw.reshuffled:
        mean = np.ones(1)  # over seeds
        for part in served:
            once = part.end * draw.sequence_length / draw.part.tokens
            mean = np.convolve(mean, _power(np.array([1 - once, once]), part.times))
        return Coverage(method="expected", tokens=_trimmed(mean.tolist()))
    is_mixed = draw.row.is_framework and not draw.final_epoch().apart  # all epochs at once
    if draw.epochs > _MOST_COPIES or draw.part.packing or not is_mixed:
        return Coverage(method="none")
    return _expected_of_repeats(draw, served)


def _expected_of_repeats(draw: SourceDraw, served: Sequence[ServedRange]) -> Coverage:
    """Return the mean coverage over seeds where samples are served different numbers of times.

    The copies of a token fall among the served samples by chance.
    """
    sizes: dict[int, int] = {}
    for part in served:
        sizes[part.times] = sizes.get(part.times, 0) + part.end - part.begin
    distinct = sum(sizes.values())
    once = expected(replace(draw, drawn=distinct)).tokens
    shares = [0.0] * (max(sizes) * (len(once) - 1) + 1)
    for copies, chance in enumerate(once):
        for times, share in _times_chances(copies, sorted(sizes.items()), distinct).items():
            shares[times] += chance * share
    return Coverage(method="expected", tokens=tuple(shares))


def _times_chances(copies: int, sizes: Sequence[tuple[int, int]], samples: int) -> dict[int, float]:
    """Return the chances of the total times that copies in different samples are served."""
    if copies == 0 or not sizes:
        return {0: 1.0}
    (times, size), rest = sizes[0], samples - sizes[0][1]
    found: dict[int, float] = {}
    for here in range(max(0, copies - rest), min(copies, size) + 1):
        ways = math.comb(size, here) * math.comb(rest, copies - here) / math.comb(samples, copies)
        for more, share in _times_chances(copies - here, sizes[1:], rest).items():
            total = here * times + more
            found[total] = found.get(total, 0.0) + ways * share
    return found


def built_coverage(
    draw: SourceDraw, progress: Progress | None = None, served: Sequence[ServedRange] | None = None
) -> Coverage:
    """Count in the built index of a source; ``served``: by default its first samples."""
    part = draw.part
    dataset = IndexedDataset(part.source.path, dialect=draw.row.file_dialect)
    if draw.index is not None:
        ranges = [ServedRange(0, draw.served, 1)] if served is None else served
        of_recipe = draw.index()
        documents = members_of(of_recipe) or range(len(dataset))
        lengths = lengths_within(dataset.sequence_lengths, documents)
        counts = count_served(of_recipe, ranges, lengths, 0, progress)
        return counted_coverage(*counts)
    ends = [draw.served]
    if draw.reshuffled and served is not None:
        ends, served = [p.end for p in served for _ in range(p.times)], None
    indices = [
        index_of(
            dataset,
            part.documents,
            order_of_row(draw.row),
            sequence_length=draw.sequence_length,
            seed=(draw.seed + number) % 2**32,
            num_samples=max(draw.requested, draw.served),
            source_name=part.shuffle_name,
        )
        for number in range(len(ends))
    ]
    index: Index = indices[0]
    if len(ends) > 1:
        passes = zip(indices, ends, strict=True)
        stretches = tuple(Stretch(index=each, samples=range(end)) for each, end in passes)
        index = StretchedIndex(stretches=stretches)
    lengths = lengths_within(dataset.sequence_lengths, part.documents)
    counts = count_served(
        index, sum(ends) if served is None else served, lengths, part.begin, progress
    )
    return counted_coverage(*counts)


def counted_coverage(tokens: I64, documents: I64) -> Coverage:
    """Return the coverage of the histograms of `count_served`."""
    return Coverage(
        method="built",
        tokens=tuple((tokens / tokens.sum()).tolist()),
        documents=tuple((documents / documents.sum()).tolist()),
        tokens_served=int(tokens @ np.arange(tokens.size)),
    )


def count_served(
    index: Index,
    served: int | Sequence[ServedRange],
    lengths: I32,
    first_document: int,
    progress: Progress | None = None,
) -> tuple[I64, I64]:
    """Return histograms of times served, over tokens and over non-empty documents.

    ``served`` is the number of first samples served, or ranges of samples with the times of each,
    ``lengths`` the tokens of each document from the sequence id ``first_document`` on.

    A document counts by its most served token. Only the first S tokens of a sample count: the
    last is the first of the next sample.

    Runs of samples never cross documents, so the times that a token is served are the runs begun
    at or before it less those ended: runs [0, 4) and [2, 6) of a document of 7 tokens serve its
    tokens 1 1 2 2 1 1 0 times.
    """
    samples = [ServedRange(0, served, 1)] if isinstance(served, int) else served
    return _histograms(_located(index, samples, first_document, progress), lengths)


def coverage_of_sources(run: Run, progress: Progress | None = None) -> list[Coverage]:
    """Count in the index of a decided run, for each of its sources."""
    first, last = int(run.step_bounds[0]), run.num_samples
    pieces: list[list[_Piece]] = [[] for _ in run.sources]
    for runs in run.runs():
        for number in np.unique(runs.source).tolist():
            mine = runs.select(np.flatnonzero(runs.source == number))
            document = mine.document - run.sources[number].first_document
            pieces[number].append((document, mine.offset, mine.length, 1))
        if progress is not None and runs.sample.size:
            progress(int(runs.sample[-1]) + 1 - first, last - first)
    each = zip(pieces, run.sources, strict=True)
    return [counted_coverage(*_histograms(found, source.lengths)) for found, source in each]


def _histograms(pieces: Iterable[_Piece], lengths: I32) -> tuple[I64, I64]:
    """Return histograms of times served, over tokens and over non-empty documents."""
    starts_of = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts_of[1:])
    runs = _runs(pieces, starts_of)
    tokens = np.zeros(2, np.int64)
    documents = np.zeros(2, np.int64)
    for low in range(0, len(lengths), _DOCUMENTS_AT_ONCE):
        block = slice(low, low + _DOCUMENTS_AT_ONCE)
        levels, widths, first_event = _levels(runs, starts_of, block)
        tokens = added(tokens, np.bincount(levels, weights=widths).astype(np.int64))
        if len(first_event):
            most = np.maximum.reduceat(levels, first_event)
            documents = added(documents, np.bincount(most))
    return tokens, documents


class _Runs(NamedTuple):
    """Runs of tokens served, positions counted in tokens of the source."""

    whole: I32
    """Times that each document was served as one complete run."""
    begins: I64
    """Sorted begins of the other runs, each as often as it was served."""
    ends: I64
    """Their ends, sorted independently; a run lies within one document, so blocks still match."""


_Piece: TypeAlias = tuple[I64, I64, I64, int]
"""Runs of tokens: the document of each, counted from the first, offset and length, and times."""


def _located(
    index: Index,
    served: Sequence[ServedRange],
    first_document: int,
    progress: Progress | None,
) -> Iterator[_Piece]:
    """Yield the runs of samples of an index of one source."""
    for ids, times in _chunks(served):
        spans = index.locate(ids)
        lengths = spans.input_lengths(index.sequence_length)
        yield spans.document - first_document, spans.offset, lengths, times
        if progress is not None:
            progress(int(ids[-1]) + 1, served[-1].end)


def _runs(pieces: Iterable[_Piece], starts_of: I64) -> _Runs:
    whole = np.zeros(len(starts_of) - 1, np.int32)
    begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for document, offset, length, times in pieces:
        begin = starts_of[document] + offset
        end = begin + length
        complete = (offset == 0) & (end == starts_of[document + 1])
        np.add.at(whole, document[complete], np.int32(times))  # 30 times as fast as a plain 1
        partial = ~complete & (length > 0)
        begins += [begin[partial]] * times
        ends += [end[partial]] * times
    return _Runs(whole, np.sort(np.concatenate(begins)), np.sort(np.concatenate(ends)))


def _chunks(served: Sequence[ServedRange]) -> Iterator[tuple[I64, int]]:
    for part in served:
        for start in range(part.begin, part.end, _SAMPLES_AT_ONCE):
            end = min(part.end, start + _SAMPLES_AT_ONCE)
            yield np.arange(start, end, dtype=np.int64), part.times


def _levels(runs: _Runs, starts_of: I64, block: slice) -> tuple[I64, I64, I64]:
    """Return times served and width of the segments between events, and each document's first.

    Empty segments get 0 times, so that the order of events at one position does not matter.
    """
    bounds = starts_of[block.start : block.stop + 1]
    begins, ends = (
        side[slice(*np.searchsorted(side, bounds[[0, -1]], "left" if first else "right"))]
        for first, side in ((True, runs.begins), (False, runs.ends))
    )
    filled = np.diff(bounds) > 0
    documents = bounds[:-1][filled]
    at = np.concatenate((begins, ends, documents))
    change = np.concatenate(
        (
            np.ones(len(begins), np.int64),
            np.full(len(ends), -1, np.int64),
            np.diff(runs.whole[block][filled], prepend=0),
        )
    )
    order = np.argsort(at, kind="stable")
    widths = np.diff(at[order], append=bounds[-1])
    levels = np.cumsum(change[order])
    levels[widths == 0] = 0
    first_event = np.flatnonzero(order >= len(begins) + len(ends))
    return levels, widths, first_event
