"""Plan of a recipe, stage by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

import numpy as np

from megaindex.arithmetic import ceil_div
from megaindex.index.draws import Progress
from megaindex.index.mixing import PerStream
from megaindex.index.skips import ranges_without
from megaindex.plan.advice import check_failures, recipe_warnings
from megaindex.plan.coverage import COVERAGES
from megaindex.plan.limits import (
    earliest_repeats,
    epochs_asked,
    epochs_read,
    recipe_limits,
    samples_left_over,
)
from megaindex.plan.model import (
    BlockFacts,
    MixEffect,
    Padding,
    PlannedPast,
    RecipePlan,
    RemainingRun,
    Row,
    SourcePast,
    SourceTotal,
    StageDraw,
    StepRange,
    effect_of,
    listed,
)
from megaindex.plan.packing import InputTokens, is_countable, mean_inputs, packing_facts
from megaindex.plan.recipe_rows import RecipeRows, StreamReads, first_repeat, reads_of
from megaindex.plan.subsets import subsets_of_layout
from megaindex.recipe.layout import RecipeLayout
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.batch_schedule import SkippedSteps
from megaindex.settings.past import PastRead
from megaindex.settings.recipe import Recipe, Rounds
from megaindex.validation import check_choice


def plan_of_layout(
    layout: RecipeLayout,
    *,
    coverage: str | None = None,
    progress: Progress | None = None,
    consumed_samples: int | None = None,
    mix_bounds: bool = False,
) -> RecipePlan:
    """Return the plan of a recipe.

    Args:
        layout: that of `megaindex.recipe.plan_recipe`.
        coverage: auto, exact, expected or none; None: auto.
        progress: called with (done, total) while coverage is counted.
        consumed_samples: samples of a run in progress that were served; None: a run to come.
        mix_bounds: compute the earliest repeat of each source under any mix from there on.
    """
    coverage = check_choice("--coverage", coverage or "auto", COVERAGES)
    recipe = layout.recipe
    rounds = layout.evaluation or Rounds(count=0, batches=0, samples=0, masked=0, available=0)
    samples, parallel = layout.num_samples, recipe.common_data_parallel_size
    read = samples + layout.samples_masked
    counts = coverage in ("auto", "exact")
    draws, means = _draws(layout, counts)
    end = recipe.first_sample + read
    last = end - layout.batch.samples_after(max(0, layout.num_steps - 1))
    steps = layout.steps_with_skips
    skip = None
    if steps is not None:
        skip = effect_of(steps.skips, steps.steps.bounds, masked_rows=steps.masked_rows)
        read = skip.samples_to_read + skip.samples_padded
    totals, every = _totals(layout, steps), RecipeRows(layout, None, coverage, progress)
    rows = (every if steps is None else replace(every, coverage="none")).rows()
    built = _most_built(rows)
    begun = {number - 1: max(1, epochs) for number, (_, epochs) in built.items()}
    limits = recipe_limits(layout, begun)
    size, orders = (
        layout.batch.stages[-1][1],
        {recipe.order_of(source) for source in recipe.sources},
    )
    plan = RecipePlan(
        order=orders.pop() if len(orders) == 1 else None,
        variance_buffer="exact",
        tail=recipe.tail,
        global_batch_size=size if isinstance(size, int) else None,
        tokens_per_epoch=sum(source.tokens_per_epoch for source in totals),
        samples_per_epoch=sum(source.samples_per_epoch for source in totals),
        samples_built=sum(samples for samples, _ in built.values()),
        samples_left_over=samples_left_over(layout),
        num_epochs_built=max(epochs for _, epochs in built.values()),
        max_train_iters_without_repeat=limits[0],
        max_train_iters_same_epochs=limits[1],
        datasets=rows
        if steps is None or steps.skips.removes
        else replace(every, steps=steps).rows(),
        train_iters=layout.num_steps,
        samples_consumed=samples,
        tokens_consumed=sum(draw.tokens for draw in draws),
        samples_masked=layout.samples_masked,
        sequence_length=max(stage.sequence_length for stage in layout.stages),
        batch_schedule=tuple(_schedule(layout)),
        samples_per_rank=None if parallel is None else read // parallel,
        exhaustion=recipe.exhaustion,
        stopped_by=layout.stopped_by,
        evaluation_rounds=rounds.count,
        evaluation_batches=rounds.batches,
        evaluation_samples=rounds.samples,
        evaluation_masked=rounds.masked,
        evaluation_available=rounds.available,
        padding=_padding(recipe, last, layout.samples_masked),
        evaluation_padding=_padding(recipe, rounds.samples + rounds.masked, rounds.masked),
        stages=layout.ends,
        draws=draws,
        sources=totals,
        steps=tuple(_steps(layout)),
        skip=skip,
        subsets=subsets_of_layout(layout),
        past=_past(layout),
        mix_changes=_mix_effect(layout),
        mix_bounds=tuple(earliest_repeats(layout, consumed_samples or 0)) if mix_bounds else (),
        remaining=None if consumed_samples is None else _remaining(layout, consumed_samples, steps),
    )
    warnings = [*recipe_warnings(layout, plan), *(skip.warnings if skip else ())]
    if means:
        reason = f"--coverage {coverage} does not count"
        if counts:
            reason = "have too many documents or samples to count"
        warnings.append(
            f"tokens of {listed(means)} are means over seeds, because parts of epochs are drawn "
            f"that {reason}"
        )
    names = [source.name for source in recipe.sources]
    each = zip(names, epochs_read(layout), epochs_asked(layout), strict=True)
    failures = check_failures(plan, list(each))
    return replace(plan, warnings=tuple(warnings), check_failures=failures)


def _most_built(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """Return the samples and epochs built of each source, by its number, from the rows of train."""
    built: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.split == "train":
            now = built.get(row.source, (0, 0))
            built[row.source] = max(now[0], row.built or 0), max(now[1], row.epochs or 0)
    return built


def _past(layout: RecipeLayout) -> PlannedPast | None:
    recipe = layout.recipe
    if recipe.past is None:
        return None
    reads, begins = recipe.past_reads, layout.begins
    ends = [  # at the length at which the source is read first
        layout.reads.get((number, recipe.lengths_of(source.name)[0]), begins[number])
        for number, source in enumerate(recipe.sources)
    ]
    rows = zip(recipe.sources, layout.sizes, begins, ends, strict=True)
    return PlannedPast(
        steps=recipe.past.steps,
        first_sample=recipe.first_sample,
        sources=tuple(
            _source_past(reads[source.name], size, begin, end)
            for source, size, begin, end in rows
            if source.name in reads
        ),
    )


def _source_past(read: PastRead, size: SourceSize, begin: int, end: int) -> SourcePast:
    """Return the part of a source that was read, of which samples ``begin`` to ``end`` follow."""
    epoch = Fraction(int(size.epochs_at(begin)))
    first, last = size.samples_in(epoch), size.samples_in(epoch + 1)
    within = begin - first
    left = last - begin if within else 0
    drawn = min(max(0, end - begin), left)
    assumed, most, expected = "", 0, 0
    if within and not read.documents:
        assumed = "first samples of its order"
        most, expected = min(within, drawn), round(within * drawn / (last - first))
    return SourcePast(
        source=read.source,
        given=read.text(),
        samples=begin,
        epochs=size.epochs_at(begin),
        assumed=assumed,
        drawn=drawn,
        may_repeat=most,
        expected_repeats=expected,
    )


def _steps(layout: RecipeLayout) -> Iterator[StepRange]:
    """Yield the steps of one stage and batch size after another."""
    past = layout.recipe.past
    step, tokens = 0 if past is None else past.steps, 0
    for name, pieces in groupby(layout.stages, lambda piece: piece.name):
        several = list(pieces)
        length, begin = several[0].sequence_length, several[0].first_sample
        end = several[-1].first_sample + several[-1].num_samples
        for run in layout.batch.runs(begin, end):
            count, position = run.steps or 0, run.samples_after(0)
            size = run.size if isinstance(run.size, int) else None
            yield StepRange(
                stage=name,
                first_step=step,
                end_step=step + count,
                batch_size=size,
                sequence_length=length,
                first_sample=position,
                first_token=tokens + (position - begin) * length,
                batch_sizes=run.sizes(count) if size is None else None,
            )
            step += count
        tokens += (end - begin) * length


def _schedule(layout: RecipeLayout) -> Iterator[tuple[int, int | dict[str, int]]]:
    """Yield the first sample and the batch size of each stage of the schedule."""
    names = [source.name for source in layout.recipe.sources]
    sources = {stage.first_sample: stage.mixed.sources for stage in layout.stages}
    for first, size in layout.batch.stages:
        if isinstance(size, int):
            yield first, size
        elif first in sources:
            streams = zip(sources[first], size.batch_sizes, strict=True)
            yield first, {names[source]: each for source, each in streams}


def _mix_effect(layout: RecipeLayout) -> MixEffect | None:
    changes = layout.recipe.mix_changes
    if not changes:
        return None
    first, last = (layout.batch.iterations_within(int(changes.positions[k])) for k in (0, -1))
    return MixEffect(changes=len(changes), first_step=first, last_step=last)


def _remaining(layout: RecipeLayout, consumed: int, skipped: SkippedSteps | None) -> RemainingRun:
    names = [source.name for source in layout.recipe.sources]
    left = Counter(dict.fromkeys(names, 0))
    step = layout.batch.iterations_reaching(consumed)
    steps, ranges = layout.num_steps - step, [(consumed, layout.end_sample)]
    if skipped is not None:
        skips, bounds = skipped.skips, skipped.steps.bounds
        ahead = np.arange(np.searchsorted(bounds, consumed), bounds.size - 1)
        ahead = ahead[~skips.is_hole(bounds[ahead])]
        step, steps = int(ahead[0]) if ahead.size else bounds.size - 1, ahead.size
        ranges = list(skips.served_samples(int(bounds[-1]), consumed))
    for begin, end in ranges:
        for number, _, first, last in layout.ranges_drawn(begin, end):
            left[names[number]] += last - first
    return RemainingRun(
        first_step=step,
        steps=max(steps, 0),
        samples=sum(max(end - begin, 0) for begin, end in ranges),
        sources=dict(left),
    )


def _padding(recipe: Recipe, rows: int, masked: int) -> Padding:
    """Return the padding of ``rows`` that `megaindex.loader.samplers` assigns to the ranks."""
    last = recipe.stages[-1]
    parallel, micro = recipe.ranks_of(last), recipe.micro_batch_of(last) or 1
    if parallel is None:
        return Padding(rows=masked, micro_batches=None, ranks=None)
    micro_batches = ceil_div(rows, micro * parallel) * parallel
    samples = rows - masked
    return Padding(
        rows=masked,
        micro_batches=max(0, micro_batches - samples),
        ranks=max(0, parallel - samples) if rows else 0,
    )


def _draws(layout: RecipeLayout, counts: bool) -> tuple[tuple[StageDraw, ...], list[str]]:
    """Return the draws, and the sources of which tokens are means over seeds; ``counts`` if they
    may be counted in the index."""
    rows: list[StageDraw] = []
    means: dict[str, None] = {}
    named = {stage.name: stage for stage in layout.recipe.stages}
    for read in reads_of(layout):
        stage, mixing = read.stage, read.stage.mixing
        inputs = _inputs(layout, read, counts)
        size = None
        if named[stage.name].has_batch_sizes and isinstance(mixing, PerStream):
            size = mixing.batch_sizes[read.stream]
        row = _stage_draw(layout, read, inputs.tokens, size)
        rows.append(row)
        if not inputs.exact:
            means[row.source] = None
    return tuple(rows), list(means)


def _inputs(layout: RecipeLayout, read: StreamReads, counts: bool) -> InputTokens:
    """Return the input tokens of the samples that a stream draws."""
    index, begin, end = layout.sizes[read.source].packed, read.begin, read.begin + read.count
    if index is None:
        return InputTokens(read.count * read.stage.sequence_length, True)
    mean = mean_inputs(index.packing, begin, end)
    if (
        mean.exact
        or not counts
        or not is_countable(index.packing, len(index.documents), begin, end)
    ):
        return mean
    return InputTokens(index.extend(index.epochs_for(end)).count_inputs(begin, end), True)


def _stage_draw(
    layout: RecipeLayout, read: StreamReads, tokens: int, batch_size: int | None
) -> StageDraw:
    """Return the draw of a stream."""
    recipe, batch = layout.recipe, layout.batch
    stage, begin, count = read.stage, read.begin, read.count
    end = stage.first_sample + stage.num_samples
    size = layout.size_at(read.source, stage.sequence_length)
    return StageDraw(
        stage=stage.name,
        source=recipe.sources[read.source].name,
        first_step=batch.iterations_within(stage.first_sample),
        end_step=batch.iterations_within(end - 1) + 1,
        samples=count,
        share=count / stage.num_samples,
        tokens=tokens,
        epochs_begin=size.epochs_at(begin),
        epochs_end=size.epochs_at(begin + count),
        first_repeat=first_repeat(layout, read),
        deferred=stage.deferred[read.stream],
        batch_size=batch_size,
    )


def _totals(layout: RecipeLayout, steps: SkippedSteps | None) -> tuple[SourceTotal, ...]:
    lengths = dict(layout.reads.keys())  # the last one of each
    rows = zip(layout.recipe.sources, layout.samples_needed(), _served(layout, steps), strict=True)
    totals = []
    for i, (source, reached, served) in enumerate(rows):
        size = layout.size_at(i, lengths[i]) if i in lengths else layout.sizes[i]
        packed, unseen = size.packed, max(0, size.samples - reached)
        if steps is not None:
            unseen = _unseen(size.samples, sorted(served.get(lengths.get(i, 0), [])))
        drawn = {length: sum(b - a for a, b in ranges) for length, ranges in served.items()}
        totals.append(
            SourceTotal(
                source=source.name,
                kind=source.kind,
                path=source.path,
                tokens_per_epoch=size.tokens,
                samples_per_epoch=size.samples,
                drawn=sum(drawn.values()),
                epochs=sum(n / layout.size_at(i, length).samples for length, n in drawn.items()),
                unseen=unseen,
                cut_tokens=size.cut_tokens,
                packing=None
                if packed is None
                else packing_facts(
                    packed.packing, size.tokens, packed.num_long_documents, source.max_documents
                ),
                blocks=_block_facts(layout, i),
            )
        )
    return tuple(totals)


def _served(
    layout: RecipeLayout, steps: SkippedSteps | None
) -> list[dict[int, list[tuple[int, int]]]]:
    """Return the ranges of samples of each source that are served, by their sequence length."""
    ranges: Iterable[tuple[int, int]] = [(layout.recipe.first_sample, layout.end_sample)]
    if steps is not None:
        ranges = steps.skips.served_samples(steps.steps.end)
    found: list[dict[int, list[tuple[int, int]]]] = [{} for _ in layout.sizes]
    for positions in ranges:
        for source, length, begin, end in layout.ranges_drawn(*positions):
            found[source].setdefault(length, []).append((begin, end))
    return found


def _block_facts(layout: RecipeLayout, source: int) -> BlockFacts | None:
    """Return the tokens of a source's first epoch in order blocks, up to where it is restarted."""
    blocks = layout.sizes[source].blocks
    if blocks is None:
        return None
    served = dropped = deferred = first = left = 0
    recipe, read = layout.recipe, layout.begins[source]
    initial = blocks.at_length(recipe.lengths_of(recipe.sources[source].name)[0])
    before = read * initial.sequence_length
    if read >= initial.num_samples:
        before = blocks.tokens_per_epoch
    for length, begin, end in _first_reads(layout, source):
        index = blocks.at_length(length)
        if begin >= index.num_samples:  # of a further epoch
            deferred, left = deferred + left, 0
            break
        end = min(end, index.num_samples)
        block, deferred = index.blocks_begun(end), deferred + left
        samples = index.samples_before(block)
        cut = (samples - index.samples_before(first)) * length
        served += (end - begin) * length
        dropped += index.tokens_before(block) - index.tokens_before(first) - cut
        first, left = block, (samples - end) * length
    return BlockFacts(
        block_tokens=blocks.blocks.block_tokens,
        blocks=blocks.num_blocks,
        served=served,
        dropped=dropped,
        deferred=deferred,
        unread=blocks.tokens_per_epoch - before - served - dropped - deferred,
    )


def _first_reads(layout: RecipeLayout, source: int) -> list[tuple[int, int, int]]:
    """Return (sequence length, first sample, end) of a source's reads before any restart."""
    reads: list[tuple[int, int, int]] = []
    for stage in layout.stages:
        length = stage.sequence_length
        for number, begin, count in stage.reads:
            if number != source or count == 0:
                continue
            if reads and (length, begin) == (reads[-1][0], reads[-1][2]):
                reads[-1] = length, reads[-1][1], begin + count
            elif reads and begin == 0:
                return reads
            else:  # another length, or the next block after a stage that drew nothing in another
                reads.append((length, begin, begin + count))
    return reads


def _unseen(size: int, served: Sequence[tuple[int, int]]) -> int:
    """Return the samples of an epoch that are in none of the sorted ranges.

    Later epochs cut other samples of the same tokens: one that is served whole has them all.
    """
    end = max((stop for _, stop in served), default=0)
    missing = list(ranges_without([(0, max(end, size))], served))
    incomplete = {epoch for a, b in missing for epoch in range(a // size, (b - 1) // size + 1)}
    if any(epoch not in incomplete for epoch in range(end // size)):
        return 0
    return sum(min(b, size) - a for a, b in missing if a < size)
