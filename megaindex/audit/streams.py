"""The samples of each step of a run, from a recipe, `RunSettings` or an index."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64
from megaindex.builders import build_index
from megaindex.builders.described import fill_draws
from megaindex.builders.recipe import OpenRecipe, OpenSource, open_recipe
from megaindex.configs.batch_schedule import BatchSchedule, skip_steps, step_bounds
from megaindex.configs.run import RunSettings
from megaindex.configs.run_builder import given_run
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.blending import DivisorDraws, GreedyDraws, Progress
from megaindex.index.extended_index import ExtendedIndex, Stage
from megaindex.index.frameworks import Split
from megaindex.index.order_settings import order_of_row
from megaindex.index.skips import Skip, SkippedIndex, Skips, skips_of
from megaindex.index.spans import Index, check_index, datasets_of, sequence_lengths_at
from megaindex.plan.plan import evaluation_of, target_text
from megaindex.plan.sizing import ServedRange, Sizing, SplitPart, loader_passes
from megaindex.plan.sources import Parts, parts_of, sizing_of
from megaindex.plan.target import (
    ResolvedTarget,
    masked_rows,
    phase_request,
    phases_of,
    resolve_target,
)
from megaindex.recipe.recipe import Recipe
from megaindex.validation import check_between, check_setting, setting_or_none, shown

_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditSource:
    """Documents of one source that an epoch has.

    Attributes:
        name: name of the source.
        lengths (int32[documents]): tokens of consecutive sequences; those of length 0 are not
            counted.
        first_document: sequence id of the first of these sequences.
        cut_tokens: tokens in no sample of an epoch, because long documents are truncated or
            skipped.
        cut_by: setting that leaves these tokens out.
        path_prefix: prefix of the pair; empty if it is unknown.
    """

    name: str
    lengths: I32 = field(repr=False)
    first_document: int = 0
    cut_tokens: int = 0
    cut_by: str = ""
    path_prefix: str = ""


class Runs(NamedTuple):
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

    def select(self, which: I64 | slice) -> Runs:
        """Return some of the runs."""
        sample, source, document, offset, length = self
        return Runs(sample[which], source[which], document[which], offset[which], length[which])


def lengths_text(lengths: Sequence[int]) -> str:
    """Return the sequence lengths of stages for display."""
    return " → ".join(f"{length:,}" for length in lengths)


def join_runs(pieces: Sequence[Runs]) -> Runs:
    """Return all runs of the pieces, one piece after the other."""
    columns: Any = zip(*pieces, strict=True)
    return Runs(*map(np.concatenate, columns))


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditStream:
    """The samples of a run in order of training, divided into steps.

    Steps count from 0: trainers log step k as iteration k + 1. With skips, samples are positions:
    skipped steps keep their numbers and serve nothing, moved samples make steps behind the others.

    Attributes:
        index: samples of the run, in order of training.
        sources: sources in the order of ``Spans.source``.
        step_bounds (int64[steps + 1]): step k serves the samples [step_bounds[k], step_bounds[k
            + 1]).
        past_steps: steps made already.
        masked_rows: rows of the last step that are padding without loss.
        order: name of the order, for display.
        micro_batch_size: samples of a micro batch of one rank; None: unknown.
        data_parallel_size: number of data-parallel ranks; None: unknown.
        settings: further settings of the run by name, for display.

    Raises:
        InvalidArgument: there is no step, or the index has fewer samples than the steps consume.
    """

    index: Index
    sources: tuple[AuditSource, ...]
    step_bounds: I64 = field(repr=False)
    past_steps: int = 0
    masked_rows: int = 0
    order: str = ""
    micro_batch_size: int | None = None
    data_parallel_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise InvalidArgument(
                "the run makes no step: its target holds fewer samples than one global batch"
            )
        last = int(self.step_bounds[-1])
        if last > self.index.num_samples:
            raise InvalidArgument(
                f"the steps consume {last} samples, the index holds {self.index.num_samples}; "
                "build it for more samples, or audit fewer steps"
            )

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.step_bounds.size - 1

    @property
    def num_samples(self) -> int:
        """Position of the end: `samples_served`, behind those of another system."""
        return int(self.step_bounds[-1])

    @cached_property
    def document_base(self) -> I64:
        """int64[sources + 1]: number of each source's first document among all documents."""
        return _cumulated([source.lengths.size for source in self.sources])

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
        return int(self.step_bounds[-1] - self.step_bounds[0])

    @cached_property
    def _step_size(self) -> int:
        """Samples of every step, 0 if steps differ."""
        sizes = np.diff(self.step_bounds)
        return int(sizes[0]) if (sizes == sizes[0]).all() else 0

    def step_of(self, samples: npt.ArrayLike) -> I64:
        """Return the step that serves each sample."""
        if self._step_size:
            steps = (np.asarray(samples, np.int64) - self.step_bounds[0]) // self._step_size
            return np.asarray(np.clip(steps, -1, self.num_steps), np.int64)
        return np.asarray(np.searchsorted(self.step_bounds, samples, "right") - 1, np.int64)

    def runs(self, first: int | None = None, last: int | None = None) -> Iterator[Runs]:
        """Yield the token runs of samples [first, last), by default all, in blocks of samples."""
        first = int(self.step_bounds[0]) if first is None else first
        last = self.num_samples if last is None else last
        for begin in range(first, last, _SAMPLES_AT_ONCE):
            yield self._served(np.arange(begin, min(last, begin + _SAMPLES_AT_ONCE)))

    @property
    def skips(self) -> Skips | None:
        """The skips of the run; None without any. A skipped step serves no sample."""
        return skips_of(self.index)

    def _served(self, ids: I64) -> Runs:
        if self.skips is not None:
            ids = ids[~self.skips.is_hole(ids)]
        spans = self.index.locate(ids)
        length = spans.input_lengths(sequence_lengths_at(self.index, ids))
        sample = np.repeat(ids, np.diff(spans.row_splits))
        kept = length > 0
        return Runs(
            sample=sample[kept],
            source=spans.source[kept],
            document=spans.document[kept],
            offset=spans.offset[kept],
            length=length[kept],
        )


def stream_of_index(
    index: Index,
    sources: Sequence[AuditSource] | None = None,
    *,
    global_batch_size: int,
    num_steps: int | None = None,
    consumed_samples: int = 0,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
) -> AuditStream:
    """Return the stream of an index.

    Args:
        index: an index, such as `megaindex.build_index` or `megaindex.build_blend` returns.
        sources: its sources, in the order of ``Spans.source``; one for an index of one dataset.
            Default: the datasets that the index holds, if it reads all of their documents.
        global_batch_size: samples of a step.
        num_steps: steps in all. Default: the whole batches of the index.
        consumed_samples: samples served so far; their steps are the past ones.
        micro_batch_size: samples of a micro batch of one rank; with ``data_parallel_size`` it
            decides the rank of each sample.
        data_parallel_size: ranks that share a step.

    Raises:
        InvalidArgument: a number is out of range, the sources are missing, or it is no index.
    """
    check_index(index)
    sources = _sources_of(index) if sources is None else sources
    global_batch_size = check_setting("global_batch_size", global_batch_size)
    num_steps = setting_or_none("num_steps", num_steps)
    consumed_samples = check_setting("consumed_samples", consumed_samples)
    if num_steps is None:
        num_steps = index.num_samples // global_batch_size
    schedule = BatchSchedule.constant(global_batch_size)
    bounds, past = step_bounds(schedule, consumed_samples, num_steps * global_batch_size)
    return AuditStream(
        index=index,
        sources=tuple(sources),
        step_bounds=bounds,
        past_steps=past,
        order=str(getattr(index, "order", "")),
        settings={"seed": index.seed} if hasattr(index, "seed") else {},
        micro_batch_size=setting_or_none("micro_batch_size", micro_batch_size),
        data_parallel_size=setting_or_none("data_parallel_size", data_parallel_size),
    )


def _sources_of(index: Index) -> list[AuditSource]:
    """Return the datasets of an index as sources."""
    datasets = datasets_of(index)
    sources = [
        AuditSource(
            name=dataset.path_prefix,
            lengths=dataset.sequence_lengths,
            path_prefix=dataset.path_prefix,
        )
        for dataset in datasets
    ]
    tokens = sum(int(source.lengths.sum(dtype=np.int64)) for source in sources)
    if not sources or tokens != index.tokens_per_epoch:
        raise InvalidArgument(
            f"the sources of {shown(index)} are missing: it holds {tokens} tokens of datasets and "
            f"reads {index.tokens_per_epoch}; give an AuditSource for each"
        )
    return sources


def _cumulated(counts: npt.ArrayLike) -> I64:
    counts = np.asarray(counts)
    sums = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=sums[1:])
    return sums


def blend_index(indices: Sequence[Index], sizing: Sizing, num_samples: int) -> Index:
    """Return the first ``num_samples`` of the blend of ``sizing``; of one source, its index.

    Raises:
        InvalidArgument: there are too many sources, or more samples of one are drawn than built, at
            which the framework fails.
    """
    if len(indices) == 1:
        return indices[0]
    draws, short = sizing.draws, sizing.row.uncounted_samples
    assert isinstance(draws, (GreedyDraws, DivisorDraws)), "several sources are blended by these"
    dataset_index, dataset_sample_index = fill_draws(
        draws.rule, draws.weights, indices, num_samples, short, sizing.names
    )
    return BlendedIndex(
        indices=tuple(indices),
        dataset_index=dataset_index,
        dataset_sample_index=dataset_sample_index,
        rule=draws.rule,
        weights=draws.weights,
        uncounted_samples=short,
        datasets=tuple(dataset for index in indices for dataset in datasets_of(index)),
    )


def stream_of_recipe(recipe: Recipe, *, consumed_samples: int = 0) -> AuditStream:
    """Return the stream of a recipe.

    Args:
        recipe: the run.
        consumed_samples: samples served so far, on all ranks; the steps that they complete are the
            past ones.

    Raises:
        InvalidArgument: the recipe cannot be planned, or has sources without files.
        FormatError, StorageError: a source cannot be read.
    """
    return stream_of_opened(open_recipe(recipe), consumed_samples=consumed_samples)


def stream_of_opened(opened: OpenRecipe, *, consumed_samples: int = 0) -> AuditStream:
    """Return the stream of an opened recipe; see `stream_of_recipe`."""
    recipe = opened.layout.recipe
    stream = AuditStream(
        index=opened.unskipped,
        sources=tuple(map(source_of_opened, opened.sources)),
        step_bounds=opened.layout.step_bounds(),
        masked_rows=opened.layout.samples_masked,
        order=_order_of(opened),
        settings={
            "seed": recipe.seed,
            "stages": ", ".join(stage.name for stage in recipe.stages),
            "tail": recipe.tail,
            "exhaustion": recipe.exhaustion,
            **({} if recipe.past is None else {"past": f"{recipe.past.steps} steps elsewhere"}),
        },
        micro_batch_size=recipe.common_micro_batch_size,
        data_parallel_size=recipe.common_data_parallel_size,
    )
    stream = skipped_stream(stream, recipe.skip, opened.layout.batch)
    end = int(stream.step_bounds[-1])
    if stream.skips is not None:
        end = max(end, stream.skips.run_end)
    check_between("--consumed-samples", consumed_samples, 0, end, most_is="the samples of the run")
    consumed = max(consumed_samples, recipe.first_sample)
    past = int(np.searchsorted(stream.step_bounds, consumed, "right")) - 1
    return replace(stream, past_steps=past)


def source_of_opened(source: OpenSource) -> AuditSource:
    """Return a source of an opened recipe."""
    return AuditSource(
        name=source.corpus.name,
        lengths=source.dataset.sequence_lengths,
        cut_tokens=source.size.cut_tokens,
        cut_by=f"long_documents {source.corpus.long_documents}",
        path_prefix=source.dataset.path_prefix,
    )


def _order_of(opened: OpenRecipe) -> str:
    """Return the order of all sources; epoch if they differ."""
    orders = {opened.layout.recipe.order_of(source.corpus) for source in opened.sources}
    return next(iter(orders)) if orders in ({"packed"}, {"blocks"}) else "epoch"


def skipped_stream(
    stream: AuditStream, skip: Sequence[Skip], schedule: BatchSchedule
) -> AuditStream:
    """Return the stream of a run in steps of ``schedule`` with skips.

    Raises:
        InvalidArgument: a skip does not fit the run.
        MissingFile, StorageError: a file of documents cannot be read.
    """
    steps = skip_steps(
        skip,
        schedule,
        stream.step_bounds,
        num_samples=stream.index.num_samples,
        masked_rows=stream.masked_rows,
    )
    if steps is None:
        return stream
    index = SkippedIndex.of(
        stream.index,
        steps.skips,
        names=[source.name for source in stream.sources],
        documents=[source.first_document + source.lengths.size for source in stream.sources],
    )
    return replace(stream, index=index, step_bounds=steps.bounds, masked_rows=steps.masked_rows)


Folder: TypeAlias = str | os.PathLike[str]


def stream_of_run(
    run: RunSettings | None = None,
    *,
    subset: Split = "train",
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
    most_samples: int | None = None,
    **settings: Any,
) -> AuditStream:
    """Return the stream of a run under a framework, by the rules of its version.

    Args:
        run: the run, such as `megaindex.plan.resolve` returns; its consumed samples are the past.
        subset: train, or valid or test with the samples of all evaluations.
        cache_dir: cache of built indices; None: build in memory.
        progress: called with (done, total) while draws are counted.
        most_samples: samples that an index may be built for, as of a run whose settings a file
            states; None: any number.
        settings: the run by names in place of ``run``, as for `megaindex.make_plan`.

    Raises:
        InvalidArgument: the run cannot be built: it has no files, more samples of a source are
            drawn than built, or it asks for more than ``most_samples``.
        FormatError, StorageError: a dataset cannot be read.
    """
    with given_run(run, settings) as given:
        return _stream_of_run(given, subset, cache_dir, progress, most_samples)


def _stream_of_run(
    run: RunSettings,
    subset: Split,
    cache_dir: Folder | None,
    progress: Progress | None,
    most: int | None,
) -> AuditStream:
    _check(run)
    if run.packing is not None:
        raise InvalidArgument(
            f"pack_impl {run.packing.pack_impl} cannot be audited; use `megaindex plan`"
        )
    parts = parts_of(run.data, run.row, sequence_length=run.sequence_length)
    if not parts[subset]:
        raise InvalidArgument(
            f"the run has no {subset} data; give --split, or --{subset}-data-path"
        )
    # a built blend needs the exact draws
    exact = replace(run, blend_counts="exact")
    sizing = sizing_of(exact, run.row, parts["train"], "train", progress)
    target = resolve_target(run, sizing)
    schedule, consumed, total = run.batch, run.consumed_samples, target.samples_consumed
    if subset == "train":
        _check_consumed(run, resolve_target(replace(run, consumed_samples=0), sizing))
        index = _train_index(run, sizing, parts["train"], target, cache_dir, most)
    else:
        sizing = sizing_of(exact, run.row, parts[subset], subset, progress)
        schedule, consumed, total = _evaluations(run, subset, target, parts)
        index = _index(run, sizing, parts[subset], total, total, cache_dir, most, subset)
    bounds, past = step_bounds(schedule, consumed, total)
    stream = AuditStream(
        index=index,
        sources=tuple(_source(run, part) for part in parts[subset]),
        step_bounds=bounds,
        past_steps=past,
        masked_rows=masked_rows(run, target) if subset == "train" else 0,
        order=run.row.order,
        settings=_settings(run, subset),
        micro_batch_size=run.micro_batch_size,
        data_parallel_size=run.data_parallel_size,
    )
    return (
        skipped_stream(stream, run.skips(bounds.size - 1), schedule)
        if subset == "train"
        else stream
    )


def _settings(run: RunSettings, subset: Split) -> dict[str, Any]:
    sources = getattr(run.data, subset) or run.data.train
    weights = [source.weight for source in sources]
    settings = {
        "framework": run.row.framework,
        "seed": run.seed,
        "target": target_text(run),
        "subset": subset,
        "split": run.data.split,
        "weights": None if None in weights else ", ".join(f"{weight:g}" for weight in weights),
        "variance_buffer": run.variance_buffer,
        "tail": run.tail,
        "separate_final_epoch": getattr(run.order, "separate_final_epoch", None),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _check(run: RunSettings) -> None:
    if any(source.tokens is not None for source in run.data.train):
        raise InvalidArgument(
            "--tokens-per-epoch and --length-histogram have no documents to audit; give "
            "--data-path with the .bin/.idx pair"
        )
    if run.exact:
        raise InvalidArgument(
            "train_epochs under install(exact=True) is planned, and neither audited nor locked; "
            "give train_iters"
        )
    if run.dataloader != "single" or run.evaluation.full or run.evaluation.alone:
        raise InvalidArgument(
            "--dataloader-type cyclic, --full-validation and --skip-train cannot be audited; "
            "remove them"
        )


def _check_consumed(run: RunSettings, whole: ResolvedTarget) -> None:
    """Check the consumed samples against ``whole``, the same target without a resume."""
    beyond = run.consumed_samples > whole.samples_requested + run.batch.final
    if run.target.kind != "iterations" and beyond:
        raise InvalidArgument(
            f"--consumed-samples {run.consumed_samples} lies beyond the target of the run, which "
            f"consumes {whole.samples_consumed} samples in all; raise the target"
        )


def _evaluations(
    run: RunSettings, subset: Split, target: ResolvedTarget, parts: Parts
) -> tuple[BatchSchedule, int, int]:
    """Return batches, consumed samples and samples of all evaluations of a run, or of its test."""
    evaluation = evaluation_of(run, target.train_iters, parts)
    assert evaluation is not None, "there is data of the subset"
    valid = subset == "valid"
    total = evaluation.valid_samples if valid else evaluation.test_samples
    if total == 0:
        raise InvalidArgument(f"--eval-iters 0 reads nothing of the {subset} data; raise it")
    return BatchSchedule.constant(evaluation.batch_size), 0, total


def _train_index(
    run: RunSettings,
    sizing: Sizing,
    parts: Sequence[SplitPart],
    target: ResolvedTarget,
    cache_dir: Folder | None,
    most: int | None,
) -> Index:
    """Return the index of the train split, with Megatron's phases the indices in sequence."""
    phases = phases_of(run, target)
    if not phases:
        asked, consumed = target.samples_requested, target.samples_consumed
        return _index(run, sizing, parts, asked, consumed, cache_dir, most)
    stages = [
        Stage(
            index=_index(
                run,
                sizing,
                parts,
                phase_request(run, target, phase),
                phase.samples,
                cache_dir,
                most,
            ),
            samples=range(phase.samples),
        )
        for phase in phases
    ]
    return ExtendedIndex(stages=tuple(stages))


def _index(
    run: RunSettings,
    sizing: Sizing,
    parts: Sequence[SplitPart],
    asked: int,
    consumed: int,
    cache_dir: Folder | None,
    most: int | None,
    subset: Split = "train",
) -> Index:
    """Return the ``consumed`` samples read of a blend built for ``asked`` samples.

    A loader that starts over reads some samples again.
    """
    _check_size(subset, max(asked, consumed), most)
    requested = sizing.requested(asked)
    assert requested is not None
    _check_size(subset, max(requested), most)
    indices = [
        build_index(
            IndexedDataset(part.source.path, dialect=run.row.file_dialect),
            sequence_length=run.sequence_length,
            seed=run.seed,
            num_samples=max(1, num_samples),
            documents=range(part.begin, part.end),
            order=order_of_row(sizing.row),
            cache_dir=cache_dir,
        )
        for part, num_samples in zip(parts, requested, strict=True)
    ]
    passes = loader_passes(run, [index.num_samples for index in indices], subset, consumed)
    if passes.is_empty:
        raise InvalidArgument(
            f"{subset}: GPT-NeoX's loader has less than one micro batch; see `megaindex plan`"
        )
    positions = passes.positions()
    index = blend_index(indices, sizing, max(part.end for part in positions) if positions else 0)
    if positions in ((), (ServedRange(0, consumed, 1),)):
        return index
    again = [np.tile(np.arange(part.begin, part.end), part.times) for part in positions]
    return ExtendedIndex(stages=(Stage(index=index, samples=np.concatenate(again)),))


def _check_size(subset: Split, samples: int, most: int | None) -> None:
    if most is not None and samples > most:
        raise InvalidArgument(
            f"{subset}: the settings ask for {samples} samples, and must for at most {most}; "
            "restore the settings"
        )


def _source(run: RunSettings, part: SplitPart) -> AuditSource:
    dataset = IndexedDataset(part.source.path, dialect=run.row.file_dialect)
    return AuditSource(
        name=part.source.path,
        lengths=dataset.sequence_lengths[part.begin : part.end],
        first_document=part.begin,
        cut_tokens=0 if part.packing is None else part.tokens - part.packing.input_tokens,
        cut_by=f"long_documents {run.row.long_documents}",
        path_prefix=part.source.path,
    )
