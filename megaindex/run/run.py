"""A run whose samples are decided: an index, its sources, and the steps that serve it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.counts import Cursors, cursors, source_counts
from megaindex.index.documents import DocumentSubset, lengths_within, members_of
from megaindex.index.skips import Skip, Skips, skips_of, with_skips
from megaindex.index.source_targets import SourceTargets
from megaindex.index.spans import Index, check_index, datasets_of, sequence_lengths_at, sources_of
from megaindex.markup import html_table
from megaindex.settings.batch_schedule import BatchSchedule, Steps, skip_steps, steps_of
from megaindex.validation import check_setting, setting_or_none, shown

_SAMPLES_AT_ONCE = 1 << 16


class StepShape(NamedTuple):
    """Division of the steps from a position on into micro batches.

    Attributes:
        first: the position, the start of a step.
        micro_batch_size: samples of a micro batch of one rank; None: unknown.
        data_parallel_size: number of data-parallel ranks; None: unknown.
    """

    first: int
    micro_batch_size: int | None
    data_parallel_size: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSource:
    """Documents of one source that an epoch has.

    Attributes:
        name: name of the source.
        sequence_lengths (int32[documents]): tokens of consecutive sequences.
        first_document: sequence id of the first of these sequences.
        cut_tokens: tokens in no sample of an epoch, because long documents are truncated or
            skipped.
        cut_by: setting that leaves these tokens out.
        path_prefix: prefix of the pair; empty if it is unknown.
        targets: labels or loss mask; None: the loss follows from the order and the options.
        members: those of the sequences that an epoch has; None: all.
    """

    name: str
    sequence_lengths: I32 = field(repr=False)
    first_document: int = 0
    cut_tokens: int = 0
    cut_by: str = ""
    path_prefix: str = ""
    targets: SourceTargets | None = None
    members: DocumentSubset | None = field(default=None, repr=False)

    @cached_property
    def lengths(self) -> I32:
        """int32[documents]: tokens of the sequences, 0 of those that an epoch does not have.

        Documents without tokens are not counted.
        """
        if self.members is None:
            return self.sequence_lengths
        within = self.members.within
        bounds = range(within.start - self.first_document, within.stop - self.first_document)
        return lengths_within(self.sequence_lengths, replace(self.members, within=bounds))


class TokenRuns(NamedTuple):
    """Token runs that are input of samples, without the extra token of the label.

    Attributes:
        sample (int64[n]): position in the run.
        source (int32[n]): number of the source.
        document (int64[n]): sequence id in the source.
        offset (int64[n]): first token, in the document.
        length (int64[n]): number of tokens.
    """

    sample: I64
    source: I32
    document: I64
    offset: I64
    length: I64

    def select(self, which: I64 | slice) -> TokenRuns:
        """Return some of the runs."""
        columns: Any = self
        return TokenRuns(*(column[which] for column in columns))


def lengths_text(lengths: Sequence[int]) -> str:
    """Return the sequence lengths of stages for display."""
    return " → ".join(f"{length:,}" for length in lengths)


def join_runs(pieces: Sequence[TokenRuns]) -> TokenRuns:
    """Return all runs of the pieces, one piece after the other."""
    columns: Any = zip(*pieces, strict=True)
    return TokenRuns(*map(np.concatenate, columns))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The samples of a run in order of training, divided into steps.

    Steps count from 0: trainers log step k as iteration k + 1. With skips, samples are positions:
    skipped steps keep their numbers and serve nothing, moved samples make steps behind the others.

    Attributes:
        index: samples of the run, in order of training.
        sources: sources in the order of ``Spans.source``.
        steps: its steps; `step_bounds` are their bounds.
        past_steps: steps made already.
        masked_rows: rows of the last step that are padding without loss.
        order: name of the order, for display.
        shapes: division of the steps into micro batches; it decides no sample of a step.
        rounds: number of times that the samples are served; of an evaluation, its rounds.
        every: steps of training from one round of an evaluation to the next; None: unknown.
        is_evaluation: True for validation and test sets, on which nothing is trained.
        settings: further settings of the run by name, for display.

    Raises:
        InvalidArgument: there is no step, or the index has fewer samples than the steps consume.
    """

    index: Index
    sources: tuple[RunSource, ...]
    steps: Steps
    past_steps: int = 0
    masked_rows: int = 0
    order: str = ""
    shapes: tuple[StepShape, ...] = (StepShape(0, None, None),)
    rounds: int = 1
    every: int | None = None
    is_evaluation: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise InvalidArgument(
                "the run makes no step: its target holds fewer samples than one global batch"
            )
        last = self.steps.end
        if last > self.index.num_samples:
            raise InvalidArgument(
                f"the steps consume {last} samples, the index holds {self.index.num_samples}; "
                "build it for more samples, or audit fewer steps"
            )

    def __repr__(self) -> str:
        """Return one line: order, samples, steps and sources."""
        return f"Run({', '.join(f'{name}={value}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        return html_table([], [[name, str(value)] for name, value in self._facts()], labels=2)

    def _facts(self) -> Iterator[tuple[str, object]]:
        if self.order:
            yield "order", self.order
        yield "samples", f"{self.samples_served:,}"
        yield "steps", f"{self.num_steps:,}"
        if self.past_steps:
            yield "past_steps", f"{self.past_steps:,}"
        names = [source.name for source in self.sources]
        yield "sources", shown(names[0] if len(names) == 1 else names)

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a micro batch of one rank; None if it is unknown or changes."""
        return _only({shape.micro_batch_size for shape in self.shapes})

    @property
    def data_parallel_size(self) -> int | None:
        """Number of data-parallel ranks; None if it is unknown or changes."""
        return _only({shape.data_parallel_size for shape in self.shapes})

    @cached_property
    def batch(self) -> BatchSchedule:
        """The rows of each step, those of padding too."""
        steps, plain = self.steps, len(self.shapes) == 1 and self.skips is None
        if plain and steps.size and steps.end + self.masked_rows == steps.count * steps.size:
            return BatchSchedule.constant(steps.size)
        changes = [shape.first for shape in self.shapes[1:]]
        return BatchSchedule.of_steps(
            self.step_bounds,
            self.masked_rows,
            changes,
            past_steps=self.past_steps,
            ends=self.skips is not None and self.num_samples < self.skips.run_end,
        )

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.steps.count

    @property
    def step_bounds(self) -> I64:
        """int64[steps + 1]: first position of each step, and the end."""
        return self.steps.bounds

    @property
    def num_samples(self) -> int:
        """Position of the end: `samples_served`, behind those of another system."""
        return self.steps.end

    @cached_property
    def document_base(self) -> I64:
        """int64[sources + 1]: number of each source's first document among all documents."""
        return _cumulated([source.sequence_lengths.size for source in self.sources])

    @cached_property
    def token_base(self) -> I64:
        """int64[documents + 1]: number of each document's first token among all tokens."""
        return _cumulated(np.concatenate([source.lengths for source in self.sources]))

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """The sequence length, or those of the stages one after another, each once."""
        index = self.index
        return tuple(dict.fromkeys(getattr(index, "part_lengths", (index.sequence_length,))))

    @property
    def lengths_text(self) -> str:
        """The sequence lengths for display."""
        return lengths_text(self.sequence_lengths)

    @property
    def samples_served(self) -> int:
        """Samples served by all steps."""
        return self.steps.end - self.steps.samples_after(0)

    @cached_property
    def _step_size(self) -> int:
        """Samples of every step, 0 if steps differ."""
        if self.steps.size:
            return 0 if self.steps.end % self.steps.size else self.steps.size
        sizes = np.diff(self.step_bounds)
        return int(sizes[0]) if (sizes == sizes[0]).all() else 0

    @cached_property
    def steps_elsewhere(self) -> int:
        """Number of steps at the beginning that another system made, whose rows are unknown."""
        return int(np.searchsorted(self.step_bounds, self.step_bounds[0], "right")) - 1

    def is_skipped(self, steps: I64) -> npt.NDArray[np.bool_]:
        """Return bool[n]: True for steps that serve nothing in their place."""
        if self.skips is None:
            return np.zeros(steps.shape, bool)
        return self.skips.is_hole(self.step_bounds[steps])

    def counts(self, begin: int, end: int) -> I64:
        """Return int64[sources]: samples of each that positions ``begin`` to ``end - 1`` serve.

        Raises:
            OutOfRange: the index has fewer positions.
        """
        return source_counts(self.index, begin, end, len(self.sources))

    def cursors(self, position: int) -> Cursors:
        """Return the next sample of each source and sequence length.

        Raises:
            OutOfRange, InvalidArgument: see `megaindex.index.counts.cursors`.
        """
        return cursors(self.index, position)

    def step_of(self, samples: npt.ArrayLike) -> I64:
        """Return the step that serves each sample."""
        if self._step_size:
            begin = self.steps.samples_after(0)
            steps = (np.asarray(samples, np.int64) - begin) // self._step_size
            return np.asarray(np.clip(steps, -1, self.num_steps), np.int64)
        return np.asarray(np.searchsorted(self.step_bounds, samples, "right") - 1, np.int64)

    def runs(self, first: int | None = None, last: int | None = None) -> Iterator[TokenRuns]:
        """Yield the token runs of samples [first, last), by default all, in blocks of samples."""
        first = self.steps.samples_after(0) if first is None else first
        last = self.num_samples if last is None else last
        for begin in range(first, last, _SAMPLES_AT_ONCE):
            yield self._served(np.arange(begin, min(last, begin + _SAMPLES_AT_ONCE)))

    @property
    def skips(self) -> Skips | None:
        """The skips of the run; None without any. A skipped step serves no sample."""
        return skips_of(self.index)

    def _served(self, ids: I64) -> TokenRuns:
        if self.skips is not None:
            ids = ids[~self.skips.is_hole(ids)]
        spans = self.index.locate(ids)
        length = spans.input_lengths(sequence_lengths_at(self.index, ids))
        runs = TokenRuns(spans.per_span(ids), spans.source, spans.document, spans.offset, length)
        kept = length > 0 if spans.removed is None else (length > 0) & ~spans.removed
        return runs.select(np.flatnonzero(kept))


def _only(values: Set[int | None]) -> int | None:
    """Return the only value; None of several."""
    return next(iter(values)) if len(values) == 1 else None


def run_of_index(
    index: Index,
    sources: Sequence[RunSource] | None = None,
    *,
    global_batch_size: int,
    num_steps: int | None = None,
    consumed_samples: int = 0,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
) -> Run:
    """Return the run of an index.

    Args:
        index: an index, such as `megaindex.build_index` or `megaindex.build_blend` returns.
        sources: its sources, in the order of ``Spans.source``; one for an index of one dataset.
            Default: the datasets that the index holds, if it reads all of their documents.
        global_batch_size: samples of a step.
        num_steps: steps in all, past ones included. Default: the whole batches of the index.
        consumed_samples: samples served so far; their steps are the past ones, of which the last
            may be short.
        micro_batch_size: samples of a micro batch of one rank; with ``data_parallel_size`` it
            decides the rank of each sample.
        data_parallel_size: ranks that share a step.

    Raises:
        InvalidArgument: a number is out of range, the sources are missing, or it is not an index.
    """
    check_index(index)
    sources = _sources_of(index) if sources is None else sources
    global_batch_size = check_setting("global_batch_size", global_batch_size)
    num_steps = setting_or_none("num_steps", num_steps)
    consumed_samples = check_setting("consumed_samples", consumed_samples)
    begun = ceil_div(consumed_samples, global_batch_size)
    if num_steps is None:
        num_steps = begun + max(0, index.num_samples - consumed_samples) // global_batch_size
    end = num_steps * global_batch_size
    if num_steps >= begun:
        end = consumed_samples + (num_steps - begun) * global_batch_size
    schedule = BatchSchedule.constant(global_batch_size)
    steps, past = steps_of(schedule, consumed_samples, end)
    return Run(
        index=index,
        sources=tuple(sources),
        steps=steps,
        past_steps=past,
        order=str(getattr(index, "order", "")),
        settings={"seed": index.seed} if hasattr(index, "seed") else {},
        shapes=(
            StepShape(
                0,
                setting_or_none("micro_batch_size", micro_batch_size),
                setting_or_none("data_parallel_size", data_parallel_size),
            ),
        ),
    )


def _sources_of(index: Index) -> list[RunSource]:
    """Return the datasets of an index as sources."""
    sources = [
        RunSource(
            name=dataset.path_prefix,
            sequence_lengths=dataset.sequence_lengths,
            path_prefix=dataset.path_prefix,
            members=members_of(each),
        )
        for dataset, each in zip(datasets_of(index), sources_of(index), strict=False)
    ]
    tokens = sum(int(source.lengths.sum(dtype=np.int64)) for source in sources)
    if not sources or tokens != index.tokens_per_epoch:
        raise InvalidArgument(
            f"the sources of {shown(index)} are missing: it holds {tokens} tokens of datasets and "
            f"reads {index.tokens_per_epoch}; give a RunSource for each"
        )
    return sources


def _cumulated(counts: npt.ArrayLike) -> I64:
    counts = np.asarray(counts)
    sums = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=sums[1:])
    return sums


def skipped_run(run: Run, skip: Sequence[Skip], schedule: BatchSchedule) -> Run:
    """Return a run in steps of ``schedule`` with skips.

    Raises:
        InvalidArgument: a skip does not fit the run.
        MissingFile, StorageError: a file of documents cannot be read.
    """
    if not skip:
        return run
    steps = skip_steps(
        skip,
        schedule,
        run.steps,
        num_samples=run.index.num_samples,
        masked_rows=run.masked_rows,
    )
    if steps is None:
        return run
    index = with_skips(
        run.index,
        steps.skips,
        names=[source.name for source in run.sources],
        documents=[source.first_document + source.sequence_lengths.size for source in run.sources],
    )
    return replace(run, index=index, steps=steps.steps, masked_rows=steps.masked_rows)
