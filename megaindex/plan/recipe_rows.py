"""Rows of the plan of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megaindex.arithmetic import ceil_div
from megaindex.index.draws import Progress
from megaindex.index.frameworks import framework_rules
from megaindex.plan.coverage import BUILD_LIMIT, SourceDraw, built_coverage, coverage_of
from megaindex.plan.model import Coverage, Row
from megaindex.plan.packing import packing_facts
from megaindex.recipe.layout import PlannedStage, RecipeLayout
from megaindex.recipe.mixture import SourceSize
from megaindex.run.parts import SplitPart
from megaindex.run.passes import ServedRange
from megaindex.settings.batch_schedule import SkippedSteps
from megaindex.settings.recipe import RecipeSource
from megaindex.settings.sources import Source

_BY_SAMPLES = ("epoch", "window", "packed")  # orders with rules of their own


@dataclass(frozen=True)
class StreamReads:
    """Samples ``begin`` to ``begin + count - 1`` of a source, which a stream of a stage draws."""

    stage: PlannedStage
    piece: int
    stream: int
    source: int
    begin: int
    count: int
    goes_on: bool
    """True if no earlier stage read them."""
    again: int
    """The first of them that is served again, or the end of the first epoch."""


def reads_of(layout: RecipeLayout) -> Iterator[StreamReads]:
    """Yield what the stages draw, of their own sources also where it is nothing."""
    # one past the last sample that earlier stages read, by source and sequence length
    first = layout.recipe.stage_lengths[0]
    reached = {(source, first): begin for source, begin in enumerate(layout.begins)}
    earlier = {source: [(first, 0, begin)] for source, begin in enumerate(layout.begins) if begin}
    named = {stage.name: stage for stage in layout.recipe.stages}
    for piece, stage in enumerate(layout.stages, 1):
        own = {layout.recipe.number(each.source) for each in named[stage.name].streams}
        for stream, (source, begin, count) in enumerate(stage.reads):
            if count == 0 and source not in own:  # of other stages, without changed weights here
                continue
            size = layout.size_at(source, stage.sequence_length)
            again = list(_served_again(size, begin, begin + count, earlier.get(source, [])))
            if size.blocks is None and begin < reached.get((source, stage.sequence_length), 0):
                again = [begin]
            first_again = min([size.samples, *again])
            yield StreamReads(stage, piece, stream, source, begin, count, not again, first_again)
        for source, begin, count in stage.reads:
            read = source, stage.sequence_length
            if layout.sizes[source].blocks is not None and count:
                reads = earlier.setdefault(source, [])
                goes_on = reads and (reads[-1][0], reads[-1][2]) == (stage.sequence_length, begin)
                start = reads.pop()[1] if goes_on else begin
                reads.append((stage.sequence_length, start, begin + count))
            reached[read] = max(reached.get(read, 0), begin + count)


def _served_again(
    size: SourceSize, begin: int, end: int, earlier: Sequence[tuple[int, int, int]]
) -> Iterator[int]:
    """Yield, for each earlier read in order blocks that reached the block of ``begin``, the first
    sample with tokens of it, or ``end``."""
    index = size.blocks
    if index is None:
        return
    for length, first, last in earlier:
        read = index.at_length(length)
        if read is index:
            if begin < last:
                yield max(begin, first)
        elif begin < read.next_block(last, index.sequence_length)[0]:
            yield index.first_again(begin, end, read, first, last)


def epochs_for(size: SourceSize, samples: int) -> int:
    """Return the epochs, at least one, that hold the first ``samples`` samples of a source."""
    if size.blocks is not None:
        return size.blocks.epochs_for(samples)
    return max(1, ceil_div(samples, size.samples))


def first_repeat(layout: RecipeLayout, read: StreamReads) -> int | None:
    """Return the first step that draws a sample of a stream again; None without such."""
    stage, stream = read.stage, read.stream
    fresh = fresh_samples(read)
    if read.count <= fresh:
        return None
    limits = [stage.num_samples] * len(stage.mixed.sources)
    limits[stream] = fresh
    most, _ = stage.mixing.longest(limits, stage.num_samples)
    return layout.batch.iterations_within(stage.first_sample + most)


def fresh_samples(read: StreamReads) -> int:
    """Return the samples of a stream before the first that is served again."""
    return max(0, read.again - read.begin)


@dataclass(frozen=True)
class RecipeRows:
    """The rows of a recipe's plan.

    Args:
        layout: the layout of the recipe.
        steps: its steps with skips; None without any.
        coverage: ``--coverage``: auto, exact, expected or none.
        progress: called with (done, total) while coverage is counted.
    """

    layout: RecipeLayout
    steps: SkippedSteps | None
    coverage: str
    progress: Progress | None = None

    def rows(self) -> tuple[Row, ...]:
        """Return one row for each source of each piece of a stage, and of the evaluation."""
        layout, several = self.layout, len(self.layout.stages) > 1
        found = []
        for read in reads_of(layout):
            stage, corpus = read.stage, layout.recipe.sources[read.source]
            row = self._row(
                corpus,
                read.source,
                layout.size_at(read.source, stage.sequence_length),
                stage.sequence_length,
                self._served(read),
                read.goes_on,
            )
            weight = read.count / stage.num_samples if len(stage.mixed.sources) > 1 else None
            found.append(
                replace(
                    row,
                    phase=read.piece if several else None,
                    stage=stage.name,
                    weight=weight,
                )
            )
        return (*found, *self._evaluation())

    def _evaluation(self) -> Iterator[Row]:
        """Yield the row of the evaluation, whose rounds are all of the same samples."""
        layout, recipe = self.layout, self.layout.recipe
        rounds, size = layout.evaluation, layout.validation
        if rounds is None or size is None or recipe.evaluation is None:
            return
        length = recipe.evaluation.sequence_length or recipe.stage_lengths[0]
        served = [ServedRange(0, rounds.samples, rounds.count)] if rounds.count else []
        yield replace(
            self._row(recipe.evaluation.source, 0, size, length, served, True), split="valid"
        )

    def _served(self, read: StreamReads) -> list[ServedRange]:
        """Return the samples of a stream that its stage serves, without skipped steps."""
        stage = read.stage
        if self.steps is None:
            end = read.begin + read.count
            return [ServedRange(read.begin, end, 1)] if read.count else []
        found = []
        for positions in self.steps.skips.served_samples(self.steps.steps.end):
            low, high = (
                min(max(at - stage.first_sample, 0), stage.num_samples) for at in positions
            )
            if low < high:
                start = int(stage.mixing.counts(low)[read.stream])
                stop = int(stage.mixing.counts(high)[read.stream])
                if start < stop:
                    found.append(ServedRange(read.begin + start, read.begin + stop, 1))
        return sorted(found, key=lambda part: part.begin)

    def _row(
        self,
        corpus: RecipeSource,
        number: int,
        size: SourceSize,
        length: int,
        served: Sequence[ServedRange],
        goes_on: bool,
    ) -> Row:
        drawn = sum(part.size for part in served)
        distinct = sum(part.end - part.begin for part in served)
        end = max((part.end for part in served), default=0)
        first = sum(max(0, min(part.end, size.samples) - part.begin) for part in served)
        epochs = epochs_for(size, end)
        packed = size.packed
        row = Row(
            split="train",
            source=number + 1,
            path=corpus.path,
            label=corpus.name,
            weight=None,
            tokens_per_epoch=size.tokens,
            samples_per_epoch=size.samples,
            requested=drawn,
            drawn=drawn,
            drawn_bounds=(drawn, drawn),
            drawn_by_blend=drawn,
            built=size.samples_in(Fraction(epochs)),
            epochs=epochs,
            distinct=distinct,
            repeated=drawn - first if goes_on else drawn,
            packing=None
            if packed is None
            else packing_facts(
                packed.packing, size.tokens, packed.num_long_documents, corpus.max_documents
            ),
        )
        return replace(row, coverage=self._coverage(corpus, size, length, served, row))

    def _coverage(
        self,
        corpus: RecipeSource,
        size: SourceSize,
        length: int,
        served: Sequence[ServedRange],
        row: Row,
    ) -> Coverage:
        """Return the coverage of a row, by the rules of settings where the order has some.

        Elsewhere samples of one epoch have a closed form, since none overlap, unless they hold
        padding; others are counted in the index.
        """
        order = self.layout.recipe.order_of(corpus)
        has_rules = order in _BY_SAMPLES and (corpus.kind == "pretraining" or order == "packed")
        draw = self._draw(corpus, size, length, row, order if has_rules else "epoch")
        first = tuple(served) == (ServedRange(0, draw.served, 1),) or not served
        if has_rules and first:
            return coverage_of(draw, None, self.coverage, self.progress)
        if self.coverage == "none":
            return Coverage(method="none")
        epochs = {n // size.samples for part in served for n in (part.begin, part.end - 1)}
        within = len(epochs) == 1 and (size.blocks is None or epochs == {0})
        closed = self.coverage != "exact" or size.index is None
        if within and closed and size.packed is None and corpus.kind == "pretraining":
            return _of_one_epoch(served, length, size.tokens)
        work = sum(part.size for part in served) + size.documents * draw.epochs
        counts = self.coverage == "exact" or (self.coverage == "auto" and work <= BUILD_LIMIT)
        if size.index is None or not counts or not served:
            return Coverage(method="none")
        return built_coverage(draw, self.progress, served)

    def _draw(
        self, corpus: RecipeSource, size: SourceSize, length: int, row: Row, order: str
    ) -> SourceDraw:
        index = size.index
        path = corpus.path if index is not None else ""
        packing = None if size.packed is None else size.packed.packing
        end = size.samples_in(Fraction(row.epochs or 0))
        return SourceDraw(
            row=framework_rules(order),
            part=SplitPart(
                source=Source(path=path, tokens=None if path else size.tokens),
                begin=0,
                end=size.documents,
                tokens=size.tokens,
                packing=packing,
                shuffle_name=size.shuffle_name,
            ),
            sequence_length=length,
            seed=self.layout.recipe.seed,
            requested=row.requested or 0,
            epochs=row.epochs or 0,
            built=end,
            per_epoch=size.samples,
            drawn=row.drawn or 0,
            counted=True,
            index=None if index is None else lambda: index(end, length),
        )


def _of_one_epoch(served: Sequence[ServedRange], length: int, tokens: int) -> Coverage:
    """Return the coverage of samples of one epoch, which serve each token at most once a round."""
    shares = [0.0] * (max(part.times for part in served) + 1)
    for part in served:
        shares[part.times] += (part.end - part.begin) * length / tokens
    shares[0] = 1 - sum(shares[1:])
    return Coverage(method="closed-form", tokens=tuple(shares))
