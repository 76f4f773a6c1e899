"""Batch sizes and their schedule over a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.skips import Skip, Skips, resolve_skips
from megaindex.validation import check_between, check_integer, check_setting, parse_fraction

_MOST_INCREMENTS = 1_000_000
_EXACT_DOUBLE = 2**53
_SUFFIX = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Global batch sizes over a run, as stages (first sample, batch size).

    The batch size of a stage holds from the first iteration at or after its first sample:
    ((0, 2), (5, 3)) consumes 2, 2, 2, 3, 3, … samples, since 6 are consumed after three iterations.

    Attributes:
        stages: first sample and batch size of each stage, in order.
        ramp: start, increment and samples of Megatron's ``--rampup-batch-size``; None for
            others.
        stepped: True for a schedule of Megatron's ``--step-batch-size-schedule``.

    Raises:
        InvalidArgument: the stages do not begin with sample 0, fall, or have a batch below 1.
    """

    stages: tuple[tuple[int, int], ...]
    ramp: tuple[int, int, int] | None = None
    stepped: bool = False

    def __post_init__(self) -> None:
        plain = tuple(
            (check_integer("the first sample of a stage", first), check_integer("a batch", size))
            for first, size in self.stages
        )
        object.__setattr__(self, "stages", plain)
        firsts = [first for first, _ in self.stages]
        in_order = all(a <= b for a, b in itertools.pairwise(firsts))
        if not firsts or firsts[0] != 0 or not in_order or min(n for _, n in self.stages) < 1:
            raise InvalidArgument(
                "the stages of a batch schedule must begin with sample 0, not fall, and have "
                f"batches of at least 1 sample, got {self.stages}"
            )

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Return the schedule of one batch size."""
        return cls(stages=((0, check_setting("global_batch_size", size)),))

    def check_multiple_of(self, rows: int) -> None:
        """Refuse batch sizes that are not multiples of the rows of one micro batch on all ranks."""
        for _, size in self.stages:
            if size % rows:
                raise InvalidArgument(
                    f"global batch size {size} must be a multiple of micro batch x data-parallel "
                    f"size = {rows}; change the batch, its schedule or the ranks"
                )

    def between(self, begin: int, end: int | None) -> BatchSchedule:
        """Return the sizes of the steps from position ``begin`` to ``end`` alone."""
        at = max(k for k, (first, _) in enumerate(self.stages) if first <= begin)
        kept = [each for each in self.stages[at + 1 :] if end is None or each[0] < end]
        return BatchSchedule(stages=((0, self.stages[at][1]), *kept))

    @property
    def is_constant(self) -> bool:
        """True if the batch size does not change."""
        return len(self.stages) == 1

    @property
    def final(self) -> int:
        """Batch size of the last stage."""
        return self.stages[-1][1]

    def samples_after(self, iterations: int, start: int = 0) -> int:
        """Return the samples consumed after ``iterations`` iterations from ``start`` samples on."""
        position = start
        for (_, size), end in self._bounds():
            steps = iterations
            if end is not None:
                steps = min(steps, ceil_div(max(0, end - position), size))
            position += steps * size
            iterations -= steps
        return position

    def iterations_within(self, samples: int, start: int = 0) -> int:
        """Return the most iterations from ``start`` on that consume at most ``samples`` in all."""
        position, iterations = start, 0
        for (_, size), end in self._bounds():
            steps = max(0, samples - position) // size
            if end is not None:
                steps = min(steps, ceil_div(max(0, end - position), size))
            position += steps * size
            iterations += steps
            if end is None or position < end:
                break
        return iterations

    def iterations_for(self, samples: int) -> int:
        """Return Megatron-LM's iterations for ``--train-samples``, from the first sample on.

        An incomplete last batch is dropped, except by a step schedule, which rounds up. A ramp runs
        one batch beyond its samples.
        """
        if self.ramp is None and not self.stepped:
            return self.iterations_within(samples)
        if self.ramp is None:
            iterations = self.iterations_within(samples)
            return iterations + (self.samples_after(iterations) < samples)
        iterations = self.iterations_within(min(self.ramp[2], samples)) + 1
        return iterations + max(0, samples - self.samples_after(iterations)) // self.final

    def _bounds(self) -> list[tuple[tuple[int, int], int | None]]:
        ends = [first for first, _ in self.stages[1:]]
        return list(zip(self.stages, [*ends, None], strict=True))


def step_bounds(schedule: BatchSchedule, consumed: int, total: int) -> tuple[I64, int]:
    """Return the bounds of the steps, and the number of steps before ``consumed``.

    The schedule divides the past from sample 0 on, the future from ``consumed`` on; the last step
    of each may be short. Batches of 4, 6 consumed of 12: bounds 0 4 6 10 12, 2 past steps.
    """
    check_between("--consumed-samples", consumed, 0, total, most_is="the samples of the run")
    past = _step_starts(schedule, 0, consumed)
    future = _step_starts(schedule, consumed, total)
    return np.array([*past, *future, total], np.int64), len(past)


def _step_starts(schedule: BatchSchedule, begin: int, end: int) -> list[int]:
    """Return the first samples of the steps from ``begin`` to ``end``."""
    starts: list[int] = []
    stages = [*schedule.stages[1:], (end, 0)]
    for (_, size), (until, _) in zip(schedule.stages, stages, strict=True):
        steps = range(begin, min(until, end), size)
        starts += steps
        if steps:
            begin = steps[-1] + size
    return starts


@dataclass(frozen=True, kw_only=True, eq=False)
class SkippedSteps:
    """Steps of a run with skips.

    Attributes:
        skips: the skips in positions.
        bounds (int64[steps + 1]): positions of the steps, those of moved samples at the end.
        masked_rows: rows of the last step that are padding without loss.
    """

    skips: Skips
    bounds: I64
    masked_rows: int


def skip_steps(
    settings: Sequence[Skip],
    schedule: BatchSchedule,
    bounds: I64,
    *,
    num_samples: int,
    masked_rows: int = 0,
) -> SkippedSteps | None:
    """Return the steps of a run with skips; None without any.

    Args:
        settings: the skips.
        schedule: batch sizes over the run.
        bounds (int64[steps + 1]): positions of the steps without skips, as of `step_bounds`.
        num_samples: samples of the order.
        masked_rows: rows of the last step that are padding; if there are any, moved samples that do
            not fill a step are served too, else they are not.

    Raises:
        InvalidArgument: a skip does not fit the run, see `resolve_skips`.
    """
    skips = resolve_skips(
        settings,
        _Bounds(bounds),
        num_samples=num_samples,
        train_samples=int(bounds[-1]),
        drops_tail=False,
    )
    if skips is None:
        return None
    if not skips.num_moved:
        return SkippedSteps(skips=skips, bounds=bounds, masked_rows=masked_rows)
    steps = bounds[:-1].tolist() if masked_rows else bounds.tolist()  # the rest of the last is free
    masked = 0
    while steps[-1] < skips.run_end:
        end = schedule.samples_after(1, steps[-1])
        if end > skips.run_end and not masked_rows:
            break
        masked = max(0, end - skips.run_end)
        steps.append(end - masked)
    return SkippedSteps(skips=skips, bounds=np.array(steps, np.int64), masked_rows=masked)


@dataclass(frozen=True)
class _Bounds:
    """Bounds of steps in place of a schedule."""

    bounds: I64

    def samples_after(self, iterations: int, start: int = 0) -> int:  # noqa: ARG002
        return int(self.bounds[min(iterations, self.bounds.size - 1)])

    def iterations_within(self, samples: int, start: int = 0) -> int:  # noqa: ARG002
        return int(np.searchsorted(self.bounds, samples, "right")) - 1


def parse_count(text: str, setting: str) -> int:
    """Return a whole number, written in digits or with K, M, B or T (powers of 1000): ``"1.5M"``.

    Raises:
        InvalidArgument: the text is not such a number, or the number is negative or not whole.
    """
    clean = text.strip().upper().replace("_", "")
    factor = _SUFFIX.get(clean[-1:], 1)
    try:
        value = parse_fraction(clean[:-1] if factor > 1 else clean) * factor
    except ValueError:
        value = Fraction(-1)
    if value.denominator != 1 or value < 0:
        raise InvalidArgument(
            f"{setting}: {text!r} is not a whole number >= 0; write one such as 1000 or 250B"
        )
    return int(value)


def _truncated(text: str, setting: str) -> int:
    """Return a number of a step schedule, computed in doubles and truncated as in Megatron-LM."""
    clean = text.strip().upper()
    factor = _SUFFIX.get(clean[-1:], 1)
    try:
        return int(float(clean[:-1] if factor > 1 else clean) * factor)
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
