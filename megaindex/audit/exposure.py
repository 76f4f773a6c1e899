"""Exact counts of the times and steps at which every token is served, for any order.

The corpus is cut where a token run of any sample begins or ends, and where documents begin: all
tokens of such a segment are served in the same steps. Runs [0, 4) in step 0 and [2, 6) in step 5 of
a document of 7 tokens give the segments [0, 2) [2, 4) [4, 6) [6, 7), served in steps 0 · 0 5 · 5 ·
never. There are about documents + epochs x samples segments, so memory does not grow with tokens.

Epoch, unseen share and repeats of each source at any step, for the log of a training run:

    log = ExposureLog(run_of_settings(megatron_args="launch.sh", world_size=64))    # on one rank
    for name, value in log.scalars(iteration).items():
        writer.add_scalar(name, value, iteration)                                 # or wandb.log(…)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex._types import F64, I64
from megaindex.audit.scalars import source_scalars
from megaindex.index.draws import Progress
from megaindex.run.run import Run
from megaindex.validation import check_between

_RUNS_AT_ONCE = 1 << 18
_DOCUMENTS_AT_ONCE = 1 << 20
SHARES = 6
"""Columns of `Exposure.shares`: tokens served before 0, 1, … SHARES - 2 times, and more often."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Histograms:
    """Tokens and non-empty documents by times served (0, 1, 2, …)."""

    tokens: I64
    """int64[sources, times]."""
    documents_in_part: I64
    """int64[times]: a document counts by its most served token."""
    documents_whole: I64
    """int64[times]: a document counts by its least served token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exposure:
    """Result of `count_exposure`, in exact integers."""

    past: Histograms
    """After the steps made already."""
    total: Histograms
    """After all steps."""
    step_tokens: I64
    """int64[steps]: tokens served."""
    step_earlier: I64
    """int64[steps]: sum over those tokens of the times that earlier steps served each."""
    stretches: I64
    """int64[stretches + 1]: bounds, in steps, of ranges of equal length."""
    shares: I64
    """int64[stretches, SHARES]: tokens by the times that earlier steps served them."""
    composition: I64
    """int64[stretches, sources]: tokens served of each source."""
    fresh: I64
    """int64[stretches, sources]: tokens served for the first time."""
    source_earlier: I64
    """int64[stretches, sources]: `step_earlier` by source, summed over the steps of a stretch."""
    first_repeats: I64
    """int64[sources]: first step that serves a token of the source again; -1 if there is none."""
    distances: I64
    """int64[steps]: tokens served again k steps after the last time, for each k from 0 on."""

    @property
    def mean_earlier(self) -> F64:
        """float64[steps]: mean earlier exposures of the tokens of a step."""
        return self.step_earlier / np.maximum(self.step_tokens, 1)

    def curve(self) -> F64:
        """Return float64[stretches], the mean earlier exposures over stretches of steps."""
        counts = (self.step_earlier, self.step_tokens)
        earlier, tokens = (np.add.reduceat(values, self.stretches[:-1]) for values in counts)
        return np.asarray(earlier / np.maximum(tokens, 1), np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Served:
    """Token runs of the run in corpus order, positions counted through all sources."""

    begin: I64
    end: I64
    step: I64


def count_exposure(run: Run, *, points: int = 400, progress: Progress | None = None) -> Exposure:
    """Count all servings of all tokens, over at most ``points`` stretches of steps.

    Memory: about 40 bytes for each token run of a sample.
    """
    length = -(-run.num_steps // max(1, points))
    starts = np.arange(0, run.num_steps, length)
    stretches = np.append(starts, run.num_steps).astype(np.int64)
    stretch_of = np.repeat(np.arange(stretches.size - 1), np.diff(stretches))
    served, composition = _collect(run, stretch_of, progress)
    tally = _Tally(run, stretch_of)
    for block in _blocks(served, run.token_base):
        tally.add(served, block)
    return Exposure(
        past=tally.past.histograms(),
        total=tally.total.histograms(),
        step_tokens=tally.step_tokens,
        step_earlier=tally.step_earlier,
        stretches=stretches,
        shares=tally.shares.reshape(-1, SHARES),
        composition=composition,
        fresh=tally.fresh.reshape(composition.shape),
        source_earlier=tally.source_earlier.reshape(composition.shape),
        first_repeats=np.where(tally.first_repeats < run.num_steps, tally.first_repeats, -1),
        distances=tally.distances,
    )


def _collect(run: Run, stretch_of: I64, progress: Progress | None) -> tuple[_Served, I64]:
    num_sources = len(run.sources)
    first = np.array([source.first_document for source in run.sources])
    composition = np.zeros((int(stretch_of[-1]) + 1) * num_sources, np.int64)
    parts: list[tuple[I64, I64, I64]] = []
    for runs in run.runs():
        document = run.document_base[runs.source] + runs.document - first[runs.source]
        begin = run.token_base[document] + runs.offset
        step = run.step_of(runs.sample)
        parts.append((begin, begin + runs.length, step))
        _accumulate(composition, stretch_of[step] * num_sources + runs.source, runs.length)
        if progress is not None and runs.sample.size:
            progress(int(runs.sample[-1]) + 1, run.num_samples)
    begin, end, step = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(begin, kind="stable")
    served = _Served(begin=begin[order], end=end[order], step=step[order])
    return served, composition.reshape(-1, num_sources)


def _blocks(served: _Served, token_base: I64) -> Iterator[range]:
    """Yield ranges of documents with limited numbers of runs and documents, or one document."""
    num_documents = token_base.size - 1
    full = np.searchsorted(token_base, served.begin[::_RUNS_AT_ONCE], "right") - 1
    many = np.arange(0, num_documents, _DOCUMENTS_AT_ONCE)
    bounds = np.unique(np.concatenate((full, many, [0, num_documents]))).tolist()
    yield from (range(a, b) for a, b in itertools.pairwise(bounds))


class _Tally:
    """Sums over blocks of documents."""

    def __init__(self, run: Run, stretch_of: I64) -> None:
        self._run = run
        self._stretch_of = stretch_of
        self.past = _Counts(len(run.sources))
        self.total = _Counts(len(run.sources))
        self.step_tokens, self.step_earlier, self.distances = (
            np.zeros(run.num_steps, np.int64) for _ in range(3)
        )
        stretches, num_sources = int(stretch_of[-1]) + 1, len(run.sources)
        self.shares = np.zeros(stretches * SHARES, np.int64)
        self.fresh, self.source_earlier = (
            np.zeros(stretches * num_sources, np.int64) for _ in range(2)
        )
        self.first_repeats = np.full(num_sources, run.num_steps, np.int64)

    def add(self, served: _Served, documents: range) -> None:
        bounds = self._run.token_base[documents.start : documents.stop + 1]
        filled = np.flatnonzero(np.diff(bounds))
        low, high = np.searchsorted(served.begin, bounds[[0, -1]], "left")
        begin, end, step = (a[low:high] for a in (served.begin, served.end, served.step))
        cuts = np.unique(np.concatenate((begin, end, bounds)))
        segment, step = self._history(begin, end, step, cuts)
        width = np.diff(cuts)
        first = np.searchsorted(cuts, bounds[filled])
        source = np.searchsorted(self._run.document_base, documents.start + filled, "right").astype(
            np.int64
        )
        of_segment = np.repeat(source - 1, np.diff(first, append=width.size))
        self._steps(segment, step, width[segment], of_segment[segment])
        before = segment[step < self._run.past_steps]
        for counts, servings in ((self.past, before), (self.total, segment)):
            times = np.bincount(servings, minlength=width.size)
            counts.add(times, width, of_segment, first)

    def _history(self, begin: I64, end: I64, step: I64, cuts: I64) -> tuple[I64, I64]:
        """Return segment and step of every serving, sorted by segment, then by step."""
        first = np.searchsorted(cuts, begin)
        counts = np.searchsorted(cuts, end) - first
        segment = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        key = segment * self._run.num_steps + np.repeat(step, counts)
        key.sort()
        segment, steps = np.divmod(key, self._run.num_steps)
        return segment, steps

    def _steps(self, segment: I64, step: I64, width: I64, source: I64) -> None:
        place = np.arange(segment.size)
        again = np.zeros(segment.size, np.bool_)
        again[1:] = segment[1:] == segment[:-1]
        same_step = again.copy()
        same_step[1:] &= step[1:] == step[:-1]
        # places of the segment's first serving, and of the first in the same step
        first = np.maximum.accumulate(np.where(again, 0, place))
        earlier = np.maximum.accumulate(np.where(same_step, 0, place)) - first
        _accumulate(self.step_tokens, step, width)
        _accumulate(self.step_earlier, step, width * earlier)
        stretch = self._stretch_of[step]
        _accumulate(self.shares, stretch * SHARES + np.minimum(earlier, SHARES - 1), width)
        by_source = stretch * self.first_repeats.size + source
        _accumulate(self.source_earlier, by_source, width * earlier)
        _accumulate(self.fresh, by_source[~again], width[~again])
        repeats = np.flatnonzero(again)
        np.minimum.at(self.first_repeats, source[repeats], step[repeats])
        _accumulate(self.distances, step[repeats] - step[repeats - 1], width[repeats])


class _Counts:
    """Histograms that grow with the times served."""

    def __init__(self, num_sources: int) -> None:
        self._tokens = np.zeros((num_sources, 2), np.int64)
        self._documents = np.zeros((2, 2), np.int64)
        """int64[2, times]: by the most and by the least served token."""

    def add(self, times: I64, width: I64, source: I64, first: I64) -> None:
        """Add segments with times served, width and source; ``first``: that of each document."""
        if not times.size:
            return
        most = max(int(times.max()) + 1, self._tokens.shape[1])
        self._tokens = _widened(self._tokens, most)
        _accumulate(self._tokens.reshape(-1), source * most + times, width)
        self._documents = _widened(self._documents, most)
        for counts, extreme in zip(self._documents, (np.maximum, np.minimum), strict=True):
            counts += np.bincount(extreme.reduceat(times, first), minlength=most)

    def histograms(self) -> Histograms:
        in_part, whole = self._documents
        return Histograms(tokens=self._tokens, documents_in_part=in_part, documents_whole=whole)


def _widened(counts: I64, columns: int) -> I64:
    return np.pad(counts, [(0, 0), (0, columns - counts.shape[1])])


def _accumulate(sums: I64, place: npt.NDArray[np.integer], values: I64) -> None:
    """Add each value at its place; sums below 2**53 of a block are exact in doubles."""
    sums += np.bincount(place, weights=values, minlength=sums.size).astype(np.int64)


_MOST_COUNTS = 1 << 23
"""Most steps x sources that are counted step by step, 16 bytes each."""


@dataclass(frozen=True, kw_only=True)
class SourceExposure:
    """Tokens of one source, or of all, that the first steps of a run serve as input.

    Attributes:
        source: name of the source, or ``all``.
        tokens: tokens served, repeats included.
        epoch: tokens served over the tokens of the source.
        unseen: share of the tokens of the source that are not served.
        repeats: share of the tokens served that were served by an earlier step, or twice by
            one.
    """

    source: str
    tokens: int
    epoch: float
    unseen: float
    repeats: float


class ExposureLog:
    """Exact exposure of each source after any step of a run, counted once and then looked up.

    Counting takes the time and memory of `megaindex.audit.audit`; one rank does it. A look-up is
    proportional to the number of sources.

    Args:
        run: the run, from `run_of_settings` (Megatron-LM, GPT-NeoX), `run_of_recipe`, or
            `run_of_index` for a training loop of your own.
        points: greatest number of steps, at equal distances, after which the sources are counted;
            other steps return the counts of the last such step. Default: every step, or 2**23
            divided by the number of sources.
        progress: called with (done, total) while samples are located.

    Raises:
        InvalidArgument: ``points`` is below 1.
    """

    def __init__(
        self, run: Run, *, points: int | None = None, progress: Progress | None = None
    ) -> None:
        self._run = run
        self._names = [source.name for source in run.sources]
        most = max(1, _MOST_COUNTS // len(self._names))
        points = most if points is None else check_between("points", points, 1)
        counts = count_exposure(run, points=min(points, run.num_steps), progress=progress)
        self._steps = counts.stretches
        self._sizes = counts.total.tokens.sum(axis=1)
        zero = np.zeros((1, len(self._names)), np.int64)
        self._served = np.concatenate((zero, np.cumsum(counts.composition, axis=0)))
        self._seen = np.concatenate((zero, np.cumsum(counts.fresh, axis=0)))

    @property
    def num_steps(self) -> int:
        """Number of steps of the run."""
        return self._run.num_steps

    def step_of(self, consumed_samples: int) -> int:
        """Return the number of whole steps in these samples, over all ranks.

        Raises:
            InvalidArgument: the run has fewer samples.
        """
        most = self._run.num_samples
        consumed = check_between("consumed_samples", consumed_samples, 0, most)
        return int(np.searchsorted(self._run.step_bounds, consumed, "right")) - 1

    def after(self, step: int) -> list[SourceExposure]:
        """Return the exposure of all sources together, then of each, after ``step`` steps.

        Args:
            step: number of steps done, as trainers count iterations, from 0 to `num_steps`.

        Raises:
            InvalidArgument: the run has fewer steps.
        """
        step = check_between("step", step, 0, self.num_steps, most_is="the steps of the run")
        row = int(np.searchsorted(self._steps, step, "right")) - 1
        columns = (self._served[row], self._seen[row], self._sizes)
        lines = zip(self._names, *(column.tolist() for column in columns), strict=True)
        every = ("all", *(int(column.sum()) for column in columns))
        return [
            SourceExposure(
                source=name,
                tokens=served,
                epoch=served / max(1, size),
                unseen=(size - seen) / max(1, size),
                repeats=(served - seen) / max(1, served),
            )
            for name, served, seen, size in (every, *lines)
        ]

    def scalars(self, step: int, prefix: str = "data") -> dict[str, float]:
        """Return the exposure after ``step`` steps as values for a log.

        Names are ``data/epoch``, ``data/unseen`` and ``data/repeats`` for all sources together, and
        ``data/epoch/web`` for the source ``web`` of several, ``web#2`` if it is listed again.
        """
        rows = self.after(step)
        values = ("epoch", "unseen", "repeats")
        return source_scalars(
            prefix, self._names, {each: [getattr(row, each) for row in rows] for each in values}
        )

    def __len__(self) -> int:
        """Return the number of steps."""
        return self.num_steps

    def __repr__(self) -> str:
        names = ", ".join(self._names[:3]) + " …" * (len(self._names) > 3)
        return f"ExposureLog({self.num_steps:,} steps of {names})"
