"""Effect of the skips of a run on its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megaindex._types import I64
from megaindex.index.skips import SkippedIndex, Skips, masked_tokens
from megaindex.index.spans import Index


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """Tokens of one source whose loss is masked."""

    source: str
    tokens: int
    """Labels of the samples served that are tokens of masked documents."""


@dataclass(frozen=True, kw_only=True)
class SkipEffect:
    """Effect of the skips of a run; steps count from 0.

    Attributes:
        steps_dropped: steps that are not made.
        samples_dropped: their samples.
        steps_moved: steps whose samples are served behind the end.
        samples_moved: their samples.
        samples_left_over: moved samples that do not fill a step and are not served.
        steps_made: steps that the run makes, those of moved samples included.
        samples_to_read: samples of these steps that are not consumed yet.
        samples_padded: rows of the last step that are padding.
        first_masked_step: first step with masked documents; None without any.
        masked_documents: documents named in the skips, whole sources not counted.
        masked: tokens without loss for each source; None where they were not counted.
    """

    steps_dropped: int
    samples_dropped: int
    steps_moved: int
    samples_moved: int
    samples_left_over: int
    steps_made: int
    samples_to_read: int
    samples_padded: int
    first_masked_step: int | None
    masked_documents: int
    masked: tuple[MaskEffect, ...] | None

    @property
    def tokens_masked(self) -> int | None:
        """Tokens without loss of all sources; None where they were not counted."""
        return None if self.masked is None else sum(row.tokens for row in self.masked)

    def counted(self, index: Index, names: Sequence[str]) -> SkipEffect:
        """Return the effect with the tokens without loss in an index with skips."""
        if self.first_masked_step is None or not isinstance(index, SkippedIndex):
            return self
        end = index.skips.run_end - self.samples_left_over
        counts = masked_tokens(index, len(names), end)
        masked = [
            MaskEffect(source=name, tokens=count)
            for name, count in zip(names, counts.tolist(), strict=True)
            if count
        ]
        return replace(self, masked=tuple(masked))

    @property
    def changes_counts(self) -> bool:
        """True if samples of the order are not served."""
        return bool(self.steps_dropped or self.samples_left_over)

    @property
    def warning(self) -> str:
        """Warning that draws of a plan are those of the order, where skips cannot be counted."""
        return (
            "draws, epochs and coverage are those of the order, skipped samples included; "
            "`megaindex audit` counts what is served"
        )

    def lines(self) -> Iterator[str]:
        """Yield the sentences of the printed plan."""
        for steps, samples, what in (
            (self.steps_dropped, self.samples_dropped, "dropped"),
            (self.steps_moved, self.samples_moved, "moved behind the end"),
        ):
            if steps:
                yield f"{_count(steps, 'step')} {what}, {_count(samples, 'sample')}"
        if self.samples_left_over:
            left = _count(self.samples_left_over, "moved sample")
            yield f"{left} of an incomplete last step not served; tail pad serves them"
        if self.steps_dropped or self.steps_moved:
            yield f"{_count(self.steps_made, 'step')} made in all"
        if self.first_masked_step is not None:
            start = f"from step {self.first_masked_step:,} on"
            if self.masked is None:
                yield f"loss masked {start}; the tokens were not counted, which needs the files"
            else:
                rows = ", ".join(f"{row.source} {row.tokens:,}" for row in self.masked)
                total = _count(self.tokens_masked or 0, "token")
                yield f"loss of {total} masked {start}" + (f": {rows}" if rows else "")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def effect_of(skips: Skips, bounds: I64, *, masked_rows: int = 0, consumed: int = 0) -> SkipEffect:
    """Return the effect of skips, whose masked tokens are not counted yet.

    Args:
        skips: the skips in positions.
        bounds (int64[steps + 1]): positions of the steps, those of moved samples at the end.
        masked_rows: rows of the last step that are padding.
        consumed: position at which a resumed run begins.
    """
    numbers = {
        move: sum(
            last + 1 - first for s in skips.settings if s.move is move for first, last in s.ranges
        )
        for move in (False, True)
    }
    firsts = [s.from_step for s in skips.settings if s.from_step is not None]
    return SkipEffect(
        steps_dropped=numbers[False],
        samples_dropped=skips.num_skipped - skips.num_moved,
        steps_moved=numbers[True],
        samples_moved=skips.num_moved,
        samples_left_over=max(0, skips.run_end - int(bounds[-1])),
        steps_made=bounds.size - 1 - sum(numbers.values()),
        samples_to_read=skips.served_before(int(bounds[-1])) - skips.served_before(consumed),
        samples_padded=masked_rows,
        first_masked_step=min(firsts, default=None),
        masked_documents=sum(m.documents.size for m in skips.masks if m.documents is not None),
        masked=None if firsts else (),
    )
