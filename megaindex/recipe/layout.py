"""The layout of a recipe: positions of each stage and draws from each source.

It is computed from the sizes of the sources alone; plan, index and audit use the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.index.mixing import ChangedMixing, FixedMixing, Mixing
from megaindex.index.skips import Skips
from megaindex.index.staged_index import MixedStage
from megaindex.kernels.reference.blending import UNIT
from megaindex.recipe.mixture import Mixture, SourceSize, mixture_of, within_limits
from megaindex.settings.batch_schedule import (
    BatchSchedule,
    SkippedSteps,
    Steps,
    StepSizes,
    skip_steps,
    steps_of,
)
from megaindex.settings.past import PastRead
from megaindex.settings.recipe import LENGTH_KEYS, Recipe, RecipeStage, Rounds, shown
from megaindex.validation import count_of


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage, or a part of one, in which the mixture does not change."""

    name: str
    first_sample: int
    mixed: MixedStage
    sequence_length: int
    without: tuple[str, ...] = ()
    """Sources of the stage that were exhausted before it began."""
    deferred: tuple[int, ...] = ()
    """Tokens of each stream's source that are left of the block of a stage of another sequence
    length, and that this epoch of the source does not serve."""

    @property
    def num_samples(self) -> int:
        return self.mixed.num_samples

    @property
    def mixing(self) -> Mixing:
        return self.mixed.mixing

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each stream."""
        return tuple(int(count) for count in self.mixing.counts(self.num_samples))

    @cached_property
    def reads(self) -> list[tuple[int, int, int]]:
        """Number of the source of each stream, its first sample and the samples drawn of it."""
        return list(zip(self.mixed.sources, self.mixed.begins, self.counts, strict=True))

    def weights_at(self, position: int) -> list[float]:
        """Return the share of each stream in the weights at a position of the stage."""
        mixing: Mixing | None = self.mixing
        weights = None
        if isinstance(mixing, ChangedMixing):
            weights, mixing = mixing.weights_at(position), mixing.first
        if weights is not None:
            return [float(units) / UNIT for units in weights]
        assert isinstance(mixing, FixedMixing), "before the first change"
        total = sum(mixing.shares)
        return [share / total for share in mixing.shares]

    def shortened(self, num_samples: int) -> PlannedStage:
        """Return the stage with its first ``num_samples`` samples."""
        return replace(self, mixed=replace(self.mixed, num_samples=num_samples))


@dataclass(frozen=True, kw_only=True)
class StageEnd:
    """Length of a stage in the recipe, and in whole batches."""

    stage: str
    length: str
    """Length as in the recipe file, such as ``epochs: 1``."""
    samples_wanted: int
    """Samples of that length."""
    samples: int
    """Samples in whole batches, of a stage in which the run stops those served."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RecipeLayout:
    """All stages of a run, with the sizes of its sources."""

    recipe: Recipe
    sizes: tuple[SourceSize, ...]
    """One epoch of each source."""
    stages: tuple[PlannedStage, ...]
    num_steps: int
    batch: BatchSchedule
    """Global batch sizes over the run: those of the recipe, or of its stages one after another."""
    samples_masked: int = 0
    """Rows of the last batch that are padding without loss, under tail pad."""
    evaluation: Rounds | None = None
    validation: SourceSize | None = None
    """One epoch of the source of the evaluations."""
    ends: tuple[StageEnd, ...] = ()
    """Lengths of the stages that the run completes."""
    stopped_by: str = ""
    """Source whose exhaustion ends the run early; empty if the run ends with its last stage."""

    def __repr__(self) -> str:
        size = f"{self.num_steps:,} steps, {self.num_samples:,} samples"
        return f"RecipeLayout({size}, {self.recipe!r})"

    @cached_property
    def shuffle_names(self) -> list[str]:
        """Name by which each source is shuffled; of one without files, its name in the recipe."""
        pairs = zip(self.sizes, self.recipe.sources, strict=True)
        return [size.shuffle_name or source.name for size, source in pairs]

    @property
    def num_samples(self) -> int:
        """Samples served, on all ranks together."""
        return sum(stage.num_samples for stage in self.stages)

    @property
    def end_sample(self) -> int:
        """Position of the end; `num_samples`, behind those of a past in another system."""
        return self.recipe.first_sample + self.num_samples

    @property
    def begins(self) -> list[int]:
        """First sample of each source that the run reads."""
        return first_unread(self.recipe, self.sizes)

    def steps(self) -> Steps:
        """Return the steps; those of a past in another system have no samples."""
        first = self.recipe.first_sample
        steps, _ = steps_of(self.batch, first, self.end_sample)
        if self.recipe.past is not None:
            steps.bounds[: self.recipe.past.steps] = first
            steps = Steps.of(steps.bounds)
        return steps

    @cached_property
    def steps_with_skips(self) -> SkippedSteps | None:
        """The steps of the run with its skips; None without any.

        Raises:
            InvalidArgument: they do not fit the run.
            MissingFile, StorageError: a file of documents cannot be read.
        """
        skip, masked = self.recipe.skip, self.samples_masked
        return skip_steps(skip, self.batch, self.steps(), masked_rows=masked) if skip else None

    @property
    def skips(self) -> Skips | None:
        """The skips of the recipe in positions; None without any."""
        return None if self.steps_with_skips is None else self.steps_with_skips.skips

    def drawn(self) -> list[int]:
        """Return the samples that the run draws of each source."""
        total = [0] * len(self.sizes)
        for stage in self.stages:
            for source, _, count in stage.reads:
                total[source] += count
        return total

    def ranges_drawn(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (source, sequence length, first sample, end) of what positions ``begin`` to ``end -
        1`` draw."""
        for stage in self.stages:
            first = stage.first_sample
            low, high = (min(max(at - first, 0), stage.num_samples) for at in (begin, end))
            if low < high:
                for source, start, stop in stage.mixed.reads(low, high):
                    yield source, stage.sequence_length, start, stop

    def samples_needed(self) -> list[int]:
        """Return one past the last sample of each source that the run reads, 0 if it reads none.

        Of a source that is read at several sequence lengths, those of the last one.
        """
        ends = [0] * len(self.sizes)
        for (source, _), end in self.reads.items():
            ends[source] = end
        return ends

    @cached_property
    def reads(self) -> dict[tuple[int, int], int]:
        """One past the last sample that is read, by (source, sequence length), in order."""
        ends: dict[tuple[int, int], int] = {}
        for stage in self.stages:
            for source, begin, count in stage.reads:
                read = source, stage.sequence_length
                ends[read] = max(ends.pop(read, 0), begin + count)  # the last one read is last
        return ends

    def size_at(self, source: int, sequence_length: int) -> SourceSize:
        """Return one epoch of a source in samples of a stage's length."""
        return self.sizes[source].at_length(sequence_length)


def first_samples(stages: Sequence[PlannedStage], end: int) -> tuple[PlannedStage, ...]:
    """Return the stages up to sample ``end`` of the run, the last one shortened."""
    return tuple(
        stage.shortened(min(stage.num_samples, end - stage.first_sample))
        for stage in stages
        if stage.first_sample < end
    )


def first_unread(recipe: Recipe, sizes: Sequence[SourceSize]) -> list[int]:
    """Return the first sample of each source that the run reads, 0 without a past."""
    begins = [0] * len(sizes)
    for name, read in recipe.past_reads.items():
        number = recipe.number(name)
        begins[number] = _first_unread(read, sizes[number])
    return begins


def _first_unread(read: PastRead, size: SourceSize) -> int:
    if read.documents:
        return (int(read.epochs or 0) + 1) * size.samples - (size.unread_samples or 0)
    if read.epochs is not None:
        return size.samples_in(read.epochs)
    count, unit = (read.tokens, "tokens") if read.samples is None else (read.samples, "samples")
    assert count is not None, "one is given"
    most = getattr(size, unit)
    if count > most:
        raise InvalidArgument(
            f"past: {count} {unit} of source {read.source} were read, more than the {most} of an "
            f"epoch; check the number, or, if it was read repeatedly, give read: {{{read.source}: "
            f"{{epochs: {count / most:.4f}}}}}"
        )
    return size.samples_in(Fraction(count, most))


_MOST_SAMPLES = 2**60


def resolve_recipe(recipe: Recipe, sizes: Sequence[SourceSize]) -> RecipeLayout:
    """Return the layout of a recipe.

    Args:
        recipe: the run.
        sizes: one epoch of each source, in the order of `Recipe.sources`.
    """
    for source, size in zip(recipe.sources, sizes, strict=True):
        if size.samples < 1:
            raise InvalidArgument(
                f"source {source.name} holds {size.tokens} tokens, not one sample of "
                f"{recipe.lengths_of(source.name)[0]}; leave it out, or lower sequence_length"
            )
    builder = _LayoutBuilder(recipe, tuple(sizes))
    for stage in recipe.stages:
        builder.add_stage(stage, is_last=stage is recipe.stages[-1])
        if builder.stopped_by:
            break
    stages = tuple(builder.stages)
    if builder.stopped_by:  # after the last batch that can be filled, on all ranks
        builder.step = builder.batch.iterations_within(builder.position)
        builder.masked = 0
        end = builder.batch.samples_after(builder.step)
        stages = first_samples(stages, end)
        begin = recipe.first_sample + sum(one.samples for one in builder.ends[:-1])
        builder.ends[-1] = replace(builder.ends[-1], samples=end - begin)
    changes = recipe.mix_changes
    if changes is not None and changes.size and not builder.stopped_by:
        last = int(changes.positions[-1])
        if last >= builder.position:
            raise InvalidArgument(
                f"mix_changes: the mix changes at sample {last}, and the run ends with sample "
                f"{builder.position}; make it longer, or remove the change"
            )
    if not stages:
        raise InvalidArgument(
            f"source {builder.stopped_by} allows less than one batch, so the run makes no step; "
            f"{recipe.exhaustion_remedy}"
        )
    return RecipeLayout(
        recipe=recipe,
        sizes=tuple(sizes),
        stages=stages,
        num_steps=builder.step,
        batch=builder.batch,
        samples_masked=builder.masked,
        ends=tuple(builder.ends),
        stopped_by=builder.stopped_by,
    )


class _StageDraws(NamedTuple):
    """Draws of a part of a stage, and the source of each stream."""

    mixing: Mixing
    sources: tuple[int, ...]


def _within_step(positions: I64, batch: BatchSchedule) -> int | None:
    """Return the first of these positions that is not the first of a step; None if all are."""
    if batch.is_constant:
        inside = positions[positions % batch.final != 0]
        return int(inside[0]) if inside.size else None
    each = positions.tolist()
    return next((n for n in each if batch.samples_after(batch.iterations_within(n)) != n), None)


@dataclass
class _LayoutBuilder:
    """Stages laid out so far, with the positions of the run and of each source."""

    recipe: Recipe
    sizes: tuple[SourceSize, ...]
    stages: list[PlannedStage] = field(default_factory=list)
    position: int = 0
    step: int = 0
    masked: int = 0
    stopped_by: str = ""
    ends: list[StageEnd] = field(default_factory=list)
    cursors: list[int] = field(init=False)
    """Next sample of each source, in samples of the length at which it was read last."""
    lengths: list[int] = field(init=False)
    """Sequence length of each source's cursor."""
    batch: BatchSchedule = field(init=False)
    """Global batch sizes up to the current stage."""
    left: list[int | None] = field(init=False)
    """Samples that the limits of each source still allow; None without limits."""

    def __post_init__(self) -> None:
        self.lengths = [self.recipe.lengths_of(s.name)[0] for s in self.recipe.sources]
        self.batch = self.recipe.batch
        self.cursors = first_unread(self.recipe, self.sizes)
        self.left = [self._left(i) for i in range(len(self.sizes))]
        if self.recipe.past is not None:
            self.position, self.step = self.recipe.first_sample, self.recipe.past.steps

    def _left(self, i: int) -> int | None:
        allowed, read = self._allowed(i), self.cursors[i]
        if allowed is not None and read > allowed:
            raise InvalidArgument(
                f"past: {read} samples of source {self.recipe.sources[i].name} were read, more "
                f"than the {allowed} that its limits allow; raise its max_epochs or max_fraction"
            )
        return None if allowed is None else allowed - read

    def _allowed(self, i: int) -> int | None:
        if self.recipe.exhaustion == "repeat":
            return None
        source = self.recipe.sources[i]
        share = source.most_epochs
        blocks = self.sizes[i].blocks
        if blocks is None:
            return int(self.sizes[i].samples * share)
        # epochs differ in samples: the limit is a place in the source, at any length
        blocks, whole = blocks.at_length(self.lengths[i]), int(share)
        samples = blocks.samples_in_epochs(whole)
        if share > whole:
            samples += int((share - whole) * (blocks.samples_in_epochs(whole + 1) - samples))
        return samples

    def add_stage(self, stage: RecipeStage, *, is_last: bool) -> None:
        """Append a stage; where a source is exhausted in it, a new piece with new draws begins."""
        if stage.first_step not in (None, self.step):
            raise InvalidArgument(
                f"stage {stage.name} is to begin with step {stage.first_step}, but the stages "
                f"before it end with step {self.step}; stages must follow each other without gap "
                "or overlap"
            )
        self._add_batch(stage)
        deferred = self._move_cursors(stage)
        mixture = self._mixture(stage)
        begin, first_step = self.position, self.step
        sized = self._add_steps(mixture)
        end = self._end(mixture, begin, first_step, is_last)
        if self.recipe.exhaustion == "redistribute":
            self._redistribute(mixture, stage.planned_samples or end - self.position)
        self._check_changes(mixture, end)
        without: list[str] = []
        while self.position < end:
            draws = self._draws(mixture, begin, end, without)
            wanted = end - self.position
            possible = self._possible(draws, mixture, wanted)
            if possible < wanted:
                out = int(draws.mixing.lookup(np.array([possible])).stream[0])
                name = self.recipe.sources[draws.sources[out]].name
                self._check_exhausted(stage, draws.sources[out], possible)
            begun = self.position
            self._append(stage, draws, possible, without, deferred)
            if self.position > begun:
                deferred = {}
            if possible < wanted:
                without.append(name)
                if out < len(mixture.sources):
                    mixture.remove(out)
                if self.recipe.exhaustion == "stop" or not mixture.sources:
                    self._check_last(stage, name, is_last)
                    self.stopped_by = name
                    return
                if sized:
                    self._add_steps(mixture)
                    self.ends.pop()
                    end = self._end(mixture, begin, first_step, is_last)

    def _draws(self, mixture: Mixture, begin: int, end: int, without: Sequence[str]) -> _StageDraws:
        """Return the draws from here to the end of a stage that began at ``begin``."""
        first, changes = mixture.mixing(len(without)), self.recipe.mix_changes
        sources = tuple(mixture.sources)
        if changes is None:
            return _StageDraws(first, sources)
        every = sources
        if not self.recipe.has_lengths:  # sources of other stages have the same samples
            every += tuple(
                number
                for number, source in enumerate(self.recipe.sources)
                if number not in sources and source.name not in without
            )
        names = [self.recipe.sources[number].name for number in every]
        changed = changes.mixing(begin, end, self.position, names, first, first.unit)
        return _StageDraws(first, sources) if changed is None else _StageDraws(changed, every)

    def _check_changes(self, mixture: Mixture, end: int) -> None:
        """Refuse changes of the mix that the stage cannot have."""
        stage, changes = mixture.stage, self.recipe.mix_changes
        if changes is None:
            return
        low, high = np.searchsorted(changes.positions, (self.position, end)).tolist()
        if low == high:
            return
        at, where = int(changes.positions[low]), f"stage {stage.name}: the mix changes at sample"
        if not stage.by_proportion:
            raise InvalidArgument(
                f"{where} {at}, and its streams draw by repeat and choose, numbers of samples; "
                "give them proportions"
            )
        if len({*mixture.batch_sizes}) > 1:
            raise InvalidArgument(
                f"{where} {at}, and its streams have batches of several sizes, whose steps do not "
                "change; give them one batch_size, or end the stage there with megaindex.recipe."
                "amend"
            )
        if self.recipe.exhaustion == "redistribute":
            raise InvalidArgument(
                f"{where} {at}, and exhaustion redistribute divides samples from the start of a "
                "stage; use exhaustion continue, stop, error or repeat"
            )
        if self.recipe.has_lengths:
            others = {stream.source for stream in stage.streams}
            rows = np.asarray(changes.weights[low:high].any(axis=0)).tolist()
            unread = [name for name, has in zip(changes.sources, rows, strict=True)
                      if has and name not in others]  # fmt: skip
            if unread:
                raise InvalidArgument(
                    f"{where} {at} to weights of {unread[0]}, which the stage does not name, in a "
                    "run of several sequence lengths; name the source in the stage"
                )
        wrong = _within_step(changes.positions[low:high], self.batch)
        if wrong is not None:
            raise InvalidArgument(
                f"{where} {wrong}, which is not the first of a step; change it between two steps"
            )

    def _check_last(self, stage: RecipeStage, name: str, is_last: bool) -> None:
        """Refuse, under exhaustion continue, that all sources of an earlier stage are exhausted."""
        if self.recipe.exhaustion == "continue" and not is_last:
            raise InvalidArgument(
                f"stage {stage.name}: {name}, the last of its sources, is exhausted at sample "
                f"{self.position}, and other stages follow; make the stage shorter, or raise "
                "max_epochs"
            )

    def _add_batch(self, stage: RecipeStage) -> None:
        """Continue the schedule with the batch sizes of a stage that begins at the position.

        Those of the recipe count samples from the start of the run, those of a stage from its own.
        """
        recipe, start = self.recipe, self.position
        if all(each.batch is None and not each.has_batch_sizes for each in recipe.stages):
            return
        if stage.batch is None:
            (_, size), *later = recipe.batch.between(start, None)
            self._set_batch([(start, size), *later])
        else:
            self._set_batch([(start + first, size) for first, size in stage.batch.stages])

    def _add_steps(self, mixture: Mixture) -> bool:
        """Continue the schedule with steps of the batch sizes of streams, if they have their own.

        Return True if the sizes differ, so that the steps depend on the draws.
        """
        if not mixture.stage.has_batch_sizes:
            return False
        batches = mixture.batches
        self._set_batch([(self.position, batches.batch_size or batches)])
        return batches.batch_size is None

    def _set_batch(self, sizes: Sequence[tuple[int, StepSizes]]) -> None:
        """Continue the schedule with these stages, of which the first begins at the position."""
        earlier = [each for each in self.batch.stages if each[0] < self.position]
        goes_on = bool(earlier) and earlier[-1][1] == sizes[0][1]
        self.batch = BatchSchedule(stages=(*earlier, *sizes[goes_on:]))

    def _move_cursors(self, stage: RecipeStage) -> dict[int, int]:
        """Move the cursors of the sources to where a stage begins to read them.

        Restarted ones begin anew. One of another sequence length begins at the next block, and the
        tokens that are left of the last one are returned, by source.
        """
        length, deferred = self.recipe.length_of(stage), {}
        for stream in stage.streams:
            i = self.recipe.number(stream.source)
            blocks, cursor = self.sizes[i].blocks, self.cursors[i]
            if stream.restart:
                self._check_restart(stage, i)
                self.cursors[i] = 0
            elif blocks is not None and length != self.lengths[i]:
                read = blocks.at_length(self.lengths[i])
                self.cursors[i], left = read.next_block(cursor, length)
                deferred.update({i: left * self.lengths[i]} if left else {})
            self.lengths[i] = length
            if blocks is not None and self.left[i] is not None:
                self.left[i] = max(0, (self._allowed(i) or 0) - self.cursors[i])
        return deferred

    def _check_restart(self, stage: RecipeStage, i: int) -> None:
        """Refuse to restart a source in order blocks under a limit, which is a place in it."""
        if self.sizes[i].blocks is not None and self.left[i] is not None and self.cursors[i]:
            raise InvalidArgument(
                f"stage {stage.name}: restart reads source {self.recipe.sources[i].name} again, "
                "and in order blocks its limits count from its start; use exhaustion repeat, or "
                "leave restart out"
            )

    def _mixture(self, stage: RecipeStage) -> Mixture:
        length, sizes = self.recipe.length_of(stage), list(self.sizes)
        for stream in stage.streams:
            i = self.recipe.number(stream.source)
            sizes[i] = sizes[i].at_length(length)
        return mixture_of(self.recipe, stage, sizes, self.batch.sizes(self.position))

    def _end(self, mixture: Mixture, begin: int, first_step: int, is_last: bool) -> int:
        """Return one past the last sample of a stage; count its steps from ``first_step`` on.

        It began with sample ``begin``, and the steps up to the position have been laid out.
        """
        batch, stage, position = self.batch, mixture.stage, self.position
        made, length = batch.iterations_within(position, begin), stage.length
        self.masked = 0
        if length is not None and length.kind == "iterations":
            steps = int(length.value) - made
            end = batch.samples_after(steps, position)
            wanted = end
        else:
            wanted = begin + self._wanted(stage, mixture)
            tail = self.recipe.tail if is_last else "drop"
            steps = batch.iterations_within(wanted, position)
            end = batch.samples_after(steps, position)
            if end < wanted and tail != "drop":
                steps, end = steps + 1, batch.samples_after(steps + 1, position)
                if tail == "pad":
                    self.masked, end = end - wanted, wanted
        if made + steps < 1:
            raise InvalidArgument(
                f"stage {stage.name}: {count_of(wanted - begin, 'sample')} cannot fill a batch of "
                f"{batch.samples_after(1, begin) - begin}; make it longer"
                + (", or use tail pad" if is_last else "")
            )
        if end > _MOST_SAMPLES:
            raise InvalidArgument(
                f"stage {stage.name} ends with sample {end}; a run has at most 2**60 samples"
            )
        self.step = first_step + made + steps
        text = (
            "epochs: 1" if length is None else f"{LENGTH_KEYS[length.kind]}: {shown(length.value)}"
        )
        self.ends.append(
            StageEnd(
                stage=stage.name, length=text, samples_wanted=wanted - begin, samples=end - begin
            )
        )
        return end

    def _wanted(self, stage: RecipeStage, mixture: Mixture) -> int:
        length = stage.length
        if length is None or length.kind == "epochs":
            return int((Fraction(1) if length is None else length.value) * mixture.epoch)
        value = int(length.value)
        return value if length.kind == "samples" else value // self.recipe.length_of(mixture.stage)

    def _possible(self, draws: _StageDraws, mixture: Mixture, wanted: int) -> int:
        """Return the samples, at most ``wanted``, before a source is drawn beyond its limits."""
        limits = [self.left[i] for i in draws.sources]
        if all(limit is None for limit in limits):
            return wanted
        most = [wanted if limit is None else min(limit, wanted) for limit in limits]
        possible, _ = draws.mixing.longest(most, wanted)
        if mixture.stage.batching == "per_stream" and possible < wanted:
            batches = mixture.batches
            possible = batches.samples_after(batches.batches_within(possible))
        return possible

    def _redistribute(self, mixture: Mixture, total: int) -> None:
        """Lower the shares of sources that would be exhausted, from the start of the stage."""
        name = mixture.stage.name
        if mixture.stage.batching == "per_stream":
            raise InvalidArgument(
                f"stage {name}: exhaustion redistribute divides samples and batching per_stream "
                "whole batches, so they exclude each other; use batching stratified or random"
            )
        draws = _StageDraws(mixture.mixing(0), tuple(mixture.sources))
        if self._possible(draws, mixture, total) == total:
            return
        limits = [self.left[i] for i in mixture.sources]
        divided = within_limits([Fraction(share) for share in mixture.shares], total, limits)
        if divided is None:
            raise InvalidArgument(
                f"stage {name} needs {total} samples, the limits of its sources leave "
                f"{sum(limit or 0 for limit in limits)}; shorten the stage, or raise max_epochs"
            )
        drawn = [k for k, count in enumerate(divided) if count > 0]
        mixture.sources = [mixture.sources[k] for k in drawn]
        mixture.shares = [divided[k] for k in drawn]
        mixture.period = total

    def _check_exhausted(self, stage: RecipeStage, source: int, possible: int) -> None:
        if self.recipe.exhaustion != "error":
            return
        step = self.batch.iterations_within(self.position + possible)
        raise InvalidArgument(
            f"stage {stage.name}: source {self.recipe.sources[source].name} is exhausted "
            f"in step {step}, after the {self._allowed(source)} samples that its limits allow; "
            "raise max_epochs or max_fraction, draw less of it, or choose another exhaustion policy"
        )

    def _append(
        self,
        stage: RecipeStage,
        draws: _StageDraws,
        samples: int,
        without: Sequence[str],
        deferred: Mapping[int, int],
    ) -> None:
        if samples == 0:
            return
        begins = tuple(self.cursors[i] for i in draws.sources)
        planned = PlannedStage(
            name=stage.name,
            first_sample=self.position,
            mixed=MixedStage(
                mixing=draws.mixing, sources=draws.sources, begins=begins, num_samples=samples
            ),
            sequence_length=self.recipe.length_of(stage),
            without=tuple(without),
            deferred=tuple(deferred.get(i, 0) for i in draws.sources),
        )
        self.stages.append(planned)
        self.position += samples
        for source, count in zip(draws.sources, planned.counts, strict=True):
            self.cursors[source] += count
            allowed = self.left[source]
            self.left[source] = None if allowed is None else allowed - count
