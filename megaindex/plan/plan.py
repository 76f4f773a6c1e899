"""From a `Run` to a `Plan`: the order of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from megaindex.configs.run import Run
from megaindex.index.blending import Progress
from megaindex.plan import advice
from megaindex.plan.advice import buffer_effect, check_failures
from megaindex.plan.model import Evaluations, LoaderEnd, Phase, Plan, RankShare, Row
from megaindex.plan.rows import evaluation_of, evaluation_rows, rows_of
from megaindex.plan.serving import reading_of
from megaindex.plan.sizing import Sizing, SplitPart
from megaindex.plan.sources import parts_of, sizing_of
from megaindex.plan.target import (
    PlanTarget,
    aim_of,
    dry_loaders,
    limits_of,
    permuted,
    phases_of,
    tails_of,
)


def make_plan(run: Run, *, progress: Progress | None = None) -> Plan:
    """The exact plan of a run.

    Args:
        run: what is trained, on what, for how long.
        progress: told while the draws of a greedy blend, or coverage, are counted.

    Raises:
        InvalidArgument: the run cannot be planned; the message names the setting.
        FormatError, StorageError: a dataset cannot be read.
    """
    row = run.row
    parts = parts_of(run.data, row, run.packing, run.sequence_length)
    sizing = sizing_of(run, row, parts["train"], "train", progress)
    aim = aim_of(run, sizing)
    phases = phases_of(run, aim.train_iters)
    train = _train_rows(run, sizing, parts["train"], aim, phases)
    evaluation = evaluation_of(run, aim.train_iters, parts)
    limits = limits_of(run, sizing, train)
    rows = train + evaluation_rows(run, row, parts, evaluation, progress)
    if run.dataloader == "cyclic":
        rows = permuted(rows)
    plan = Plan(
        order=run.row.order,
        framework=row.framework,
        sequence_length=run.sequence_length,
        variance_buffer=sizing.buffer if row.is_framework else "exact",
        tail=run.tail,
        target=_target_text(run),
        global_batch_size=run.batch.final,
        batch_schedule=run.batch.stages,
        consumed_samples=run.consumed_samples,
        **_totals(run, sizing, aim, train),
        max_train_iters_without_repeat=limits.without_repeat,
        max_train_iters_same_epochs=limits.same_epochs,
        max_train_iters_exact=limits.exact,
        neighbours=limits.neighbours,
        tails=tails_of(run, sizing),
        datasets=rows,
        dry_loaders=dry_loaders(run, aim, rows, evaluation),
        evaluation=evaluation,
        ranks=_ranks(run, aim),
        phases=phases,
        buffer_effect=None if phases else buffer_effect(run, sizing, aim),
        loaders=_loaders(run, rows, aim, evaluation),
        framework_version=None if run.version is None else run.version.name,
        ignored_settings=run.ignored,
    )
    return replace(
        plan,
        caution=advice.caution(run, sizing, plan),
        warnings=advice.warnings(run, sizing, plan),
        check_failures=check_failures(run, plan),
    )


def _train_rows(
    run: Run, sizing: Sizing, parts: Sequence[SplitPart], aim: PlanTarget, phases: Sequence[Phase]
) -> tuple[Row, ...]:
    """Rows of the train split, for each phase apart."""
    if not phases:
        return rows_of(
            run,
            sizing,
            parts,
            "train",
            requested=aim.samples_requested,
            consumed=aim.samples_consumed,
        )
    rows: tuple[Row, ...] = ()
    for number, phase in enumerate(phases, 1):
        rows += rows_of(
            run,
            sizing,
            parts,
            "train",
            requested=phase.samples,
            consumed=phase.samples,
            phase=number,
        )
    return rows


def _totals(run: Run, sizing: Sizing, aim: PlanTarget, train: Sequence[Row]) -> dict[str, Any]:
    """The figures of the train split as a whole."""
    tokens_consumed = aim.samples_consumed * run.sequence_length
    built = [row.built for row in train if row.built is not None]
    epochs = [row.epochs for row in train if row.epochs is not None]
    samples_left = max(0, aim.samples_in_view - aim.samples_consumed)
    tokens_left = max(0, aim.tokens_in_view - tokens_consumed)
    if sizing.asks_one_epoch:  # passes draw some samples more often than others
        distinct = sum(row.distinct or 0 for row in train)
        samples_left = sum(row.samples_per_epoch for row in train) - distinct
        tokens_left = sum(sizing.tokens) - distinct * run.sequence_length
    return {
        "train_iters": aim.train_iters,
        "tokens_per_epoch": sum(sizing.tokens),
        "samples_per_epoch": sum(row.samples_per_epoch for row in train[: len(sizing.tokens)]),
        "samples_consumed": aim.samples_consumed,
        "samples_left_over": samples_left,
        "tokens_consumed": tokens_consumed,
        "tokens_left_over": tokens_left,
        "samples_built": sum(built) if len(built) == len(train) else None,
        "num_epochs_built": max(epochs) if len(epochs) == len(train) else None,
    }


def _loaders(
    run: Run, rows: Sequence[Row], aim: PlanTarget, evaluation: Evaluations | None
) -> tuple[LoaderEnd, ...]:
    """The loaders that start over; a split without data has none."""
    read = {"train": aim.samples_consumed}
    if evaluation is not None:
        read |= {"valid": evaluation.valid_samples, "test": evaluation.test_samples}
    loaders = []
    for split, samples in read.items():
        built = [row.built or 0 for row in rows if row.split == split and row.tokens_per_epoch]
        limit = reading_of(run, built, split, samples).limit
        if built and limit is not None:
            loaders.append(LoaderEnd(split=split, samples_counted=limit, samples_read=samples))
    return tuple(loaders)


def _ranks(run: Run, aim: PlanTarget) -> RankShare | None:
    parallel = run.data_parallel_size
    if parallel is None or run.batch.final % parallel:
        return None
    per_rank = (aim.samples_consumed - run.consumed_samples) // parallel
    micro = run.micro_batch_size
    return RankShare(
        data_parallel_size=parallel,
        samples_per_rank=per_rank,
        micro_batches_per_rank=None if micro is None else per_rank // micro,
    )


def _target_text(run: Run) -> str:
    target = run.target
    if target.per_source:
        return f"{', '.join(map(_number, target.per_source))} epochs"
    if target.kind == "loader_epochs":
        return f"train_epochs {target.value}"
    unit = target.kind if target.value != 1 else target.kind.removesuffix("s")
    return f"{_number(target.value)} {unit}"


def _number(value: Fraction) -> str:
    """As a decimal where it is one, else as a fraction."""
    decimal = f"{float(value):.15g}"
    return decimal if Fraction(decimal) == value else str(value)
