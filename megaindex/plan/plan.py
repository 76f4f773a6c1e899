"""Computation of a `Plan` from `RunSettings` or a decided run: a row for every source, and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.index.counts import origin_of
from megaindex.index.draws import Progress
from megaindex.index.frameworks import Split
from megaindex.index.spans import sequence_lengths_at
from megaindex.plan import advice
from megaindex.plan.advice import buffer_effect, failures_of_settings
from megaindex.plan.coverage import (
    BUILD_LIMIT,
    COVERAGES,
    SourceDraw,
    coverage_of,
    coverage_of_sources,
)
from megaindex.plan.limits import dry_loaders, iteration_limits, tails_of
from megaindex.plan.model import (
    Coverage,
    LoaderRestart,
    Plan,
    RankShare,
    Row,
    SettingsPlan,
    SkipEffect,
    effect_of,
)
from megaindex.plan.packing import (
    InputTokens,
    index_of_part,
    packed_inputs,
    packing_coverage,
    packing_error,
    packing_facts,
    samples_of_first_pass,
    serves_first_again,
)
from megaindex.plan.recipe_plan import plan_of_layout
from megaindex.plan.subsets import subsets_of_parts, subsets_of_run
from megaindex.recipe.layout import RecipeLayout
from megaindex.run.parts import Parts, SplitPart, parts_of
from megaindex.run.passes import (
    ServedRange,
    drawn_bounds,
    drawn_from,
    loader_limit,
    loader_passes,
    samples_served,
    served_between,
)
from megaindex.run.run import Run
from megaindex.run.sizing import Sizing, sizing_of
from megaindex.run.target import (
    Evaluations,
    Phase,
    ResolvedTarget,
    evaluation_of,
    masked_rows,
    phase_request,
    phases_of,
    resolve_target,
    target_text,
)
from megaindex.settings.batch_schedule import steps_of
from megaindex.settings.run_settings import RunSettings, Target
from megaindex.settings.settings import ADAPTERS
from megaindex.validation import check_choice

_SAMPLES_AT_ONCE = 1 << 18


def evaluation_rows(
    run: RunSettings, parts: Parts, evaluation: Evaluations | None, progress: Progress | None
) -> tuple[Row, ...]:
    """Return the rows of validation and test; sources without a sample have empty rows."""
    if evaluation is None:
        return ()
    rows: tuple[Row, ...] = ()
    wanted: dict[Split, tuple[int, int]] = {
        "valid": (evaluation.valid_samples, evaluation.valid_samples_read),
        "test": (evaluation.test_samples, evaluation.test_samples_read),
    }
    for split, (asked, read) in wanted.items():
        short = run.row.is_framework or run.row.order == "packed"  # which has shorter samples
        needed = 1 if short else run.sequence_length + 1
        filled = [part for part in parts[split] if part.tokens >= needed]
        if split == "valid" and evaluation.full:
            rows += _one_pass(run, parts, filled, progress)
        elif filled:
            sizing = sizing_of(run, filled, split, progress, parts["train"])
            rows += rows_of(run, sizing, filled, split, requested=asked, consumed=read)
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
    run: RunSettings, parts: Parts, filled: Sequence[SplitPart], progress: Progress | None
) -> tuple[Row, ...]:
    """Return the rows of full validation: one epoch of each source is built and read."""
    rows: tuple[Row, ...] = ()
    for part in filled:
        sizing = sizing_of(run, [part], "valid", progress, parts["train"])
        held = sizing.per_epoch()[0]
        (one,) = rows_of(run, sizing, [part], "valid", requested=held, consumed=held)
        rows += (replace(one, source=parts["valid"].index(part) + 1),)
    return rows


def rows_of(
    run: RunSettings,
    sizing: Sizing,
    parts: Sequence[SplitPart],
    split: str,
    *,
    requested: int,
    consumed: int,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> tuple[Row, ...]:
    """Return the rows of one split: ``requested`` samples built of its blend, ``consumed`` read.

    Of a run with skips those of ``ranges`` count, which are served.
    """
    asked = sizing.requested(requested)
    epochs = None if asked is None else sizing.epochs(asked)
    built = None if asked is None or epochs is None else sizing.built(asked, epochs)
    passes = loader_passes(run, built or [], split, consumed)
    positions = passes.positions() if built else (ServedRange(0, consumed, 1),)
    again = passes.limit is not None and consumed > passes.limit
    if ranges is not None:
        positions = served_between(positions, ranges)
    drawn, bounds = drawn_from(sizing, positions), drawn_bounds(sizing, positions)
    filled = sizing.blend_size(requested)
    if passes.limit is not None:
        filled = max((part.end for part in positions), default=0)
    in_blend = sizing.drawn(filled)
    per_epoch = sizing.per_epoch()
    reshuffled = sizing.row.train_epochs == "reshuffled" and split == "train"
    reshuffled &= again or ranges is None
    rows = []
    for i, part in enumerate(parts):
        count = None if drawn is None else sum(part.size for part in drawn[i])
        served = None
        if drawn is not None and built is not None:
            served = samples_served(sizing, drawn[i], built[i])
            if reshuffled:  # each pass is of other samples
                served = tuple(part for part in drawn[i] if part.size)
        distinct = None
        if served is not None:
            distinct = sum(p.size if reshuffled else p.end - p.begin for p in served)
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
            error=_abort(run, part),
            packing=packing_facts(
                part.packing, part.tokens, part.long_documents, sizing.row.max_documents
            ),
        )
        if reshuffled and ranges is not None:
            rows.append(replace(row, coverage=Coverage(method="none")))
        elif run.packing is None:
            rows.append(_covered(run, sizing, part, row, served, reshuffled=reshuffled))
        else:
            rows.append(_packed(run, part, row, served))
    if run.dataloader == "cyclic" and not (split == "valid" and run.evaluation.full):
        return _permuted(rows, sum(part.size for part in positions))
    return tuple(rows)


def _permuted(rows: Sequence[Row], samples: int) -> tuple[Row, ...]:
    """Return the rows of a blend of which Megatron's cyclic loader draws so many samples.

    It permutes the built samples: draws from one of several sources have bounds alone, and coverage
    is not planned.
    """
    found = []
    one_pass = samples <= sum(row.built or 0 for row in rows)
    for row in rows:
        once = one_pass and row.epochs == 1 and (row.drawn or 0) <= (row.samples_per_epoch or 0)
        row = replace(row, repeated=0 if once else None, coverage=Coverage(method="none"))
        if len(rows) > 1:
            row = replace(row, drawn=None, drawn_bounds=(0, samples))
        found.append(row)
    return tuple(found)


def _abort(run: RunSettings, part: SplitPart) -> str:
    """Return the failed assertion of GPT-NeoX's compiled helpers, or an empty string."""
    if (
        run.row.order != "neox"
        or run.exact  # the adapter has kernels of its own
        or run.packing is not None
        or min(part.tokens, run.sequence_length) > 1
    ):
        return ""
    what = "of one token" if part.tokens == 1 else "of sequences of one token"
    return f"an abort of its compiled helpers, which refuse a source {what}"


def _repeated(drawn: int | None, distinct: int | None, per_epoch: int) -> int | None:
    if drawn is None:
        return None
    return max(0, drawn - min(per_epoch, drawn if distinct is None else distinct))


def _packed(
    run: RunSettings, part: SplitPart, row: Row, served: Sequence[ServedRange] | None
) -> Row:
    """Return the row of a source with samples of whole documents, counted where that is cheap."""
    assert run.packing is not None
    varies = run.packing.pack_impl != "unpacked"
    work = (row.requested or 0) + part.sequences * (row.epochs or 0)
    asked = run.coverage == "exact" or (run.coverage == "auto" and work <= BUILD_LIMIT)
    if row.requested is None or not (asked or varies):
        return row
    if work > BUILD_LIMIT and run.coverage != "exact":
        return replace(row, epochs=None, repeated=None)
    index = index_of_part(run, part, row.requested)
    if varies:
        held = min(samples_of_first_pass(index, part), row.requested)
        repeated = None if row.drawn is None else max(0, row.drawn - held)
        if repeated == 0 and serves_first_again(index, served or ()):
            repeated = 1
        row = replace(row, epochs=index.num_epochs, samples_per_epoch=held, repeated=repeated)
    row = replace(row, error=packing_error(run, part, index, served or ()))
    if row.error or not asked or served is None:
        return row
    return replace(row, coverage=packing_coverage(run, part, index, served))


def _covered(
    run: RunSettings,
    sizing: Sizing,
    part: SplitPart,
    row: Row,
    served: Sequence[ServedRange] | None,
    *,
    reshuffled: bool,
) -> Row:
    """Return the row with its coverage, for uncounted draws that of the middle of their bounds."""
    if row.requested is None or row.epochs is None or row.built is None:
        return row
    likely = sum(row.drawn_bounds) // 2
    if served is None and likely > row.built:  # some of them again
        return row
    draw = SourceDraw(
        row=sizing.row,
        part=part,
        sequence_length=run.sequence_length,
        seed=run.seed,
        requested=row.requested,
        epochs=row.epochs,
        built=row.built,
        per_epoch=row.samples_per_epoch or 0,
        drawn=likely if row.drawn is None else row.drawn,
        counted=row.drawn is not None,
        reshuffled=reshuffled,
    )
    return replace(row, coverage=coverage_of(draw, served, run.coverage, sizing.progress))


def make_plan(
    run: RunSettings | RecipeLayout | Run, *, progress: Progress | None = None, **asked: Any
) -> Any:
    """Return the exact plan of a run, by the rules of its framework and version.

    Args:
        run: settings, the layout of a recipe, or a decided run.
        progress: called with (done, total) while draws of a greedy blend, or coverage, are counted.
        asked: ``coverage``; of a recipe also those of `plan_of_layout`.
    """
    return _PLANNERS[type(run)](run, progress=progress, **asked)


def plan_of_settings(
    run: RunSettings, *, coverage: str | None = None, progress: Progress | None = None
) -> SettingsPlan:
    """Return the plan of settings; ``coverage`` replaces that of the settings."""
    if coverage is not None:
        run = replace(run, coverage=check_choice("coverage", coverage, COVERAGES))
    if any(skip.remove for skip in run.skip):  # samples alone do not tell what is read
        run = replace(run, coverage="none")
    return _plan_of(run, progress)


def _fails_at(run: RunSettings, last: int) -> bool:
    """Return True if GPT-NeoX ends with an error at these iterations without a repeat.

    Fewer iterations have fewer evaluations, and validation data may then be too short. A packing
    may serve its first sample again, which only its index shows.
    """
    if not run.row.uncounted_samples or run.target.kind == "loader_epochs":
        return False
    walk = run.blend_counts if run.variance_buffer == "exact" else "bounds"
    target = Target(kind="iterations", value=Fraction(last))
    limited = replace(run, target=target, tail="drop", coverage="none", blend_counts=walk, skip=())
    there = _plan_of(limited, None, at_limit=True)
    again = run.packing is not None and any(row.repeated != 0 for row in there.rows("train"))
    return bool(there.caution) or again


def _with_exact_buffer(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> int | None:
    """Return the plan's most iterations without a repeat if no buffer were requested."""
    unsized = sizing.exact or sizing.asks_one_epoch or sizing.pass_samples is not None
    if unsized or plan.phases or run.row.order not in ADAPTERS or sizing.one_epoch_only:
        return None
    once, certain = replace(sizing, buffer="exact").longest([1] * len(sizing.tokens))
    counted = loader_limit(run, sizing.per_epoch())
    once = once if counted is None else min(once, counted)
    last = run.batch.iterations_within(once, run.consumed_samples)
    if not certain or last <= plan.max_train_iters_without_repeat:
        return None
    return None if _fails_at(replace(run, variance_buffer="exact", surplus=None), last) else last


def _plan_of(
    run: RunSettings, progress: Progress | None, *, at_limit: bool = False
) -> SettingsPlan:
    row = run.row
    parts = parts_of(run)
    sizing = sizing_of(run, parts["train"], "train", progress)
    target = resolve_target(run, sizing)
    phases = phases_of(run, target)
    train = _train_rows(run, sizing, parts["train"], target, phases, None)
    evaluation = evaluation_of(run, target.train_iters, parts)
    rows = train + evaluation_rows(run, parts, evaluation, progress)
    inputs = None
    if row.order == "packed":  # samples hold padding
        found = [packed_inputs(run, *each) for each in zip(parts["train"], train, strict=True)]
        inputs = InputTokens(sum(each.tokens for each in found), all(each.exact for each in found))
    steps = run.steps_with_skips(target.samples_consumed, masked_rows(run, target))
    skip = None
    if steps is not None:
        consumed = run.consumed_samples
        skip = effect_of(
            steps.skips, steps.steps.bounds, masked_rows=steps.masked_rows, consumed=consumed
        )
    plan = SettingsPlan(
        order=run.row.order,
        framework=row.framework,
        sequence_length=run.sequence_length,
        variance_buffer=sizing.buffer if row.is_framework else "exact",
        tail=run.tail,
        target=target_text(run),
        global_batch_size=run.batch.final,
        batch_schedule=run.batch.plain_stages,
        consumed_samples=run.consumed_samples,
        **_totals(run, sizing, target, train, inputs),
        **iteration_limits(run, sizing, train),
        tails=tails_of(run, sizing),
        datasets=rows,
        dry_loaders=dry_loaders(run, target, rows, evaluation),
        evaluation=evaluation,
        ranks=_ranks(run, target, skip),
        phases=phases,
        buffer_effect=None if phases else buffer_effect(run, sizing, target),
        loaders=_loaders(run, rows, target, evaluation),
        framework_version=None if run.version is None else run.version.name,
        ignored_settings=run.ignored,
        skip=skip,
        subsets=subsets_of_parts(parts["train"]),
    )
    if not at_limit:
        last = plan.max_train_iters_without_repeat
        if last and _fails_at(run, last):
            plan = replace(plan, max_train_iters_without_repeat=0)
        exact = _with_exact_buffer(run, sizing, plan)
        plan = replace(plan, max_train_iters_with_exact_buffer=exact)
    warnings = list(advice.warnings(run, sizing, plan))
    if inputs is not None and not inputs.exact:
        warnings.append(
            "tokens consumed and left over are means over seeds, because a part of an epoch is "
            "consumed; give --data-path and --coverage exact to count them"
        )
    plan = replace(
        plan,
        caution=advice.caution(run, sizing, plan),
        warnings=(*warnings, *_late_skips(run, target), *(skip.warnings if skip else ())),
        check_failures=failures_of_settings(run, plan),
    )
    if skip is None or steps is None or not skip.changes_counts:
        return plan
    ranges = list(steps.skips.served_samples(steps.steps.end))
    served = _train_rows(run, sizing, parts["train"], target, phases, ranges)
    return replace(plan, datasets=(*served, *rows[len(train) :]))


def _train_rows(
    run: RunSettings,
    sizing: Sizing,
    parts: Sequence[SplitPart],
    target: ResolvedTarget,
    phases: Sequence[Phase],
    ranges: Sequence[tuple[int, int]] | None,
) -> tuple[Row, ...]:
    """Return the rows of the train split, those of each phase separately.

    With ``ranges``, those positions of the run alone are served.
    """
    spans: list[tuple[int | None, int, int, int]] = [
        (number, phase_request(run, target, phase), phase.samples, phase.first_sample)
        for number, phase in enumerate(phases, 1)
    ]
    spans = spans or [(None, target.samples_requested, target.samples_consumed, 0)]
    return tuple(
        replace(row, phase=number)
        for number, asked, read, first in spans
        for mine in [None if ranges is None else [(a - first, b - first) for a, b in ranges]]
        for row in rows_of(run, sizing, parts, "train", requested=asked, consumed=read, ranges=mine)
    )


def _late_skips(run: RunSettings, target: ResolvedTarget) -> tuple[str, ...]:
    """Return a warning of iterations to skip that the run does not reach."""
    if not run.iterations_to_skip:
        return ()
    steps, _ = steps_of(run.batch, run.consumed_samples, target.samples_consumed)
    named = zip(run.iterations_to_skip, run.skipped_steps, strict=True)
    late = [number for number, step in named if step >= steps.count]
    return (f"--iterations-to-skip {late[0]} lies beyond the end of the run",) if late else ()


def _totals(
    run: RunSettings,
    sizing: Sizing,
    target: ResolvedTarget,
    train: Sequence[Row],
    inputs: InputTokens | None,
) -> dict[str, Any]:
    """Return the totals of the train split; ``inputs`` are the tokens consumed in order packed."""
    tokens_consumed = target.samples_consumed * run.sequence_length
    if inputs is not None:
        tokens_consumed = inputs.tokens
    built = [row.built for row in train if row.built is not None]
    epochs = [row.epochs for row in train if row.epochs is not None]
    samples_left = max(0, target.samples_in_view - target.samples_consumed)
    tokens_left = max(0, target.tokens_in_view - tokens_consumed)
    if sizing.asks_one_epoch and not run.exact:  # some samples are drawn more often than others
        distinct = sum(row.distinct or 0 for row in train)
        samples_left = sum(row.samples_per_epoch or 0 for row in train) - distinct
        tokens_left = sum(sizing.tokens) - distinct * run.sequence_length
    return {
        "train_iters": target.train_iters,
        "tokens_per_epoch": sum(sizing.tokens),
        "samples_per_epoch": sum(row.samples_per_epoch or 0 for row in train[: len(sizing.tokens)]),
        "samples_consumed": target.samples_consumed,
        "samples_left_over": samples_left,
        "tokens_consumed": tokens_consumed,
        "tokens_left_over": tokens_left,
        "samples_built": sum(built) if len(built) == len(train) else None,
        "num_epochs_built": max(epochs) if len(epochs) == len(train) else None,
    }


def _loaders(
    run: RunSettings, rows: Sequence[Row], target: ResolvedTarget, evaluation: Evaluations | None
) -> tuple[LoaderRestart, ...]:
    """Return the loaders that start over; a split without data has none."""
    read = {"train": target.samples_consumed}
    if evaluation is not None:
        read |= {"valid": evaluation.valid_samples, "test": evaluation.test_samples}
    loaders = []
    for split, samples in read.items():
        counts = [row.built for row in rows if row.split == split and row.tokens_per_epoch]
        built = [count for count in counts if count is not None]
        limit = loader_passes(run, built, split, samples).limit
        if built and len(built) == len(counts) and limit is not None:
            loaders.append(LoaderRestart(split=split, samples_counted=limit, samples_read=samples))
    return tuple(loaders)


def _ranks(run: RunSettings, target: ResolvedTarget, skip: SkipEffect | None) -> RankShare | None:
    parallel = run.data_parallel_size
    if parallel is None or run.batch.final % parallel:
        return None
    samples = target.samples_consumed - run.consumed_samples
    if skip is not None and run.skip:  # Megatron's own skipped iterations are read
        samples = skip.samples_to_read
    per_rank = samples // parallel
    micro = run.micro_batch_size
    return RankShare(
        data_parallel_size=parallel,
        samples_per_rank=per_rank,
        micro_batches_per_rank=None if micro is None else per_rank // micro,
    )


def plan_of_run(run: Run, *, coverage: str | None = None, progress: Progress | None = None) -> Plan:
    """Return the plan of a decided run.

    Args:
        run: the run.
        coverage: auto, exact, expected or none; None: auto. Samples and tokens are counted by the
            index, under auto up to a limit, and never a mean over seeds.
        progress: called with (done, total) while they are counted.
    """
    coverage = check_choice("--coverage", coverage or "auto", COVERAGES)
    documents = int(run.document_base[-1])
    within = run.samples_served + documents <= BUILD_LIMIT
    counts = coverage == "exact" or (coverage == "auto" and within)
    rows = _rows(run, counts, progress)
    bounds, skips = run.step_bounds, run.skips
    skip, steps, end = None, run.num_steps, run.num_samples
    if skips is not None:  # moved steps are made behind the others
        steps = skips.num_steps
        end = int(bounds[min(steps, run.num_steps)])
        past = int(bounds[run.past_steps])
        skip = effect_of(skips, bounds, masked_rows=run.masked_rows, consumed=past)
        skip = skip.counted(run.index, [source.name for source in run.sources])
    size = int(bounds[-1] - bounds[-2]) + run.masked_rows
    tokens = [row.coverage.tokens_served for row in rows]
    served = [count for count in tokens if count is not None]
    return Plan(
        order=run.order or None,
        sequence_length=max(run.sequence_lengths),
        variance_buffer=None,
        tail=None,
        train_iters=steps - run.past_steps,
        global_batch_size=size,
        batch_schedule=run.batch.plain_stages,
        tokens_per_epoch=sum(row.tokens_per_epoch for row in rows),
        samples_per_epoch=None,
        samples_consumed=end - int(bounds[0]),
        tokens_consumed=sum(served) if len(served) == len(tokens) else None,
        samples_built=None,
        samples_left_over=None,
        num_epochs_built=None,
        max_train_iters_without_repeat=None,
        max_train_iters_same_epochs=None,
        datasets=rows,
        skip=skip,
        subsets=subsets_of_run(run),
        check_failures=tuple(_failures(rows, counts, size * max(run.sequence_lengths))),
    )


def _failures(rows: Sequence[Row], counts: bool, batch_tokens: int) -> Iterator[str]:
    """Yield the reasons for which ``--check`` fails: no target says which epochs were meant."""
    if not counts:
        yield "its coverage was not counted; give --coverage exact"
        return
    for row in rows:
        if again := sum(row.coverage.tokens[2:]):
            yield f"{row.name}: {again:.1%} of its tokens come twice or more"
    unseen = sum(round(row.coverage.tokens[0] * (row.tokens_per_epoch or 0)) for row in rows)
    if unseen > batch_tokens:
        yield f"{unseen} tokens stay unseen, more than one batch of {batch_tokens}"


def _rows(run: Run, counts: bool, progress: Progress | None) -> tuple[Row, ...]:
    drawn = run.counts(int(run.step_bounds[0]), run.num_samples).tolist()
    distinct = _distinct(run).tolist() if counts else [None] * len(run.sources)
    covered = [Coverage(method="none")] * len(run.sources)
    if counts:
        covered = coverage_of_sources(run, progress)
    return tuple(
        Row(
            split="train",
            source=number + 1,
            path=source.path_prefix,
            label="" if source.name == source.path_prefix else source.name,
            weight=None,
            tokens_per_epoch=int(source.lengths.sum(dtype=np.int64)),
            samples_per_epoch=None,
            requested=None,
            drawn=drawn[number],
            drawn_bounds=(drawn[number], drawn[number]),
            drawn_by_blend=None,
            built=None,
            epochs=None,
            distinct=distinct[number],
            repeated=None,
            coverage=covered[number],
        )
        for number, source in enumerate(run.sources)
    )


def _distinct(run: Run) -> I64:
    """Return int64[sources]: different samples among those served of each."""
    pieces = []
    for begin in range(int(run.step_bounds[0]), run.num_samples, _SAMPLES_AT_ONCE):
        ids = np.arange(begin, min(run.num_samples, begin + _SAMPLES_AT_ONCE), dtype=np.int64)
        if run.skips is not None:
            ids = ids[~run.skips.is_hole(ids)]
        source, sample = origin_of(run.index, ids)
        length = np.broadcast_to(sequence_lengths_at(run.index, ids), ids.shape)
        pieces.append(np.stack((source, length, sample), axis=1).astype(np.int64))
    found = np.unique(np.concatenate(pieces), axis=0)
    return np.bincount(found[:, 0], minlength=len(run.sources)).astype(np.int64)


_PLANNERS: dict[type, Callable[..., Plan]] = {
    RunSettings: plan_of_settings,
    RecipeLayout: plan_of_layout,
    Run: plan_of_run,
}
