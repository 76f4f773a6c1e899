"""Rows of a plan: every source of every split, evaluation included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaindex.arithmetic import ceil_div
from megaindex.configs.batch_schedule import SkippedSteps
from megaindex.configs.run import Run
from megaindex.errors import InvalidArgument
from megaindex.index.blending import Progress
from megaindex.index.frameworks import FrameworkRules, Split
from megaindex.plan.coverage import SourceDraw, coverage_of
from megaindex.plan.model import Evaluations, Row
from megaindex.plan.serving import (
    ServedRange,
    drawn_bounds,
    drawn_from,
    loader_passes,
    samples_served,
)
from megaindex.plan.sizing import BUILD_LIMIT, Sizing, SplitPart, packing_facts
from megaindex.plan.sources import (
    Parts,
    index_of_part,
    packing_coverage,
    packing_error,
    samples_of_first_pass,
    sizing_of,
)


def evaluation_of(run: Run, train_iters: int, parts: Parts) -> Evaluations | None:
    """Return the evaluations of a run, None without data for them.

    Megatron and NeoX: (I // interval + 1) evaluations of eval_iters batches, then one test.

    Raises:
        InvalidArgument: the framework refuses such an evaluation.
    """
    if run.evaluation.full or run.evaluation.multiple:
        _check_full_validation(run, parts)
    if not parts["valid"] and not parts["test"]:
        return None
    evaluation = run.evaluation
    size = evaluation.batch_size or run.nominal_batch
    total = run.batch.iterations_within(run.consumed_samples) + train_iters
    rounds = max(0, total // evaluation.interval + 1 - evaluation.start // evaluation.interval)
    first = max(1, ceil_div(evaluation.start, evaluation.interval))
    rounds_run = max(0, total // evaluation.interval + 1 - first) + 1  # one more after training
    rounds_run -= sum(  # Megatron-LM leaves the evaluation after a skipped iteration out
        first * evaluation.interval <= number <= total and number % evaluation.interval == 0
        for number in run.iterations_to_skip
    )
    if evaluation.alone:
        rounds = rounds_run = 1
    samples = evaluation.iterations * size
    if evaluation.full:
        return _full_validation(run, parts, rounds_run, size)
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


def _check_full_validation(run: Run, parts: Parts) -> None:
    """Check the rules of Megatron-LM for --full-validation and --multiple-validation-sets."""
    evaluation = run.evaluation
    if run.row.order != "megatron":
        raise InvalidArgument(
            f"--full-validation is a setting of order megatron, not {run.row.order}; remove it"
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
            "--valid-data-path without weights"
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


def _full_validation(run: Run, parts: Parts, rounds: int, size: int) -> Evaluations:
    """Return the evaluations of --full-validation, each of which reads all validation datasets."""
    evaluation, version = run.evaluation, run.version
    ranks = run.data_parallel_size
    assert version is not None, "order megatron has one"
    assert ranks is not None, "checked by _check_full_validation"
    micro = evaluation.micro_batch_size or 1
    held = [
        run.row.samples_in_epochs(1, part.tokens, run.sequence_length) for part in parts["valid"]
    ]
    own = evaluation.multiple and run.data.split is None
    sets = held if own else [sum(held)]
    by_rank = version.full_validation == "ranks"
    iterations = tuple(ceil_div(samples, ranks) if by_rank else samples for samples in sets)
    # each rank reads one sample of each micro batch, or all of it
    each = size // (micro * ranks) * ranks if by_rank else size
    return Evaluations(
        rounds=rounds,
        valid_samples=sum(held),
        test_samples=evaluation.iterations * size,
        batch_size=size,
        rounds_run=rounds,
        valid_samples_read=rounds * sum(iterations) * each,
        # the test runs for as many iterations as the validation
        test_samples_read=sum(iterations) * size,
        full=True,
        iterations=iterations,
    )


def evaluation_rows(
    run: Run,
    row: FrameworkRules,
    parts: Parts,
    evaluation: Evaluations | None,
    progress: Progress | None,
) -> tuple[Row, ...]:
    """Return the rows of validation and test; sources without a sample have empty rows."""
    if evaluation is None:
        return ()
    rows: tuple[Row, ...] = ()
    wanted: dict[Split, int] = {"valid": evaluation.valid_samples, "test": evaluation.test_samples}
    for split, samples in wanted.items():
        short = row.is_framework or row.order == "packed"  # which has shorter samples
        needed = 1 if short else run.sequence_length + 1
        filled = [part for part in parts[split] if part.tokens >= needed]
        if split == "valid" and evaluation.full:
            rows += _one_pass(run, row, parts, filled, progress)
        elif filled:
            sizing = sizing_of(run, row, filled, split, progress, parts["train"])
            rows += rows_of(run, sizing, filled, split, requested=samples, consumed=samples)
        rows += tuple(
            Row(
                split=split,
                source=number,
                path=part.source.path,
                weight=part.source.weight,
                tokens_per_epoch=part.tokens,
            )
            for number, part in enumerate(parts[split], 1)
            if part not in filled
        )
    return rows


def _one_pass(
    run: Run,
    row: FrameworkRules,
    parts: Parts,
    filled: Sequence[SplitPart],
    progress: Progress | None,
) -> tuple[Row, ...]:
    """Return the rows of full validation: one epoch of each source is built and read."""
    rows: tuple[Row, ...] = ()
    for part in filled:
        sizing = sizing_of(run, row, [part], "valid", progress, parts["train"])
        held = sizing.per_epoch()[0]
        (one,) = rows_of(run, sizing, [part], "valid", requested=held, consumed=held)
        rows += (replace(one, source=parts["valid"].index(part) + 1),)
    return rows


def rows_of(
    run: Run,
    sizing: Sizing,
    parts: Sequence[SplitPart],
    split: str,
    *,
    requested: int,
    consumed: int,
    steps: SkippedSteps | None = None,
) -> tuple[Row, ...]:
    """Return the rows of one split: ``requested`` samples built of its blend, ``consumed`` read.

    With ``steps`` those samples count that these steps serve of a loader that does not start over.
    """
    asked = sizing.requested(requested)
    epochs = None if asked is None else sizing.epochs(asked)
    built = None if asked is None or epochs is None else sizing.built(asked, epochs)
    passes = loader_passes(run, built or [], split, consumed)
    positions = passes.positions() if built else (ServedRange(0, consumed, 1),)
    if steps is not None:
        served_ranges = steps.skips.served_samples(int(steps.bounds[-1]))
        positions = tuple(ServedRange(begin, end, 1) for begin, end in served_ranges)
    drawn, bounds = drawn_from(sizing, positions), drawn_bounds(sizing, positions)
    filled = sizing.blend_size(requested)
    if passes.limit is not None:
        filled = max((part.end for part in positions), default=0)
    in_blend = sizing.draws.counts(filled)
    per_epoch = sizing.per_epoch()
    rows = []
    for i, part in enumerate(parts):
        count = None if drawn is None else sum(part.size for part in drawn[i])
        served = None
        if drawn is not None and built is not None:
            served = samples_served(sizing, drawn[i], built[i])
        distinct = None if served is None else sum(part.end - part.begin for part in served)
        row = Row(
            split=split,
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
            distinct=distinct,
            repeated=_repeated(count, distinct, per_epoch[i]),
            packing=packing_facts(
                part.packing, part.tokens, part.long_documents, sizing.row.max_documents
            ),
        )
        if run.packing is None:
            rows.append(_covered(run, sizing, part, row, served))
        else:
            rows.append(_packed(run, part, row, served))
    return tuple(rows)


def _repeated(drawn: int | None, distinct: int | None, per_epoch: int) -> int | None:
    if drawn is None:
        return None
    return max(0, drawn - min(per_epoch, drawn if distinct is None else distinct))


def _packed(run: Run, part: SplitPart, row: Row, served: Sequence[ServedRange] | None) -> Row:
    """Return the row of a source with samples of whole documents, counted where that is cheap."""
    assert run.packing is not None
    varies = run.packing.pack_impl != "unpacked"
    work = (row.requested or 0) + part.sequences * (row.epochs or 0)
    asked = run.coverage == "exact" or (run.coverage == "auto" and work <= BUILD_LIMIT)
    if row.requested is None or not (asked or varies):
        return row
    if work > BUILD_LIMIT and run.coverage != "exact":
        return replace(row, epochs=None)
    index = index_of_part(run, part, row.requested)
    if varies:
        held = min(samples_of_first_pass(index, part), row.requested)
        repeated = None if row.drawn is None else max(0, row.drawn - held)
        row = replace(row, epochs=index.num_epochs, samples_per_epoch=held, repeated=repeated)
    row = replace(row, error=packing_error(run, part, index, served or ()))
    if row.error or not asked or not served:
        return row
    return replace(row, coverage=packing_coverage(run, part, index, served))


def _covered(
    run: Run, sizing: Sizing, part: SplitPart, row: Row, served: Sequence[ServedRange] | None
) -> Row:
    """Return the row with its coverage, for uncounted draws that of the middle of their bounds."""
    if row.requested is None or row.epochs is None or row.built is None:
        return row
    likely = sum(row.drawn_bounds) // 2
    draw = SourceDraw(
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
    return replace(row, coverage=coverage_of(draw, served, run.coverage, sizing.progress))
