"""``--check``, and what the frameworks' common buffer would have done."""

from __future__ import annotations

from dataclasses import replace

from megaindex.index.dialect import dialect
from megaindex.plan.advice import dead_loaders
from megaindex.plan.model import BufferEffect, Plan, Row
from megaindex.plan.sizing import Sizing
from megaindex.plan.target import Aim
from megaindex.recipe.run import Run

COMMON_BUFFER = 1.005


def check_failures(run: Run, plan: Plan) -> tuple[str, ...]:
    """Reasons for which ``--check`` fails."""
    reasons = [*dead_loaders(run, plan)]
    epochs = plan.num_epochs_built
    if epochs is not None and epochs > (allowed := _epochs_asked(run)):
        last = plan.max_train_iters_without_repeat if allowed == 1 else 0
        hint = f"; at most {last} repeat nothing" if last else ""
        reasons.append(f"{plan.train_iters} iterations build {epochs} epochs{hint}")
    passes = run.target.value if run.target.kind == "loader_epochs" else 1
    reasons += [
        f"the loader starts over after {loader.samples_counted} samples"
        for loader in plan.loaders
        if loader.split == "train" and 0 < loader.samples_counted * passes < loader.samples_read
    ]
    if short := _short(plan):
        reasons.append(f"{', '.join(short)}: drawn more often than built")
    reasons += [
        f"{dry.split}: {dry.samples_read} samples are read of {dry.samples_there}: the run stops"
        for dry in plan.dry_loaders
        if dry.samples_read
    ]
    if plan.train_iters == 0:
        reasons.append("no full iteration: the target holds less than one batch")
    if plan.samples_left_over > plan.global_batch_size:
        reasons.append(
            f"{plan.samples_left_over} samples stay unseen, more than one batch of "
            f"{plan.global_batch_size}"
        )
    return tuple(reasons)


def buffer_effect(run: Run, sizing: Sizing, aim: Aim) -> BufferEffect | None:
    """What 1.005 would have done where it is not in force; our orders are held to Megatron's."""
    if sizing.one_epoch_only or (sizing.buffer == COMMON_BUFFER and sizing.row.is_framework):
        return None
    if sizing.asks_one_epoch:
        return None
    if sizing.row.exact_num_epochs is not None:  # then no buffer changes what is built
        return None
    weights = sizing.weights or (None if sizing.single else tuple(sizing.per_epoch()))
    row = sizing.row if sizing.row.is_framework else dialect("megatron")
    other = replace(sizing, row=row, buffer=COMMON_BUFFER, weights=weights)
    requested = other.requested(aim.samples_requested)
    assert requested is not None
    epochs = other.epochs(requested)
    drawn = sizing.draws.counts(aim.samples_consumed)
    longest, _ = other.longest([1] * len(epochs))
    built = other.built(requested, epochs)
    return BufferEffect(
        variance_buffer=COMMON_BUFFER,
        num_epochs_built=max(epochs),
        samples_built=sum(built),
        max_train_iters_without_repeat=run.batch.iterations_within(longest, run.consumed_samples),
        short=None
        if drawn is None
        else tuple(name for name, d, b in zip(sizing.names, drawn, built, strict=True) if d > b),
    )


def _epochs_asked(run: Run) -> int:
    """Epochs that the target names; one where it names iterations, samples or tokens."""
    if run.target.kind != "epochs":
        return 1
    return max(
        -(-epochs.numerator // epochs.denominator)
        for epochs in run.target.per_source or (run.target.value,)
    )


def _short(plan: Plan) -> list[str]:
    train = plan.rows("train")
    return [row.name for row in train if _is_short(row)]


def _is_short(row: Row) -> bool:
    drawn = row.drawn_by_blend
    return drawn is not None and row.built is not None and drawn > row.built
