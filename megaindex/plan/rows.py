"""The rows of a plan: every source of every split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaindex.plan.corpus import Part
from megaindex.plan.coverage import Draw, coverage_of
from megaindex.plan.model import Coverage, Row
from megaindex.plan.sizing import Sizing
from megaindex.recipe.run import Run


def rows_of(
    run: Run,
    sizing: Sizing,
    parts: Sequence[Part],
    split: str,
    *,
    requested: int,
    consumed: int,
    phase: int | None = None,
) -> tuple[Row, ...]:
    """Rows of one split: ``requested`` samples asked of its blend, ``consumed`` drawn from it."""
    asked = sizing.requested(requested)
    epochs = None if asked is None else sizing.epochs(asked)
    built = None if epochs is None else sizing.samples_of(epochs)
    drawn = sizing.draws.counts(consumed)
    bounds = sizing.draws.bounds(consumed)
    in_blend = sizing.draws.counts(sizing.blend_size(requested))
    per_epoch = sizing.per_epoch()
    rows = []
    for i, part in enumerate(parts):
        count = None if drawn is None else drawn[i]
        row = Row(
            split=split,
            phase=phase,
            source=i + 1,
            path=part.source.path,
            weight=None if sizing.weights is None else float(sizing.weights[i]),
            tokens_per_epoch=part.tokens,
            samples_per_epoch=per_epoch[i],
            requested=None if asked is None else asked[i],
            drawn=count,
            drawn_bounds=bounds[i],
            drawn_by_blend=None if in_blend is None else in_blend[i],
            built=None if built is None else built[i],
            epochs=None if epochs is None else epochs[i],
            repeated=None if count is None else max(0, count - per_epoch[i]),
            coverage=Coverage(method="none"),
        )
        rows.append(_covered(run, sizing, part, row))
    return tuple(rows)


def empty_row(part: Part, split: str, source: int) -> Row:
    """A source that holds no sample in this split."""
    return Row(
        split=split,
        phase=None,
        source=source,
        path=part.source.path,
        weight=part.source.weight,
        tokens_per_epoch=part.tokens,
        samples_per_epoch=0,
        requested=0,
        drawn=0,
        drawn_bounds=(0, 0),
        drawn_by_blend=0,
        built=0,
        epochs=0,
        repeated=0,
        coverage=Coverage(method="none"),
    )


def _covered(run: Run, sizing: Sizing, part: Part, row: Row) -> Row:
    """The row with its coverage; uncounted draws are taken at the middle of their bounds."""
    if row.requested is None or row.epochs is None or row.built is None:
        return row
    likely = sum(row.drawn_bounds) // 2
    draw = Draw(
        row=sizing.row,
        part=part,
        sequence_length=run.sequence_length,
        seed=run.seed,
        requested=row.requested,
        epochs=row.epochs,
        built=row.built,
        per_epoch=row.samples_per_epoch,
        drawn=likely if row.drawn is None else row.drawn,
        counted=row.drawn is not None,
    )
    return replace(row, coverage=coverage_of(draw, run.coverage, sizing.progress))
