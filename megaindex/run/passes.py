"""Passes of a loader over its blend, and the samples of each source that they serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megaindex.run.sizing import Sizing
from megaindex.settings.run_settings import RunSettings


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

    def between(self, first: int, last: int) -> Iterator[ServedRange]:
        """Yield those served as number ``first`` to ``last - 1``, which may lie beyond it."""
        first, last, width = max(0, first), min(self.size, last), self.end - self.begin
        if first >= last:
            return
        at = self.begin + first % width
        head = min(last - first, self.end - at) if at > self.begin else 0
        yield from _cycled(at, self.end, head)
        yield from _cycled(self.begin, self.end, last - first - head)


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


def served_between(
    parts: Sequence[ServedRange], ranges: Sequence[tuple[int, int]]
) -> tuple[ServedRange, ...]:
    """Return what ranges of positions serve, which serve the samples of ``parts`` in order."""
    found: list[ServedRange] = []
    for first, last in ranges:
        begin = 0
        for part in parts:
            found += part.between(first - begin, last - begin)
            begin += part.size
    return tuple(found)


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
        drawn = sizing.drawn(position)
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
