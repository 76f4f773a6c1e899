"""Plan of a recipe, stage by stage, and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from megaindex._types import I64
from megaindex.arithmetic import ceil_div
from megaindex.configs.batch_schedule import SkippedSteps, skip_steps, step_bounds
from megaindex.console import (
    FittedTable,
    Prose,
    ShortNames,
    TableColumn,
    answer_panel,
    spaced,
    warning,
)
from megaindex.index.draws import Progress
from megaindex.index.mixing import PerStream
from megaindex.index.skips import ranges_without
from megaindex.plan.advice import check_failures
from megaindex.plan.coverage import COVERAGES
from megaindex.plan.model import PackingFacts, Plan, Row, effect_of, json_object
from megaindex.plan.packing import InputTokens, is_countable, mean_inputs, packing_facts
from megaindex.plan.recipe_rows import (
    RecipeRows,
    StreamReads,
    epochs_asked,
    epochs_read,
    first_repeat,
    reads_of,
    recipe_limits,
    samples_left_over,
)
from megaindex.plan.render import (
    MANY_SOURCES,
    SHOWN_SOURCES,
    coverage_table,
    facts_view,
    more,
    packing_texts,
    repeats_text,
    shown_rows,
    without_repeat,
    worst_first,
)
from megaindex.recipe.amend import EarliestRepeat, earliest_repeats
from megaindex.recipe.layout import RecipeLayout, StageEnd
from megaindex.recipe.mixture import SourceSize
from megaindex.recipe.past import PastRead
from megaindex.recipe.recipe import Recipe, Rounds
from megaindex.validation import check_choice

_SHOWN_WARNINGS = 3
_NOTICEABLE = 0.01
"""Share of a source's tokens in no sample at which the plan warns."""
_MOST_DEFERRED = 0.05
"""Share of an epoch that changes of the sequence length defer at which the plan warns."""


@dataclass(frozen=True, kw_only=True)
class StageDraw:
    """Samples that one stage draws from one source."""

    stage: str
    source: str
    first_step: int
    """Step that serves the stage's first sample; steps count from 0."""
    end_step: int
    """One past the step that serves its last sample."""
    samples: int
    share: float
    """Share of the stage's samples."""
    tokens: int
    """Tokens of these samples, without the padding of order packed."""
    epochs_begin: float
    """Epochs of the source read before the stage."""
    epochs_end: float
    first_repeat: int | None
    """First step that serves a sample for a second time; None without repeats."""
    deferred: int = 0
    """Tokens left of the block in which a stage of another sequence length stopped reading the
    source, which its epoch does not serve; not a key of ``--json`` in other orders than blocks."""
    batch_size: int | None = None
    """Samples of a step that draws from the source; None, and not a key of ``--json``, where the
    batch is that of the stage."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return json_object(self, "deferred", "batch_size")


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Consecutive steps of one stage, batch size and sequence length.

    Before step k of them, ``first_sample + (k - first_step) * batch_size`` samples are consumed,
    and ``sequence_length`` tokens with each of these steps' samples. Where the streams of the stage
    have batch sizes of their own, the samples are ``first_sample`` and the first ``k - first_step``
    of ``batch_sizes``.
    """

    stage: str
    first_step: int
    """Steps count from 0, skipped ones included."""
    end_step: int
    """One past the last step."""
    batch_size: int | None
    """None where streams have batch sizes of their own."""
    sequence_length: int
    first_sample: int
    """Samples consumed before ``first_step``."""
    first_token: int
    """Tokens consumed here before ``first_step``: samples × sequence_length, padding included."""
    batch_sizes: I64 | None = field(default=None, repr=False, compare=False)
    """int64[steps]: samples of each step; None, and not a key of ``--json``, where batch_size has
    them."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        sizes = self.batch_sizes
        listed = None if sizes is None else sizes.tolist()
        return json_object(replace(self, batch_sizes=listed), "batch_sizes")


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """Tokens of the first epoch of a source in order blocks."""

    block_tokens: int
    """Tokens that a block holds at least."""
    blocks: int
    served: int
    """Tokens that the run serves as input."""
    dropped: int
    """Tokens at the ends of the blocks read that fill no sample, and labels of the last ones."""
    deferred: int
    """Tokens left of blocks that a stage of another sequence length ended."""
    unread: int
    """Tokens of blocks that were not begun, and the rest of the last one begun, without those that
    another system read."""


@dataclass(frozen=True, kw_only=True)
class SourceTotal:
    """One source over the whole run."""

    source: str
    kind: str
    path: str
    tokens_per_epoch: int
    samples_per_epoch: int
    drawn: int
    epochs: float
    unseen: int
    """Samples of its epoch that the run never serves; like ``samples_per_epoch`` those of the last
    sequence length at which it is read."""
    cut_tokens: int
    """Tokens of its epoch in no sample: cut off, or left out with long documents."""
    packing: PackingFacts | None = None
    """Samples of an epoch in order packed; not a key of ``--json`` in the other orders."""
    blocks: BlockFacts | None = None
    """Tokens of an epoch in order blocks; not a key of ``--json`` in the other orders."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return json_object(self, "packing", "blocks")


@dataclass(frozen=True, kw_only=True)
class SourcePast:
    """The part of a source that another system read, and what is assumed of it."""

    source: str
    given: str
    """What the recipe states, as ``tokens 300,000``."""
    samples: int
    """Samples of the source that are taken as read."""
    epochs: float
    assumed: str
    """What the statement leaves open; empty if it names the documents."""
    drawn: int
    """Samples that the run draws of those left in the epoch in progress."""
    may_repeat: int
    """Most of them that were read before, if the assumption is wrong."""
    expected_repeats: int
    """Those of them that were read before if that system read at random, a mean."""


@dataclass(frozen=True, kw_only=True)
class PlannedPast:
    """Steps of another system from which the run goes on."""

    steps: int
    first_sample: int
    """Position of the first sample here."""
    sources: tuple[SourcePast, ...]


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Rows without loss in the last batch of the run, or of a round of evaluation."""

    rows: int
    micro_batches: int | None
    """Micro batches of padding alone; None where the recipe names no ranks."""
    ranks: int | None
    """Data-parallel ranks that read padding alone."""


@dataclass(frozen=True, kw_only=True)
class MixEffect:
    """Changes of the mix in mid-run."""

    changes: int
    first_step: int
    """First step with changed weights."""
    last_step: int
    """First step with the weights of the last change."""


@dataclass(frozen=True, kw_only=True)
class RemainingRun:
    """What is left of a run in progress, without steps dropped."""

    first_step: int
    """The first step to be made that is not begun."""
    steps: int
    samples: int
    """Samples that no rank was returned."""
    sources: dict[str, int]
    """Samples left of each source."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RecipePlan(Plan):
    """Plan of a recipe. Steps count from 0: step k is iteration k + 1 in trainers' logs.

    Its other fields are those of `Plan`. `samples_consumed` are those of the run, without a past in
    another system. Samples of finetuning sources count as `sequence_length` tokens.

    Attributes:
        samples_masked: rows of the last batch that are padding without loss.
        samples_per_rank: rows that each data-parallel rank reads; None where the recipe names
            no ranks.
        exhaustion: policy for a source that reaches its limits, as in `Recipe`.
        stopped_by: source whose exhaustion ends the run early; empty if the run ends with its
            last stage.
        evaluation_rounds: rounds of evaluation; 0 for a run without them.
        evaluation_batches: global batches of a round.
        evaluation_samples: samples that a round scores, each once.
        evaluation_masked: rows of a round's last batch that are padding without loss.
        evaluation_available: samples of the validation data.
        padding: padding in the last batch of the run.
        evaluation_padding: padding in the last batch of a round of evaluation.
        stages: stages that the run begins; the last one ends early if ``stopped_by`` is given.
        draws: one for each stage and source, and for each piece of a stage between exhausted
            sources.
        sources: each source over the whole run.
        steps: ranges of steps, with the samples and tokens consumed at each step.
        past: steps of another system; None, and not a key of ``--json``, without.
        mix_changes: changes of the mix, likewise.
        mix_bounds: earliest repeat of each source under any mix, likewise.
        remaining: what is left of a run in progress, likewise.
    """

    samples_masked: int
    samples_per_rank: int | None
    exhaustion: str
    stopped_by: str
    evaluation_rounds: int
    evaluation_batches: int
    evaluation_samples: int
    evaluation_masked: int
    evaluation_available: int
    padding: Padding
    evaluation_padding: Padding
    stages: tuple[StageEnd, ...]
    draws: tuple[StageDraw, ...]
    sources: tuple[SourceTotal, ...]
    steps: tuple[StepRange, ...] = ()
    past: PlannedPast | None = None
    mix_changes: MixEffect | None = None
    mix_bounds: tuple[EarliestRepeat, ...] = ()
    remaining: RemainingRun | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints: the fields, of JSON types alone."""
        return json_object(self, "skip", "past", "mix_changes", "mix_bounds", "remaining")

    def view(self) -> RenderableType:
        """Return the tables and notes of the printed plan."""
        return _view(self)


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
    steps = _skipped_steps(layout)
    skip = None
    if steps is not None:
        skip = effect_of(steps.skips, steps.bounds, masked_rows=steps.masked_rows)
        read = skip.samples_to_read + skip.samples_padded
    totals, every = _totals(layout, steps), RecipeRows(layout, None, coverage, progress)
    rows = (every if steps is None else replace(every, coverage="none")).rows()
    built, limits = _most_built(rows), recipe_limits(layout, rows)
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
        datasets=rows if steps is None else replace(every, steps=steps).rows(),
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
        past=_past(layout),
        mix_changes=_mix_effect(layout),
        mix_bounds=tuple(earliest_repeats(layout, consumed_samples or 0)) if mix_bounds else (),
        remaining=None if consumed_samples is None else _remaining(layout, consumed_samples, steps),
    )
    warnings = list(_warnings(layout, plan))
    if means:
        reason = f"--coverage {coverage} does not count"
        if counts:
            reason = "have too many documents or samples to count"
        warnings.append(
            f"tokens of {_names(means)} are means over seeds, because parts of epochs are drawn "
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
        skips, bounds = skipped.skips, skipped.bounds
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


def _skipped_steps(layout: RecipeLayout) -> SkippedSteps | None:
    """Return the steps of a run with skips; None without any."""
    recipe = layout.recipe
    if not recipe.skip:
        return None
    bounds, _ = step_bounds(layout.batch, 0, layout.num_samples)
    return skip_steps(
        recipe.skip, layout.batch, bounds, num_samples=layout.num_samples,
        masked_rows=layout.samples_masked,
    )  # fmt: skip


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
        ranges = steps.skips.served_samples(int(steps.bounds[-1]))
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


def _warnings(layout: RecipeLayout, plan: RecipePlan) -> Iterator[str]:
    recipe = layout.recipe
    if plan.stopped_by:
        yield (
            f"the run stops on all ranks after step {plan.train_iters - 1}: {plan.stopped_by} is "
            f"exhausted; {recipe.exhaustion_remedy}"
        )
    sizes = list(zip(recipe.sources, layout.sizes, strict=True))
    if recipe.evaluation is not None and layout.validation is not None:
        sizes.append((recipe.evaluation.source, layout.validation))
    cut = [each for each in sizes if each[1].cut_tokens >= _NOTICEABLE * each[1].tokens]
    cut.sort(key=lambda each: -each[1].cut_tokens / max(1, each[1].tokens))
    yield from _of_sources(
        f"{source.name}: {recipe.called(f'long_documents {source.long_documents}')} leaves "
        f"{size.cut_tokens:,} of {size.tokens:,} tokens ({size.cut_tokens / size.tokens:.1%}) in "
        f"no sample; raise {recipe.called('sequence_length')}, or use "
        f"{recipe.called('long_documents split')}"
        for source, size in cut
    )
    ended = ((total, total.blocks) for total in plan.sources if total.blocks is not None)
    yield from _of_sources(
        f"{total.source}: {facts.deferred:,} of {total.tokens_per_epoch:,} tokens "
        f"({facts.deferred / total.tokens_per_epoch:.1%}) are left of the blocks in which the "
        f"sequence length changes; lower its block_tokens, {facts.block_tokens:,}, so that later "
        "stages read them"
        for total, facts in ended
        if facts.deferred >= _MOST_DEFERRED * total.tokens_per_epoch
    )
    yield from _short_stages(layout)
    for name, padding in (
        ("the last batch", plan.padding),
        ("the last batch of evaluation", plan.evaluation_padding),
    ):
        if padding.micro_batches:
            yield (
                f"{name} has {_padding_text(padding, recipe.data_parallel_size)}, where a mean "
                "over unmasked tokens is 0 / 0: normalise by the global count of unmasked tokens"
            )
    if plan.past is not None and any(row.assumed for row in plan.past.sources):
        yield (
            "past: which samples were read is assumed, because only their number is given; those "
            "expected to repeat are a mean over orders. A list of the documents read, as read: "
            "{web: {documents: FILE}}, makes it certain"
        )
    if plan.skip is not None and plan.skip.changes_counts:
        yield "stages show the samples of the order, with those skipped; sources what is served"
        needed = zip(plan.sources, layout.samples_needed(), strict=True)
        unsure = [row.source for row, end in needed if row.unseen and end > row.samples_per_epoch]
        if unsure:
            yield (
                f"never drawn counts the first epoch of {_names(unsure)}, of which no later "
                "epoch is served whole; `megaindex audit` counts the tokens"
            )
    unused = [source.source for source in plan.sources if source.drawn == 0]
    if unused:
        yield f"never drawn: {_names(unused)}"


def _of_sources(warnings: Iterable[str]) -> Iterator[str]:
    """Yield one warning a source; of many sources the first, and how many more there are."""
    found = list(warnings)
    shown = found if len(found) <= MANY_SOURCES else found[:_SHOWN_WARNINGS]
    yield from shown
    if left := len(found) - len(shown):
        yield f"so it is with {left:,} more sources"


def _names(sources: Sequence[str]) -> str:
    shown, rest = sources[:SHOWN_SOURCES], sources[SHOWN_SOURCES:]
    return ", ".join(shown) + f" and {len(rest):,} more" * bool(rest)


def _padding_text(padding: Padding, parallel: int | None) -> str:
    if padding.ranks:
        return f"padding only on {padding.ranks} of {parallel} ranks"
    return f"{padding.micro_batches} micro batches of padding only"


def _short_stages(layout: RecipeLayout) -> Iterator[str]:
    """Yield the stages that whole batches end before their full length."""
    recipe, position = layout.recipe, layout.recipe.first_sample
    stages = {stage.name: {s.source for s in stage.streams} for stage in recipe.stages}
    for end in layout.ends[: -1 if layout.stopped_by else None]:
        begin, position = position, position + end.samples
        sources = stages.pop(end.stage)
        missing = end.samples_wanted - end.samples
        if missing <= 0 or end.length.startswith("tokens"):
            continue
        sizes = layout.batch.sizes(begin, position)
        later = [name for name, others in stages.items() if sources & others]
        outcome = "no later stage draws them"
        if later:
            outcome = f"stage {later[0]} goes on reading its sources from there"
        elif not stages:
            rows = layout.batch.samples_after(1, position) - position
            outcome = f"tail pad serves them too and masks {rows - missing} rows of their batch"
        yield (
            f"stage {end.stage}: whole batches of {_sizes_text(sizes)} end {missing} samples "
            "short of its "
            f"{end.samples_wanted:,} ({end.length}); {outcome}"
        )


def _view(plan: RecipePlan) -> RenderableType:
    parts: list[RenderableType] = [_answer(plan)]
    if plan.past is not None:
        parts.append(_past_table(plan.past))
    parts += [_stages(plan), _sources(plan)]
    if (coverage := coverage_table(plan, shown_rows(plan), ShortNames("", {}))) is not None:
        parts.append(coverage)
    if any(source.blocks is not None for source in plan.sources):
        parts.append(_blocks(plan))
    if plan.mix_bounds:
        parts.append(_bounds(plan))
    packed = packing_texts((source.source, source.packing) for source in plan.sources)
    if (facts := facts_view(packed)) is not None:
        parts.append(facts)
    return spaced([*parts, *map(warning, plan.warnings)])


def _answer(plan: RecipePlan) -> RenderableType:
    sizes = " → ".join(
        _sizes_text([size] if isinstance(size, int) else size.values())
        for _, size in plan.batch_schedule
    )
    stages = len({draw.stage for draw in plan.draws})
    several = dict.fromkeys(steps.sequence_length for steps in plan.steps)
    lengths = " → ".join(map(str, several or [plan.sequence_length]))
    lines: list[str | Text] = [
        f"{stages} stage{'s' * (stages != 1)} of {len(plan.sources)} "
        f"source{'s' * (len(plan.sources) > 1)}, {lengths} tokens a sample, "
        f"{sizes} samples an iteration",
        "",
        Text.assemble("train_iters ", (str(plan.train_iters), "bold green")),
    ]
    if plan.past is not None:
        steps = plan.train_iters - plan.past.steps
        lines.append(f"{plan.past.steps:,} of them in another system, then {steps:,} here")
    lines.append(f"{plan.samples_consumed:,} samples, {plan.tokens_consumed:,} tokens")
    if plan.samples_per_rank is not None:
        lines.append(f"every rank reads {plan.samples_per_rank:,} samples")
    if plan.samples_masked:
        lines.append(f"{_rows(plan.samples_masked)} of the last batch masked")
    if plan.max_train_iters_without_repeat is not None:
        lines.append(without_repeat(plan.max_train_iters_without_repeat))
    if plan.skip is not None:
        lines += [f"skip: {line}" for line in plan.skip.lines()]
    if (mix := plan.mix_changes) is not None:
        when = f"changed {mix.changes:,} times, at steps {mix.first_step:,} … {mix.last_step:,}"
        lines.append(f"mix: {when if mix.changes > 1 else f'changed at step {mix.first_step:,}'}")
    if (rest := plan.remaining) is not None:
        counts = [f"{count:,} {name}" for name, count in rest.sources.items() if count]
        left = f", {_names(counts)}" * bool(counts)
        lines.append(
            f"at step {rest.first_step:,}: {rest.samples:,} samples in {rest.steps:,} steps "
            f"left{left}"
        )
    if plan.evaluation_rounds:
        masked = plan.evaluation_masked
        lines.append(
            f"{plan.evaluation_rounds} × evaluation on {plan.evaluation_samples:,} of "
            f"{plan.evaluation_available:,} samples, each once, in {plan.evaluation_batches:,} "
            f"batch{'es' * (plan.evaluation_batches != 1)}"
            + (f", {_rows(masked)} masked" if masked else "")
        )
    return answer_panel(*(Text(line) if isinstance(line, str) else line for line in lines))


def _sizes_text(sizes: Collection[int]) -> str:
    """Return batch sizes, such as those of the streams of a stage."""
    each = sorted({*sizes})
    return " or ".join(map(str, each)) if len(each) <= 3 else f"{each[0]} … {each[-1]}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _past_table(past: PlannedPast) -> RenderableType:
    table = FittedTable(
        TableColumn("past", "name"),
        TableColumn("given", "label"),
        *("read", "epochs"),
        TableColumn("assumed", "label"),
        "expected repeats",
    )
    rows = past.sources
    if len(rows) > MANY_SOURCES:
        rows = tuple(sorted(rows, key=lambda row: -row.expected_repeats)[:SHOWN_SOURCES])
    for row in rows:
        table.add_row(
            row.source,
            row.given,
            f"{row.samples:,}",
            f"{row.epochs:.2f}",
            row.assumed or "nothing",
            f"{row.expected_repeats:,} of {row.drawn:,}" if row.assumed else "",
        )
    return Group(table, *more(len(past.sources) - len(rows)))


def _stages(plan: RecipePlan) -> RenderableType:
    sized = any(draw.batch_size for draw in plan.draws)
    table = FittedTable(
        TableColumn("stage", "name"),
        TableColumn("steps", "label"),
        TableColumn("source", "name"),
        *["batch"] * sized,
        *("samples", "share", "epochs", "first repeat"),
    )
    before: tuple[str, int] | None = None
    for draw in plan.draws if len(plan.sources) <= MANY_SOURCES else _of_stages(plan.draws):
        opening = (draw.stage, draw.first_step)
        shown = opening != before
        table.add_row(
            draw.stage if shown else "",
            f"{draw.first_step:,} … {draw.end_step - 1:,}" if shown else "",
            draw.source,
            *["" if draw.batch_size is None else f"{draw.batch_size:,}"] * sized,
            f"{draw.samples:,}",
            f"{100 * draw.share:.1f} %",
            f"{draw.epochs_begin:.2f} → {draw.epochs_end:.2f}",
            "" if draw.first_repeat is None else f"step {draw.first_repeat:,}",
        )
        before = opening
    return table


def _of_stages(draws: Sequence[StageDraw]) -> Iterator[StageDraw]:
    """Yield for each stage of more than a few sources one draw that stands for all."""
    for _, stage in groupby(draws, key=lambda draw: (draw.stage, draw.first_step)):
        each = list(stage)
        if len(each) <= SHOWN_SOURCES:
            yield from each
            continue
        repeats = [draw.first_repeat for draw in each if draw.first_repeat is not None]
        yield replace(
            each[0],
            source=f"{len(each):,} sources",
            samples=sum(draw.samples for draw in each),
            share=sum(draw.share for draw in each),
            epochs_begin=max(draw.epochs_begin for draw in each),
            epochs_end=max(draw.epochs_end for draw in each),
            first_repeat=min(repeats, default=None),
            batch_size=None,
        )


def _bounds(plan: RecipePlan) -> RenderableType:
    table = FittedTable(
        TableColumn("any mix", "name"), *("least share", "most", "can repeat from", "as planned")
    )
    rows = plan.mix_bounds
    if len(rows) > MANY_SOURCES:
        last = plan.train_iters
        soon = sorted(rows, key=lambda row: last if row.first_step is None else row.first_step)
        rows = tuple(soon[:SHOWN_SOURCES])
    for row in rows:
        steps = (
            "not in this run" if step is None else f"step {step:,}"
            for step in (row.first_step, row.planned_step)
        )
        table.add_row(row.source, f"{100 * row.least:.4g} %", f"{100 * row.most:.4g} %", *steps)
    return Group(table, *more(len(plan.mix_bounds) - len(rows)))


def _sources(plan: RecipePlan) -> RenderableType:
    cut = any(source.cut_tokens for source in plan.sources)
    names = ["tokens an epoch", "samples an epoch", "drawn", "epochs", "never drawn"]
    names += ["tokens cut"] * cut
    table = FittedTable(TableColumn("source", "name"), TableColumn("kind", "label"), *names)
    shown: Sequence[SourceTotal] = plan.sources
    if len(plan.sources) > MANY_SOURCES:
        epochs = [source.epochs for source in shown]
        shown = worst_first(shown, epochs, repeat=bool(_repeating(plan)))[:SHOWN_SOURCES]
    for source in shown:
        table.add_row(
            source.source,
            source.kind,
            f"{source.tokens_per_epoch:,}",
            f"{source.samples_per_epoch:,}",
            f"{source.drawn:,}",
            f"{source.epochs:.2f}",
            f"{source.unseen:,}",
            *([f"{source.cut_tokens:,}"] * cut),
        )
    left = len(plan.sources) - len(shown)
    return Group(table, *more(left), *[Prose(_of_all(plan))] * bool(left))


def _repeating(plan: RecipePlan) -> set[str]:
    return {draw.source for draw in plan.draws if draw.first_repeat is not None}


def _of_all(plan: RecipePlan) -> str:
    """Return a sentence on all sources."""
    repeat = _repeating(plan)
    most = max(plan.sources, key=lambda source: source.epochs)
    text = repeats_text(len(repeat), len(plan.sources), most.source, most.epochs)
    unseen = sum(source.unseen > 0 for source in plan.sources)
    return text + f"; of {unseen:,} some samples are never drawn" * bool(unseen)


def _blocks(plan: RecipePlan) -> RenderableType:
    """Return the table of the first epoch of the sources in order blocks."""
    table = FittedTable(
        TableColumn("first epoch", "name"),
        *("blocks", "tokens a block", "served", "dropped", "deferred", "not read"),
    )
    rows = [(source, source.blocks) for source in plan.sources if source.blocks is not None]
    shown: Sequence[tuple[SourceTotal, BlockFacts]] = rows
    if len(rows) > MANY_SOURCES:
        epochs = [source.epochs for source, _ in rows]
        shown = worst_first(rows, epochs, repeat=bool(_repeating(plan)))[:SHOWN_SOURCES]
    for source, facts in shown:
        numbers = (facts.blocks, facts.block_tokens, facts.served, facts.dropped, facts.deferred)
        table.add_row(source.source, *(f"{number:,}" for number in (*numbers, facts.unread)))
    return Group(table, *more(len(rows) - len(shown)))
