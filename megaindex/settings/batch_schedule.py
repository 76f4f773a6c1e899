"""Batch sizes and their schedule over a run."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.mixing import PerStream
from megaindex.index.skips import Skip, Skips, resolve_skips
from megaindex.validation import check_between, check_integer, check_setting, parse_fraction

_MOST_INCREMENTS = 1_000_000
_EXACT_DOUBLE = 2**53
_FAR = 2**61  # samples, more than any run has
_SUFFIX = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedSteps:
    """Steps of sizes that are listed, in the place of a batch size.

    Attributes:
        bounds (int64[steps + 1]): rows before each step, from 0 on, and behind the last one, behind
            which no step ends.
        batch_sizes: the sizes of the steps, each once.
    """

    bounds: I64
    batch_sizes: tuple[int, ...]

    def samples_after(self, steps: int) -> int:
        """Return the samples of the first ``steps``."""
        last = self.bounds.size - 1
        return int(self.bounds[min(steps, last)]) + max(0, steps - last) * _FAR

    def batches_within(self, samples: int) -> int:
        """Return the most steps that have at most ``samples`` in all."""
        beyond = max(0, samples - int(self.bounds[-1])) // _FAR
        return int(np.searchsorted(self.bounds, samples, "right")) - 1 + beyond

    def sizes_between(self, begin: int, end: int) -> I64:
        """Return int64[n]: samples of steps ``begin`` to ``end - 1``."""
        sizes: I64 = np.diff(self.bounds[begin : end + 1])
        return sizes


StepSizes: TypeAlias = int | PerStream | ListedSteps
"""Size of every step, or the sizes of the steps."""


class StepRun(NamedTuple):
    """Consecutive steps of one batch size, or of the draws of one stage."""

    base: int
    """Samples before its first step."""
    size: StepSizes
    done: int
    """Steps of it that are left out."""
    steps: int | None
    """The number of the others; None: without end."""

    def samples_after(self, steps: int) -> int:
        """Return the samples of the run up to the end of the first ``steps``."""
        steps += self.done
        samples = (
            steps * self.size if isinstance(self.size, int) else self.size.samples_after(steps)
        )
        return self.base + samples

    def within(self, samples: int) -> int:
        """Return the most steps up to ``samples``; -1 or less before the first one."""
        samples -= self.base
        if isinstance(self.size, int):
            return samples // self.size - self.done
        return self.size.batches_within(max(0, samples)) - self.done

    def reaching(self, samples: int) -> int:
        """Return the least steps up to ``samples`` or beyond."""
        steps = max(0, self.within(samples))
        return steps + (self.samples_after(steps) < samples)

    def sizes(self, steps: int) -> I64:
        """Return int64[steps]: samples of each of the first ``steps``."""
        if isinstance(self.size, int):
            return np.full(steps, self.size, np.int64)
        return self.size.sizes_between(self.done, self.done + steps)


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Global batch sizes over a run, as stages (first sample, batch size).

    The batch size of a stage holds from the first iteration at or after its first sample:
    ((0, 2), (5, 3)) consumes 2, 2, 2, 3, 3, … samples, since 6 are consumed after three iterations.

    In the place of a batch size, the draws of a stage of batching per_stream give each stream's
    steps a size of their own; they begin with the first sample given.

    Attributes:
        stages: first sample and batch size of each stage, in order.
        ramp: start, increment and samples of Megatron's ``--rampup-batch-size``; None for others.
        stepped: True for a schedule of Megatron's ``--step-batch-size-schedule``.

    Raises:
        InvalidArgument: the stages do not begin with sample 0, fall, or have a batch below 1.
    """

    stages: tuple[tuple[int, StepSizes], ...]
    ramp: tuple[int, int, int] | None = None
    stepped: bool = False

    def __post_init__(self) -> None:
        plain = tuple(
            (
                check_integer("the first sample of a stage", first),
                check_integer("a batch", size) if isinstance(size, int | np.integer) else size,
            )
            for first, size in self.stages
        )
        object.__setattr__(self, "stages", plain)
        firsts = [first for first, _ in self.stages]
        in_order = all(a <= b for a, b in itertools.pairwise(firsts))
        if not firsts or firsts[0] != 0 or not in_order or min(self.sizes()) < 1:
            raise InvalidArgument(
                "the stages of a batch schedule must begin with sample 0, not fall, and have "
                f"batches of at least 1 sample, got {self.stages}"
            )

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Return the schedule of one batch size."""
        return cls(stages=((0, check_setting("global_batch_size", size)),))

    @classmethod
    def of_steps(
        cls,
        bounds: I64,
        masked_rows: int = 0,
        changes: Sequence[int] = (),
        *,
        past_steps: int = 0,
        ends: bool = False,
    ) -> BatchSchedule:
        """Return the schedule of the steps of a run, with a stage from each of ``changes`` on.

        Args:
            bounds (int64[steps + 1]): positions of the steps. Steps without samples at the start
                are those of a past in another system.
            masked_rows: rows of padding in the last step.
            changes: starts of steps, in order.
            past_steps: steps made already, whose sizes no ranks need to divide.
            ends: no step follows, though there may be samples for another.

        Raises:
            InvalidArgument: no step begins at one of ``changes``.
        """
        if bounds.size < 2 or bounds[0] == bounds[-1]:
            raise InvalidArgument("a run must have a step with samples; restore the steps")
        rows = bounds.copy()
        rows[-1] += masked_rows
        wrong = [first for first in changes if first not in bounds[1:-1] or not bounds[0] < first]
        at = np.searchsorted(bounds, changes).tolist()
        if wrong:
            raise InvalidArgument(f"no step begins with sample {wrong[0]}; restore the steps")
        rows[0] = 0
        stages: list[tuple[int, StepSizes]] = []
        for begin, end in itertools.pairwise([0, *at, bounds.size - 1]):
            first, of_stage = int(rows[begin]), np.diff(bounds[begin : end + 1])
            of_stage[-1] = rows[end] - bounds[end - 1]
            every, left = (
                np.unique(changed[changed > 0]).tolist()
                for sizes in (of_stage, of_stage[max(0, past_steps - begin) :])
                for changed in [sizes[np.diff(sizes, prepend=0) != 0]]
            )
            is_plain = len(every) == 1 and int(bounds[begin]) == first
            if is_plain and not (ends and end == bounds.size - 1):
                stages.append((first, every[0]))
            else:
                relative = rows[begin : end + 1] - first
                stages.append(
                    (first, ListedSteps(bounds=relative, batch_sizes=tuple(left or every)))
                )
        return cls(stages=tuple(stages))

    def check_multiple_of(self, rows: int, begin: int = 0, end: int | None = None) -> None:
        """Refuse batch sizes that are not multiples of the rows of one micro batch on all ranks.

        Those of the steps from position ``begin`` to ``end`` alone.
        """
        for size in self.sizes(begin, end):
            if size % rows:
                raise InvalidArgument(
                    f"global batch size {size} must be a multiple of micro batch x data-parallel "
                    f"size = {rows}; change the batch, its schedule or the ranks"
                )

    def between(self, begin: int, end: int | None) -> tuple[tuple[int, StepSizes], ...]:
        """Return the stages of the steps from position ``begin`` to ``end`` alone."""
        at = self._stage_at(begin)
        later = [each for each in self.stages[at + 1 :] if end is None or each[0] < end]
        return (self.stages[at], *later)

    def _stage_at(self, position: int) -> int:
        return max(0, bisect_right(self.stages, position, key=itemgetter(0)) - 1)

    def sizes(self, begin: int = 0, end: int | None = None) -> list[int]:
        """Return the batch sizes of the steps from position ``begin`` to ``end``, in order."""
        each = (size for _, size in self.between(begin, end))
        found = ([size] if isinstance(size, int) else size.batch_sizes for size in each)
        return list(itertools.chain.from_iterable(found))

    @property
    def is_constant(self) -> bool:
        """True if the batch size does not change."""
        return len(self.stages) == 1 and isinstance(self.stages[0][1], int)

    @property
    def plain_stages(self) -> tuple[tuple[int, int], ...]:
        """First sample and batch size of each stage, of a schedule without draws of streams."""
        return tuple((first, size) for first, size in self.stages if isinstance(size, int))

    @property
    def final(self) -> int:
        """Batch size of the last stage, of a schedule without draws of streams."""
        return self.plain_stages[-1][1]

    def samples_after(self, iterations: int, start: int = 0) -> int:
        """Return the samples consumed after ``iterations`` iterations from ``start`` samples on."""
        position = start
        for run in self.runs(start):
            steps = iterations if run.steps is None else min(iterations, run.steps)
            position = run.samples_after(steps)
            iterations -= steps
            if not iterations:
                break
        return position

    def iterations_within(self, samples: int, start: int = 0) -> int:
        """Return the most iterations from ``start`` on that consume at most ``samples`` in all."""
        iterations = 0
        for run in self.runs(start):
            steps = max(0, run.within(samples))
            if run.steps is None or steps < run.steps:
                return iterations + steps
            iterations += run.steps
        return iterations

    def iterations_reaching(self, samples: int) -> int:
        """Return the fewest iterations that consume at least ``samples``."""
        iterations = self.iterations_within(samples)
        return iterations + (self.samples_after(iterations) < samples)

    def iterations_for(self, samples: int) -> int:
        """Return Megatron-LM's iterations for ``--train-samples``, from the first sample on.

        An incomplete last batch is dropped, except by a step schedule, which rounds up. A ramp runs
        one batch beyond its samples.
        """
        if self.ramp is None and not self.stepped:
            return self.iterations_within(samples)
        if self.ramp is None:
            return self.iterations_reaching(samples)
        iterations = self.iterations_within(min(self.ramp[2], samples)) + 1
        return iterations + max(0, samples - self.samples_after(iterations)) // self.final

    def runs(self, start: int, end: int | None = None) -> Iterator[StepRun]:
        """Yield the steps from position ``start`` on, up to the one that reaches ``end``.

        Raises:
            InvalidArgument: steps of a stream have a size of their own, and ``start`` lies inside
                one.
        """
        position = start
        for k in range(self._stage_at(start), len(self.stages)):
            first, size = self.stages[k]
            until = self.stages[k + 1][0] if k + 1 < len(self.stages) else end
            if until is not None and end is not None:
                until = min(until, end)
            if until is not None and position >= until:
                continue
            run = StepRun(position, size, 0, None)
            if not isinstance(size, int):
                run = StepRun(first, size, size.batches_within(max(0, position - first)), None)
                if run.samples_after(0) != position:
                    raise InvalidArgument(
                        f"sample {position} is not the first of a step: the steps of a stream with "
                        f"a batch_size of its own are those from sample {first} on, and the next "
                        f"one begins with sample {run.samples_after(1)}; continue from the end of "
                        "a step"
                    )
            if until is not None:
                run = run._replace(steps=run.reaching(until))
                position = run.samples_after(run.steps or 0)
            yield run


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Steps that follow each other: of one size, but perhaps for a shorter last one, or listed.

    Attributes:
        end: position behind the last one.
        size: size of the steps from position 0 on; 0: they are listed.
        listed (int64[steps + 1]): first position of each, and the end; None: they have a size.
    """

    end: int
    size: int = 0
    listed: I64 | None = None

    @classmethod
    def of(cls, bounds: I64) -> Steps:
        """Return the steps of these bounds."""
        return cls(end=int(bounds[-1]), listed=bounds)

    @property
    def count(self) -> int:
        """Number of steps."""
        return ceil_div(self.end, self.size) if self.listed is None else self.listed.size - 1

    @cached_property
    def bounds(self) -> I64:
        """int64[steps + 1]: first position of each step, and the end."""
        if self.listed is not None:
            return self.listed
        return np.append(np.arange(0, self.end, self.size, dtype=np.int64), self.end)

    def samples_after(self, step: int) -> int:
        """Return the first position of a step; of the number of steps, the end."""
        if self.listed is None:
            return min(step * self.size, self.end)
        return int(self.listed[step])

    def iterations_within(self, position: int) -> int:
        """Return the last step that begins at a position or before it; at the end, their number."""
        if self.listed is None:
            return self.count if position >= self.end else position // self.size
        return int(np.searchsorted(self.listed, position, "right")) - 1


def steps_of(schedule: BatchSchedule, consumed: int, total: int) -> tuple[Steps, int]:
    """Return the steps of a run, and the number of those before ``consumed``.

    The schedule divides the past from sample 0 on, the future from ``consumed`` on; the last step
    of each may be short. Batches of 4, 6 consumed of 12: bounds 0 4 6 10 12, 2 past steps.
    """
    check_between("--consumed-samples", consumed, 0, total, most_is="the samples of the run")
    if schedule.is_constant and consumed % schedule.final == 0:
        return Steps(end=total, size=schedule.final), consumed // schedule.final
    past = _step_starts(schedule, 0, consumed)
    future = _step_starts(schedule, consumed, total)
    return Steps.of(np.concatenate((past, future, [total]))), past.size


def _step_starts(schedule: BatchSchedule, begin: int, end: int) -> I64:
    """Return int64[steps]: the first samples of the steps from ``begin`` to ``end``."""
    starts = [np.empty(0, np.int64)]
    for run in schedule.runs(begin, end):
        sizes = run.sizes(run.steps or 0)
        starts.append(run.samples_after(0) + np.cumsum(sizes) - sizes)
    return np.concatenate(starts)


@dataclass(frozen=True, kw_only=True, eq=False)
class SkippedSteps:
    """Steps of a run with skips.

    Attributes:
        skips: the skips in positions.
        steps: the steps, those of moved samples at the end.
        masked_rows: rows of the last step that are padding without loss.
    """

    skips: Skips
    steps: Steps
    masked_rows: int


def skip_steps(
    settings: Sequence[Skip],
    schedule: BatchSchedule,
    steps: Steps,
    *,
    num_samples: int | None = None,
    masked_rows: int = 0,
) -> SkippedSteps | None:
    """Return the steps of a run with skips; None without any.

    ``steps`` are those of `steps_of`, of an order of ``num_samples``, by default those of the run.
    Moved samples that do not fill a step are served if the last step has ``masked_rows``, rows of
    padding.
    """
    skips = resolve_skips(
        settings,
        steps,
        num_samples=steps.end if num_samples is None else num_samples,
        train_samples=steps.end,
        drops_tail=False,
    )
    if skips is None:
        return None
    if not skips.num_moved:
        return SkippedSteps(skips=skips, steps=steps, masked_rows=masked_rows)
    bounds = steps.bounds.tolist()
    if masked_rows:
        bounds.pop()  # the rest of the last step is free
    masked = 0
    while bounds[-1] < skips.run_end:
        end = schedule.samples_after(1, bounds[-1])
        if end > skips.run_end and not masked_rows:
            break
        masked = max(0, end - skips.run_end)
        bounds.append(end - masked)
    moved = Steps.of(np.array(bounds, np.int64))
    return SkippedSteps(skips=skips, steps=moved, masked_rows=masked)


def parse_count(text: str, setting: str) -> int:
    """Return a whole number in digits or with K, M, B or T (powers of 1000): ``"1.5M"``."""
    digits, factor = _without_suffix(text.replace("_", ""))
    try:
        value = parse_fraction(digits) * factor
    except ValueError:
        value = Fraction(-1)
    if value.denominator != 1 or value < 0:
        raise InvalidArgument(
            f"{setting}: {text!r} is not a whole number >= 0; write one such as 1000 or 250B"
        )
    return int(value)


def _without_suffix(text: str) -> tuple[str, int]:
    """Return a number without its suffix, and the factor that the suffix stands for."""
    clean = text.strip().upper()
    factor = _SUFFIX.get(clean[-1:], 1)
    return clean[:-1] if factor > 1 else clean, factor


def _truncated(text: str, setting: str) -> int:
    """Return a number of a step schedule, computed in doubles and truncated as in Megatron-LM."""
    digits, factor = _without_suffix(text)
    try:
        return int(float(digits) * factor)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{setting}: {text!r} is not a number; write one such as 1000 or 250B"
        ) from None


def parse_schedule(text: str, sequence_length: int, setting: str) -> BatchSchedule:
    """Return the schedule of Megatron's ``"0:768 250B:1536"``: thresholds in tokens, batch sizes.

    Thresholds in samples are ``tokens // sequence_length``.
    """
    stages = []
    for entry in text.replace(",", " ").split():
        first, colon, size = entry.partition(":")
        if not colon:
            raise InvalidArgument(
                f"{setting}: {entry!r} is not TOKENS:BATCH; write for example '0:768 250B:1536'"
            )
        threshold = _truncated(first, setting) // sequence_length
        stages.append((threshold, _truncated(size, setting)))
    stages.sort()
    firsts = [first for first, _ in stages]
    if not stages or firsts[0] != 0 or len(set(firsts)) != len(firsts):
        raise InvalidArgument(
            f"{setting}: thresholds must start at 0 and differ by at least one sample of "
            f"{sequence_length} tokens, got {text!r}"
        )
    if min(size for _, size in stages) < 1:
        raise InvalidArgument(f"{setting}: every batch size must be at least 1, got {text!r}")
    return BatchSchedule(stages=tuple(stages), stepped=True)


def ramp_up(start: int, increment: int, samples: int, final: int, setting: str) -> BatchSchedule:
    """Return the schedule of Megatron's ``--rampup-batch-size start increment samples``.

    The batch size grows to ``final``, by ``int(c / (samples / increments))`` increments at ``c``
    samples, in doubles.
    """
    start, increment, samples, final = (
        check_integer(setting, value) for value in (start, increment, samples, final)
    )
    span = final - start
    if start < 1 or increment < 1 or samples < 0 or span < 0 or span % increment:
        raise InvalidArgument(
            f"{setting}: start {start} must reach the global batch size {final} in whole steps "
            f"of {increment} over {samples} >= 0 samples; change start or increment"
        )
    increments = span // increment
    if increments > _MOST_INCREMENTS or samples > _EXACT_DOUBLE:
        raise InvalidArgument(
            f"{setting}: {increments} increments over {samples} samples are too many; at most "
            f"{_MOST_INCREMENTS} over 2^53 samples are exact in doubles, in which Megatron counts"
        )
    if increments == 0 or samples == 0:
        raise InvalidArgument(
            f"{setting}: with {increments} increments over {samples} samples Megatron-LM divides "
            "by zero; remove it"
        )
    per_increment = samples / increments
    stages = [(0, start)]
    for step in range(1, increments + 1):
        first = max(0, ceil_div(step * samples, increments) - 1)
        while int(first / per_increment) < step:
            first += 1
        stages.append((first, start + step * increment))
    return BatchSchedule(stages=tuple(stages), ramp=(start, increment, samples))
