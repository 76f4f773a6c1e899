"""Validation and test: how many samples they draw, and what that builds."""

from __future__ import annotations

from collections.abc import Sequence

from megaindex.errors import InvalidArgument
from megaindex.index.dialect import Dialect, Split
from megaindex.index.draws import Progress
from megaindex.kernels.sizes import ceil_div
from megaindex.plan.corpus import Part
from megaindex.plan.model import Evaluations, Row
from megaindex.plan.rows import empty_row, rows_of
from megaindex.plan.sources import Parts, sizing_of
from megaindex.recipe.run import Run


def evaluation_of(run: Run, train_iters: int, parts: Parts) -> Evaluations | None:
    """Megatron and NeoX: (I // interval + 1) evaluations of eval_iters batches, then one test.

    Raises:
        InvalidArgument: the framework refuses such an evaluation.
    """
    if run.evaluation.full or run.evaluation.multiple:
        _check_whole(run, parts)
    if not parts["valid"] and not parts["test"]:
        return None
    evaluation = run.evaluation
    size = evaluation.batch_size or run.nominal_batch
    total = run.batch.iterations_within(run.consumed_samples) + train_iters
    rounds = max(0, total // evaluation.interval + 1 - evaluation.start // evaluation.interval)
    # The last evaluation comes after training, whatever the first one is.
    begun = max(1, ceil_div(evaluation.start, evaluation.interval))
    rounds_run = max(0, total // evaluation.interval + 1 - begun) + 1
    if evaluation.alone:
        rounds = rounds_run = 1
    samples = evaluation.iterations * size
    if evaluation.full:
        return _whole(run, parts, rounds_run, size)
    return Evaluations(
        rounds=rounds,
        valid_samples=rounds * samples,
        test_samples=samples,
        batch_size=size,
        rounds_run=rounds_run,
        valid_samples_read=rounds_run * samples,
        test_samples_read=samples,
        iterations=(evaluation.iterations,),
    )


def _check_whole(run: Run, parts: Parts) -> None:
    """What Megatron-LM requires of --full-validation and --multiple-validation-sets."""
    evaluation = run.evaluation
    if run.row.order != "megatron":
        raise InvalidArgument(
            f"--full-validation is of Megatron-LM, and order {run.row.order} is not its; remove it"
        )
    if not evaluation.full:
        raise InvalidArgument(
            "--multiple-validation-sets requires --full-validation, or Megatron-LM stops with a "
            "NotImplementedError; give both, or neither"
        )
    if any(part.source.weight is not None for part in parts["valid"]):
        raise InvalidArgument(
            "--full-validation with weights of the validation data: Megatron-LM stops with an "
            "AssertionError (size_is_none => weights_are_none); remove the weights, or give "
            "--valid-data-path its own without any"
        )
    if not any(part.tokens > 0 for part in parts["valid"]):
        raise InvalidArgument(
            "--full-validation without validation data: Megatron-LM stops with a TypeError; give "
            "--valid-data-path, or a share of --split"
        )
    if run.unit is None:
        raise InvalidArgument(
            "--full-validation counts the samples of each rank: give --micro-batch-size and "
            "--world-size"
        )


def _whole(run: Run, parts: Parts, rounds: int, size: int) -> Evaluations:
    """Every evaluation runs through each validation dataset, in batches that start it over."""
    evaluation, version = run.evaluation, run.version
    ranks = run.data_parallel_size
    assert version is not None, "order megatron has one"
    assert ranks is not None, "checked by _check_whole"
    micro = evaluation.micro_batch_size or 1
    held = [
        run.row.samples_in_epochs(1, part.tokens, run.sequence_length) for part in parts["valid"]
    ]
    own = evaluation.multiple and run.data.split is None
    sets = held if own else [sum(held)]
    by_rank = version.full_validation == "ranks"
    iterations = tuple(ceil_div(samples, ranks) if by_rank else samples for samples in sets)
    # One sample a rank in each micro batch, or a micro batch.
    each = size // (micro * ranks) * ranks if by_rank else size
    return Evaluations(
        rounds=rounds,
        valid_samples=sum(held),
        test_samples=evaluation.iterations * size,
        batch_size=size,
        rounds_run=rounds,
        valid_samples_read=rounds * sum(iterations) * each,
        # Megatron runs the test for as many iterations as the validation.
        test_samples_read=sum(iterations) * size,
        full=True,
        iterations=iterations,
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
        if split == "valid" and evaluation.full:
            rows += _one_pass(run, row, parts, filled, progress)
        elif filled:
            sizing = sizing_of(run, row, filled, split, progress, parts["train"])
            rows += rows_of(run, sizing, filled, split, requested=samples, consumed=samples)
        rows += tuple(
            empty_row(part, split, number)
            for number, part in enumerate(parts[split], 1)
            if part not in filled
        )
    return rows


def _one_pass(
    run: Run, row: Dialect, parts: Parts, filled: Sequence[Part], progress: Progress | None
) -> tuple[Row, ...]:
    """Rows of full validation: each source is built for one epoch, and read whole."""
    rows: tuple[Row, ...] = ()
    for part in filled:
        sizing = sizing_of(run, row, [part], "valid", progress, parts["train"])
        held = sizing.per_epoch()[0]
        (one,) = rows_of(run, sizing, [part], "valid", requested=held, consumed=held)
        rows += (one.at(parts["valid"].index(part) + 1),)
    return rows
