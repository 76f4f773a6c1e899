"""Limits of the iterations of a run: tails, further epochs, repeats, loaders that run dry."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.blend import Blend
from megaindex.index.mixing import PerStream
from megaindex.plan.model import DryLoader, EarliestRepeat, Neighbour, Row, Tail
from megaindex.plan.recipe_rows import epochs_for, fresh_samples, reads_of
from megaindex.recipe.layout import PlannedStage, RecipeLayout, resolve_recipe
from megaindex.recipe.mixture import samples_per_epoch
from megaindex.run.passes import loader_limit
from megaindex.run.sizing import Sizing
from megaindex.run.target import (
    Evaluations,
    ResolvedTarget,
    consumed_of,
    iterations_of,
    samples_wanted,
)
from megaindex.settings.recipe import RecipeStage
from megaindex.settings.run_settings import RunSettings, Target


def tails_of(run: RunSettings, sizing: Sizing) -> tuple[Tail, ...]:
    """Return the cost of each tail policy; empty for a target of iterations, which has no tail."""
    if run.target.kind in ("iterations", "loader_epochs"):
        return ()
    wanted = samples_wanted(run, sizing)
    tails = []
    for policy in ("drop", "pad", "wrap"):
        iterations = iterations_of(run, wanted, policy)
        served = run.batch.samples_after(iterations, run.consumed_samples)
        beyond = max(0, served - wanted)
        tails.append(
            Tail(
                policy=policy,
                train_iters=iterations,
                samples_consumed=consumed_of(run, wanted, iterations, policy),
                samples_dropped=max(0, wanted - served),
                samples_masked=beyond if policy == "pad" else 0,
                samples_repeated=beyond if policy == "wrap" else 0,
                ranks_masked=_ranks_masked(run, iterations, beyond) if policy == "pad" else 0,
            )
        )
    return tuple(tails)


def _ranks_masked(run: RunSettings, iterations: int, masked: int) -> int:
    """Return the ranks without a sample in the last batch, whose samples are spread evenly."""
    if not masked or run.data_parallel_size is None:
        return 0
    last, end = (
        run.batch.samples_after(i, run.consumed_samples) for i in (iterations - 1, iterations)
    )
    return max(0, run.data_parallel_size - (end - last - masked))


def iteration_limits(run: RunSettings, sizing: Sizing, train: Sequence[Row]) -> dict[str, Any]:
    """Return the limits set by the epochs of the rows, by the names of the fields of `Plan`."""
    once, exact = (0, True)
    if sizing.row.fewest_epochs == 1:
        once, exact = sizing.longest([1] * len(sizing.tokens))
    counted = loader_limit(run, sizing.per_epoch())
    unrepeated = once if counted is None else min(once, counted)
    if sizing.built_as_requested and counted is not None:
        unrepeated = _held_by_loader(run, sizing, unrepeated)
    if sizing.asks_one_epoch:
        once = unrepeated
    now = _epochs_now(train, len(sizing.tokens))
    same = once
    if now is not None and max(now) > 1:
        same, exact = sizing.longest(now)
    last = _furthest(run, same)
    return {
        "max_train_iters_without_repeat": _furthest(run, unrepeated),
        "max_train_iters_same_epochs": last,
        "max_train_iters_exact": exact,
        "neighbours": _neighbours(run, sizing, last, now) if now and exact else (),
    }


def _held_by_loader(run: RunSettings, sizing: Sizing, samples: int) -> int:
    """Return the most samples that a loader serves once, if no more is built than is requested.

    It omits a sample of each source, and a buffer makes up for them in long runs.
    """
    for iterations in range(run.batch.iterations_within(samples, run.consumed_samples), 0, -1):
        end = run.batch.samples_after(iterations, run.consumed_samples)
        requested = sizing.requested(end)
        if requested is None or sizing.buffer in (1.0, "exact"):
            return 0
        if (loader_limit(run, requested) or 0) >= end:
            return end
    return 0


def _epochs_now(train: Sequence[Row], num_sources: int) -> list[int] | None:
    """Return the epochs of each source, the most of any phase; None where not counted."""
    epochs = [row.epochs for row in train if row.epochs is not None]
    if len(epochs) != len(train):
        return None
    return [max(epochs[i::num_sources]) for i in range(num_sources)]


def _furthest(run: RunSettings, samples: int) -> int:
    """Return the most iterations in which no phase takes more than ``samples`` samples."""
    if not run.phases:
        return run.batch.iterations_within(samples, run.consumed_samples)
    most = run.batch.iterations_within(samples)  # of a phase; batches are of one size
    begins = [0, *run.phases]
    last = next(
        (begin + most for begin, end in pairwise(begins) if begin + most < end), begins[-1] + most
    )
    return max(0, last - run.batch.iterations_within(run.consumed_samples))


def _neighbours(
    run: RunSettings, sizing: Sizing, last: int, now: Sequence[int]
) -> tuple[Neighbour, ...]:
    """Return the effect of the last number of iterations within these epochs, and of the next."""
    if sizing.asks_one_epoch:
        return ()
    made = run.batch.iterations_within(run.consumed_samples) if run.phases else 0
    begin = max((b for b in run.phases if b <= made + last), default=0)
    before = run.batch.samples_after(begin)
    neighbours = []
    for iterations in (last, last + 1):
        samples = run.batch.samples_after(iterations, run.consumed_samples) - before
        requested = sizing.requested(samples)
        if requested is None:
            return ()
        try:
            epochs = sizing.epochs(requested)
        except InvalidArgument:  # beyond an exact number of epochs nothing is built
            return ()
        more = [n for n, a, b in zip(sizing.names, epochs, now, strict=True) if a > b]
        neighbours.append(
            Neighbour(
                train_iters=iterations,
                num_epochs_built=max(epochs),
                samples_built=sum(sizing.built(requested, epochs)),
                begins=more[0] if more else "",
            )
        )
    return tuple(neighbours)


def dry_loaders(
    run: RunSettings, target: ResolvedTarget, rows: Sequence[Row], evaluation: Evaluations | None
) -> tuple[DryLoader, ...]:
    """Return the splits of which the run reads more than Megatron's loader holds: the single-pass
    one its samples, the cyclic one no end of them, but from one micro batch of all ranks on."""
    if run.row.order != "megatron" or run.phases:
        return ()
    asked = {"train": (target.samples_requested, target.samples_consumed)}
    if evaluation is not None:
        asked["test"] = (evaluation.test_samples, evaluation.test_samples_read)
        if not evaluation.full or _reads_once(run):
            asked["valid"] = (evaluation.valid_samples, evaluation.valid_samples_read)
    dry = []
    for split, (requested, read) in asked.items():
        held = _loader_length(run, [row for row in rows if row.split == split], requested)
        unit = run.unit or 1
        if split != "train" and run.data_parallel_size:
            unit = (run.evaluation.micro_batch_size or 1) * run.data_parallel_size
        assert run.version is not None, "order megatron has one"
        stops = held == 0 and not run.version.empty_loaders
        if held is None:
            continue
        there = held // unit * unit
        enough = there >= read or (run.dataloader == "cyclic" and there > 0)
        if enough and not stops:
            continue
        within = run.batch.iterations_within(there, run.consumed_samples)
        dry.append(
            DryLoader(
                split=split,
                samples_there=there,
                samples_read=read,
                train_iters=within if split == "train" else None,
            )
        )
    return tuple(dry)


def _reads_once(run: RunSettings) -> bool:
    """Return True if full validation has a single-pass loader: one set, before 0.18."""
    assert run.version is not None, "order megatron has one"
    return run.version.full_validation == "samples" and not run.evaluation.multiple


def _loader_length(run: RunSettings, rows: Sequence[Row], requested: int) -> int | None:
    """Return the samples of Megatron's top-level dataset; None where they were not counted."""
    rows = [row for row in rows if row.tokens_per_epoch]
    built = [row.built for row in rows if row.built is not None]
    if not rows or len(built) != len(rows):
        return None
    weights = [row.weight for row in rows if row.weight is not None]
    if len(rows) == 1 and (run.data.apart or not weights):
        return built[0]
    if run.variance_buffer == "exact":
        return requested
    if not weights:
        return min(requested, sum(built))
    return Blend(row=run.row, weights=weights).size(requested)


def recipe_limits(layout: RecipeLayout, epochs: Mapping[int, int]) -> tuple[int | None, int | None]:
    """Return the most iterations that serve no sample twice, and that build no further epoch than
    the ``epochs`` of sources, by number from 0.

    They are those of the run stopped earlier, or with its last stage made longer; None under
    exhaustion redistribute, where the draws of a stage depend on its length.
    """
    if layout.recipe.exhaustion == "redistribute":
        return None, None
    once = _last_step(layout, None)
    same = _last_step(layout, epochs)
    if once is None or same is None:
        longer = _longer(layout, epochs)
        once = _last_step(longer, None) if once is None else once
        same = _last_step(longer, epochs) if same is None else same
        once, same = (longer.num_steps if each is None else each for each in (once, same))
    return once, same


def _last_step(layout: RecipeLayout, epochs: Mapping[int, int] | None) -> int | None:
    """Return the steps before a sample is served again, or one beyond these epochs of its source;
    None if no step does so."""
    for piece, reads in groupby(reads_of(layout), attrgetter("piece")):
        stage = layout.stages[piece - 1]
        limits = [stage.num_samples] * len(stage.mixed.sources)
        for read in reads:
            size = layout.size_at(read.source, stage.sequence_length)
            if epochs is None:
                limits[read.stream] = fresh_samples(read)
            else:
                held = size.samples_in(Fraction(epochs.get(read.source, 1)))
                limits[read.stream] = max(0, held - read.begin)
        most, _ = stage.mixing.longest(limits, stage.num_samples)
        if most < stage.num_samples:
            return layout.batch.iterations_within(stage.first_sample + most)
    return None


def _longer(layout: RecipeLayout, epochs: Mapping[int, int]) -> RecipeLayout:
    """Return the layout with a last stage so long that it exceeds these epochs of a source, or ends
    where a source is exhausted."""
    recipe = layout.recipe
    *before, last = recipe.stages
    length = recipe.length_of(last)
    held = sum(
        layout.size_at(number, length).samples_in(Fraction(epochs.get(number, 1)))
        for number in range(len(layout.sizes))
    )
    steps = held // min(layout.batch.sizes(0)) + 2
    longer = replace(last, length=Target(kind="iterations", value=Fraction(steps)))
    exhaustion = "stop" if recipe.exhaustion == "error" else recipe.exhaustion
    return resolve_recipe(
        replace(recipe, stages=(*before, longer), tail="drop", exhaustion=exhaustion), layout.sizes
    )


def samples_left_over(layout: RecipeLayout) -> int | None:
    """Return the samples of the epochs aimed at that the run does not consume.

    They are those of the stages' lengths if all are epochs, else of the whole epochs of all sources
    that the run reaches into; None if the stages differ in sequence length.
    """
    recipe = layout.recipe
    if recipe.has_lengths:
        return None
    if all(stage.length is None or stage.length.kind == "epochs" for stage in recipe.stages):
        return max(0, sum(end.samples_wanted for end in layout.ends) - layout.num_samples)
    consumed = sum(layout.begins) + layout.num_samples
    epochs = max(1, consumed // _samples_in(layout, 1) - 1)
    while (held := _samples_in(layout, epochs)) < consumed:
        epochs += 1
    return held - consumed


def _samples_in(layout: RecipeLayout, epochs: int) -> int:
    return sum(size.samples_in(Fraction(epochs)) for size in layout.sizes)


def epochs_asked(layout: RecipeLayout) -> list[int]:
    """Return the epochs of each source that the stages ask for by their lengths, at least one.

    A stage of a number of steps, samples or tokens asks for none; by proportion, an epoch of the
    mixture asks for one of each source.
    """
    recipe = layout.recipe
    asked = [Fraction(0)] * len(layout.sizes)
    for stage in recipe.stages:
        length = Fraction(1) if stage.length is None else stage.length.value
        if stage.length is not None and stage.length.kind != "epochs":
            continue
        for number, share in _of_a_mixture(layout, stage):
            asked[number] += length * share
    return [max(1, math.ceil(each)) for each in asked]


def _of_a_mixture(layout: RecipeLayout, stage: RecipeStage) -> Iterator[tuple[int, Fraction]]:
    """Yield the number of each source of a stage and its epochs in an epoch of the mixture."""
    numbers = [layout.recipe.number(stream.source) for stream in stage.streams]
    length = layout.recipe.length_of(stage)
    sizes = [layout.size_at(number, length) for number in numbers]
    counts: Any = samples_per_epoch(stage, sizes, layout.recipe.seed)
    held: Any = [size.samples for size in sizes]
    if stage.by_proportion:
        counts, held = [sum(counts)] * len(sizes), [sum(held)] * len(sizes)
    for number, count, samples in zip(numbers, counts, held, strict=True):
        yield number, Fraction(count, samples)


def epochs_read(layout: RecipeLayout) -> list[int]:
    """Return the epochs that the run begins of each source; a restart begins one more."""
    before = [0] * len(layout.sizes)
    now = [0] * len(layout.sizes)
    for read in reads_of(layout):
        if read.count == 0:
            continue
        if not read.goes_on:
            before[read.source] += now[read.source]
            now[read.source] = 0
        size = layout.size_at(read.source, read.stage.sequence_length)
        now[read.source] = max(now[read.source], epochs_for(size, read.begin + read.count))
    return [sum(pair) for pair in zip(before, now, strict=True)]


def earliest_repeats(layout: RecipeLayout, consumed_samples: int = 0) -> list[EarliestRepeat]:
    """Return the earliest repeat of each source under any mix from ``consumed_samples`` on.

    Changed weights are exact to a sample for each stream, which the bound allows for; it is exact
    for a source that may be drawn alone. Stages by repeat and choose, or with batches of several
    sizes, keep their draws. Where stages differ in sequence length, the weights of a stage are
    those of its own sources, and more draws at one length never lead to an earlier block at the
    next.
    """
    recipe = layout.recipe
    bounds = {name: (low, high) for name, low, high in recipe.mix_bounds}
    lows = sum((low for low, _ in bounds.values()), Fraction(0))

    def first_step(number: int, share: Fraction | None, consumed: int) -> int | None:
        position = _first_repeat(_draws_of(layout, number, share, consumed), layout, number)
        return None if position is None else layout.batch.iterations_within(position)

    found = []
    for number, source in enumerate(recipe.sources):
        least, high = bounds.get(source.name, (Fraction(0), Fraction(1)))
        most = min(high, 1 - (lows - least))  # the others have at least their lows
        found.append(
            EarliestRepeat(
                source=source.name,
                least=float(least),
                most=float(most),
                first_step=first_step(number, most, consumed_samples),
                planned_step=first_step(number, None, 0),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _DrawLimit:
    """The most draws from a source in a range of positions."""

    first: int
    samples: int
    restarts: bool
    planned: PlannedStage
    """The part of a stage that lies there, with its draws."""
    stream: int | None
    """Stream of the source in it; None if it does not draw from the source."""
    share: Fraction | None
    """Greatest share of changed weights; None where the weights stay."""
    slack: Fraction = Fraction(0)

    def most(self, samples: int) -> int:
        """Return the most draws in the first ``samples`` positions."""
        own = 0
        if self.stream is not None:
            begin = self.first - self.planned.first_sample
            counts = (self.planned.mixing.counts(n)[self.stream] for n in (begin, begin + samples))
            low, high = map(int, counts)
            own = high - low
        if self.share is None:
            return own
        return min(samples, max(own, int(self.share * samples + self.slack)))


def _draws_of(
    layout: RecipeLayout, source: int, share: Fraction | None, consumed: int
) -> Iterator[_DrawLimit]:
    """Yield the draws from a source, stage by stage; before ``consumed`` they are known."""
    recipe = layout.recipe
    stages = {stage.name: stage for stage in recipe.stages}
    name, begun = recipe.sources[source].name, ""
    slack = Fraction(0 if share == 1 else 1) + (share or 0) * len(recipe.sources) * (share != 1)
    for planned in layout.stages:
        stage = stages[planned.name]
        restarts = planned.name != begun and any(
            stream.restart for stream in stage.streams if stream.source == name
        )
        begun = planned.name
        sources = planned.mixed.sources
        stream = sources.index(source) if source in sources else None
        end = planned.first_sample + planned.num_samples
        known = min(max(consumed, planned.first_sample), end)
        fixed = isinstance(planned.mixing, PerStream) and planned.mixing.batch_size is None
        fixed = fixed or not stage.by_proportion or recipe.exhaustion == "redistribute"
        fixed = fixed or (recipe.has_lengths and name not in {s.source for s in stage.streams})
        free = None if fixed else share
        for first, stop, most in ((planned.first_sample, known, None), (known, end, free)):
            if first < stop:
                yield _DrawLimit(
                    first=first,
                    samples=stop - first,
                    restarts=restarts and first == planned.first_sample,
                    planned=planned,
                    stream=stream,
                    share=most,
                    slack=slack,
                )


def _first_repeat(draws: Iterator[_DrawLimit], layout: RecipeLayout, source: int) -> int | None:
    """Return the first position that can serve a sample of the source again."""
    recipe, size = layout.recipe, layout.sizes[source]
    name = recipe.sources[source].name
    restarts = any(stream.restart for stage in recipe.stages for stream in stage.streams)
    allowed = int(size.samples * recipe.sources[source].most_epochs)
    if recipe.exhaustion != "repeat" and allowed <= size.samples and not restarts:
        return None
    stages = {stage.name: {stream.source for stream in stage.streams} for stage in recipe.stages}
    read, length = layout.begins[source], recipe.lengths_of(name)[0]
    reached = read > 0
    for part in draws:
        at = part.planned.sequence_length
        if size.blocks is not None and at != length and name in stages[part.planned.name]:
            read, _ = size.blocks.at_length(length).next_block(read, at)
            length = at
        epoch = size.at_length(length).samples
        if part.restarts:
            read = epoch if reached else 0  # its first sample was served before
        left, most_drawn = max(0, epoch - read), part.most(part.samples)
        if most_drawn > left:
            # draws rise with samples: the last position of the fewest that need more than is left
            return part.first + bisect_right(range(part.samples), left, key=part.most) - 1
        read += most_drawn
        reached = reached or most_drawn > 0
    return None
