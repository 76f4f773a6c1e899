"""How far iterations may go before more is built, and what each phase builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaindex.errors import InvalidArgument
from megaindex.plan.model import Neighbour, Phase, Row
from megaindex.plan.serving import limit_of
from megaindex.plan.sizing import Sizing
from megaindex.recipe.run import Run


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest iterations, counted like train_iters."""

    without_repeat: int
    same_epochs: int
    exact: bool
    neighbours: tuple[Neighbour, ...]


def limits_of(run: Run, sizing: Sizing, train: Sequence[Row]) -> Limits:
    """Limits of the epochs that the rows build."""
    once, exact = (0, True)
    if sizing.row.fewest_epochs == 1:
        once, exact = sizing.longest([1] * len(sizing.tokens))
    counted = limit_of(run, sizing.per_epoch())
    unrepeated = once if counted is None else min(once, counted)
    if sizing.asks_one_epoch:
        once = unrepeated
    now = _epochs_now(train, len(sizing.tokens))
    same = once
    if now is not None and max(now) > 1:
        same, exact = sizing.longest(now)
    last = _furthest(run, same)
    return Limits(
        without_repeat=_furthest(run, unrepeated),
        same_epochs=last,
        exact=exact,
        neighbours=_neighbours(run, sizing, last, now) if now and exact else (),
    )


def _epochs_now(train: Sequence[Row], num_sources: int) -> list[int] | None:
    """Epochs built of each source, the most of any phase; None where they are not known."""
    epochs = [row.epochs for row in train if row.epochs is not None]
    if len(epochs) != len(train):
        return None
    return [max(epochs[i::num_sources]) for i in range(num_sources)]


def _furthest(run: Run, samples: int) -> int:
    """Most iterations in which no phase takes more than ``samples`` samples."""
    begins = [0, *run.phases]
    for begin, end in zip(begins, [*run.phases, None], strict=True):
        start = run.batch.samples_after(begin, run.consumed_samples)
        # What a resumed run consumed before counts against its first phase.
        limit = samples if begin == 0 else start + samples
        last = begin + run.batch.iterations_within(limit, start)
        if end is None or last < end:
            return last
    raise AssertionError("the last phase has no end")


def _neighbours(run: Run, sizing: Sizing, last: int, now: Sequence[int]) -> tuple[Neighbour, ...]:
    """What the last number of iterations within these epochs builds, and the next."""
    if sizing.asks_one_epoch:
        return ()
    begin = max((b for b in run.phases if b <= last), default=0)
    before = run.batch.samples_after(begin, run.consumed_samples) if begin else 0
    neighbours = []
    for iterations in (last, last + 1):
        samples = run.batch.samples_after(iterations, run.consumed_samples) - before
        requested = sizing.requested(samples)
        if requested is None:
            return ()
        try:
            epochs = sizing.epochs(requested)
        except InvalidArgument:  # beyond an exact number of epochs nothing is built
            return ()
        more = [n for n, a, b in zip(sizing.names, epochs, now, strict=True) if a > b]
        neighbours.append(
            Neighbour(
                train_iters=iterations,
                num_epochs_built=max(epochs),
                samples_built=sum(sizing.built(requested, epochs)),
                begins=more[0] if more else "",
            )
        )
    return tuple(neighbours)


def phases_of(run: Run, iterations: int) -> tuple[Phase, ...]:
    """Megatron's phases: each builds datasets for its own iterations alone."""
    if not run.phases:
        return ()
    ends = [end for end in run.phases if end < iterations] + [iterations]
    phases = []
    for begin, end in zip([0, *ends], ends, strict=False):
        start, stop = (run.batch.samples_after(i, run.consumed_samples) for i in (begin, end))
        phases.append(Phase(begin=begin, end=end, first_sample=start, samples=stop - start))
    return tuple(phases)
