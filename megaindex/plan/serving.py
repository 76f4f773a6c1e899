"""Samples that a framework's loader serves of those built, and how often each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megaindex.configs.run import Run
from megaindex.plan.sizing import Sizing


@dataclass(frozen=True)
class ServedRange:
    """Samples [begin, end), each served ``times`` times."""

    begin: int
    end: int
    times: int

    @property
    def size(self) -> int:
        """Samples served, each as often as it is."""
        return (self.end - self.begin) * self.times


@dataclass(frozen=True, kw_only=True)
class LoaderPasses:
    """Passes of one loader over its blend, for a whole run and up to a resume."""

    samples: int
    limit: int | None
    """Positions of the blend served before the loader starts over; None: it never does."""
    before: int = 0
    resumed_at: int = 0
    """Position at which the loader goes on after ``before`` samples, and later starts over."""

    @property
    def starts_over(self) -> bool:
        """True if positions of the blend are served again."""
        return self.limit is not None and self.samples > self.limit

    @property
    def is_empty(self) -> bool:
        """True if the loader has not one micro batch, so that the framework ends with an error."""
        return self.limit is not None and self.limit <= 0

    def positions(self) -> tuple[ServedRange, ...]:
        """Positions of the blend, some of them more than once."""
        if self.is_empty:
            return ()
        if self.limit is None or (not self.starts_over and self.before == self.resumed_at):
            return (ServedRange(0, self.samples, 1),)
        first = _cycled(0, self.limit, self.before)
        return (*first, *_cycled(self.resumed_at, self.limit, self.samples - self.before))


def _cycled(start: int, end: int, count: int) -> Iterator[ServedRange]:
    """The first ``count`` of [start, end) again and again."""
    passes, rest = divmod(count, end - start)
    if passes:
        yield ServedRange(start, end, passes)
    if rest:
        yield ServedRange(start, start + rest, 1)


def loader_limit(run: Run, built: Sequence[int]) -> int | None:
    """Positions of a blend of sources of ``built`` samples that its loader counts."""
    short = run.row.uncounted_samples
    if not short:
        return None
    unit = run.loader_batch
    return max(0, sum(built) - short * len(built)) // unit * unit


def loader_passes(run: Run, built: Sequence[int], split: str, samples: int) -> LoaderPasses:
    """Return the passes of the loader of a split over its blend."""
    limit = loader_limit(run, built)
    if split != "train":
        return _evaluation(run, limit, split, samples)
    before = min(run.consumed_samples, samples)
    at = before % limit if limit else before
    return LoaderPasses(samples=samples, limit=limit, before=before, resumed_at=at)


def _evaluation(run: Run, limit: int | None, split: str, samples: int) -> LoaderPasses:
    """A resumed run of GPT-NeoX goes on with the validation batch whose number is (micro batches of
    training // eval_interval) · eval_iters.
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
    )


def drawn_from(sizing: Sizing, positions: Sequence[ServedRange]) -> list[list[ServedRange]] | None:
    """Draws of each source, numbered as the blend numbers them; None: not counted."""
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
    """Least and most draws of each source, without a walk."""
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
    """Samples of a source that its draws serve, apart from each other and in order.

    Draws beyond the samples there are take them modulo the length that is counted; of a length of 0
    NumPy's remainder is 0, the first sample.
    """
    if built == 0:
        return ()
    short = sizing.row.uncounted_samples
    length = max(1, built - short) if short else None
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
    """Draws of the samples there are; those beyond take them modulo ``length``, if there is one."""
    if part.begin < min(part.end, built):
        yield ServedRange(part.begin, min(part.end, built), part.times)
    beyond = max(part.begin, built)
    if beyond >= part.end or length is None:
        return
    head = min(part.end - beyond, length - beyond % length)
    yield ServedRange(beyond % length, beyond % length + head, part.times)
    for again in _cycled(0, length, part.end - beyond - head):
        yield ServedRange(again.begin, again.end, again.times * part.times)
