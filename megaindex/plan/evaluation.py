"""Validation and test: how many samples they draw, and what that builds."""

from __future__ import annotations

from megaindex.index.dialect import Dialect, Split
from megaindex.index.draws import Progress
from megaindex.plan.model import Evaluations, Row
from megaindex.plan.rows import empty_row, rows_of
from megaindex.plan.sources import Parts, sizing_of
from megaindex.recipe.run import Run


def evaluation_of(run: Run, train_iters: int, parts: Parts) -> Evaluations | None:
    """Megatron and NeoX: (I // interval + 1) evaluations of eval_iters batches, then one test."""
    if not parts["valid"] and not parts["test"]:
        return None
    evaluation = run.evaluation
    size = evaluation.batch_size or run.batch.final
    before = run.batch.iterations_within(run.consumed_samples)
    rounds = (before + train_iters) // evaluation.interval + 1
    return Evaluations(
        rounds=rounds,
        valid_samples=rounds * evaluation.iterations * size,
        test_samples=evaluation.iterations * size,
        batch_size=size,
    )


def evaluation_rows(
    run: Run,
    row: Dialect,
    parts: Parts,
    evaluation: Evaluations | None,
    progress: Progress | None,
) -> tuple[Row, ...]:
    """Rows of validation and test; a source without a sample there has an empty row."""
    if evaluation is None:
        return ()
    rows: tuple[Row, ...] = ()
    wanted: dict[Split, int] = {"valid": evaluation.valid_samples, "test": evaluation.test_samples}
    for split, samples in wanted.items():
        needed = 1 if row.is_framework else run.sequence_length + 1
        filled = [part for part in parts[split] if part.tokens >= needed]
        if filled:
            sizing = sizing_of(run, row, filled, split, progress, parts["train"])
            rows += rows_of(run, sizing, filled, split, requested=samples, consumed=samples)
        rows += tuple(
            empty_row(part, split, number)
            for number, part in enumerate(parts[split], 1)
            if part not in filled
        )
    return rows
