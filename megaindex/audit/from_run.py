"""From the planner's `Run` to the stream of one of its splits: every source built, then blended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from megaindex.audit.blend import blended
from megaindex.audit.stream import AuditSource, Stream, step_bounds
from megaindex.build import build_index
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.dialect import Split
from megaindex.index.draws import Progress
from megaindex.index.extended import ExtendedIndex, Stage
from megaindex.index.order_settings import order_of_row
from megaindex.index.spans import Index
from megaindex.plan.corpus import Part
from megaindex.plan.evaluation import evaluation_of
from megaindex.plan.limits import phases_of
from megaindex.plan.serving import Served, reading_of
from megaindex.plan.sizing import Sizing
from megaindex.plan.sources import Parts, parts_of, sizing_of
from megaindex.plan.target import Aim, aim_of
from megaindex.recipe.run import Run
from megaindex.recipe.schedule import BatchSchedule

Folder: TypeAlias = str | os.PathLike[str]


def stream_of_run(
    run: Run,
    *,
    subset: Split = "train",
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
) -> Stream:
    """What a run serves, its consumed samples first; of valid and test, all its evaluations.

    Raises:
        InvalidArgument: the run cannot be built: no files, or a source that runs short.
        FormatError, StorageError: a dataset cannot be read.
    """
    _check(run)
    if run.packing is not None:
        raise InvalidArgument(
            f"pack_impl {run.packing.pack_impl} is planned and not audited; read `megaindex plan`"
        )
    parts = parts_of(run.data, run.row)
    if not parts[subset]:
        raise InvalidArgument(
            f"the run has no {subset} data; give --split, or --{subset}-data-path"
        )
    # the built blend needs the exact draws, however long they take to count
    exact = replace(run, blend_counts="exact")
    sizing = sizing_of(exact, run.row, parts["train"], "train", progress)
    aim = aim_of(run, sizing)
    schedule, consumed, total = run.batch, run.consumed_samples, aim.samples_consumed
    if subset == "train":
        _check_consumed(run, aim_of(replace(run, consumed_samples=0), sizing))
        index = _train_index(run, sizing, parts["train"], aim, cache_dir)
    else:
        sizing = sizing_of(exact, run.row, parts[subset], subset, progress)
        schedule, consumed, total = _evaluations(run, subset, aim, parts)
        index = _index(run, sizing, parts[subset], total, total, cache_dir, subset)
    bounds, past = step_bounds(schedule, consumed, total)
    return Stream(
        index=index,
        sources=tuple(_source(run, part) for part in parts[subset]),
        step_bounds=bounds,
        past_steps=past,
        masked_rows=_masked_rows(run, aim) if subset == "train" else 0,
        order=run.row.order,
        micro_batch_size=run.micro_batch_size,
        data_parallel_size=run.data_parallel_size,
    )


def _check(run: Run) -> None:
    if any(source.tokens is not None for source in run.data.train):
        raise InvalidArgument(
            "--tokens-per-epoch has no documents to audit; give --data-path with the .bin/.idx pair"
        )
    if run.dataloader != "single" or run.evaluation.full or run.evaluation.alone:
        raise InvalidArgument(
            "--dataloader-type cyclic, --full-validation and --skip-train are planned and not "
            "audited; remove them"
        )
    if run.phases and run.consumed_samples:
        raise InvalidArgument(
            f"--phase-transition-iterations {_words(run.phases)} with --consumed-samples "
            f"{run.consumed_samples}: phases are counted from the run's first sample; audit the "
            "whole run, without --consumed-samples"
        )


def _check_consumed(run: Run, whole: Aim) -> None:
    """``whole``: what the same target consumes from the first sample on."""
    beyond = run.consumed_samples > whole.samples_requested + run.batch.final
    if run.target.kind != "iterations" and beyond:
        raise InvalidArgument(
            f"--consumed-samples {run.consumed_samples} lies beyond the target of the run, which "
            f"consumes {whole.samples_consumed} samples in all; raise the target"
        )


def _masked_rows(run: Run, aim: Aim) -> int:
    """Rows of the last batch that are padding, under tail pad."""
    rows = run.batch.samples_after(aim.train_iters, run.consumed_samples)
    return max(0, rows - aim.samples_consumed)


def _evaluations(run: Run, subset: Split, aim: Aim, parts: Parts) -> tuple[BatchSchedule, int, int]:
    """Batches and samples of all evaluations of a run, or of its test."""
    evaluation = evaluation_of(run, aim.train_iters, parts)
    assert evaluation is not None, "there is data of the subset"
    valid = subset == "valid"
    total = evaluation.valid_samples if valid else evaluation.test_samples
    if total == 0:
        raise InvalidArgument(f"--eval-iters 0 reads nothing of the {subset} data; raise it")
    return BatchSchedule.constant(evaluation.batch_size), 0, total


def _train_index(
    run: Run, sizing: Sizing, parts: Sequence[Part], aim: Aim, cache_dir: Folder | None
) -> Index:
    """One index; where Megatron builds datasets for each phase, theirs one after the other."""
    phases = phases_of(run, aim.train_iters)
    if not phases:
        asked, consumed = aim.samples_requested, aim.samples_consumed
        return _index(run, sizing, parts, asked, consumed, cache_dir)
    stages = [
        Stage(
            index=_index(run, sizing, parts, phase.samples, phase.samples, cache_dir),
            samples=range(phase.samples),
        )
        for phase in phases
    ]
    return ExtendedIndex(stages=tuple(stages))


def _index(
    run: Run,
    sizing: Sizing,
    parts: Sequence[Part],
    asked: int,
    consumed: int,
    cache_dir: Folder | None,
    subset: Split = "train",
) -> Index:
    """The ``consumed`` samples read of a blend whose sources were asked for ``asked``.

    A loader that starts over reads some of them again.
    """
    requested = sizing.requested(asked)
    assert requested is not None
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
    reading = reading_of(run, [index.num_samples for index in indices], subset, consumed)
    if reading.is_dead:
        raise InvalidArgument(
            f"{subset}: GPT-NeoX's loader has not one micro batch; see `megaindex plan`"
        )
    positions = reading.positions()
    index = blended(indices, sizing, max(part.end for part in positions) if positions else 0)
    if positions in ((), (Served(0, consumed, 1),)):
        return index
    again = [np.tile(np.arange(part.begin, part.end), part.times) for part in positions]
    return ExtendedIndex(stages=(Stage(index=index, samples=np.concatenate(again)),))


def _source(run: Run, part: Part) -> AuditSource:
    dataset = IndexedDataset(part.source.path, dialect=run.row.file_dialect)
    return AuditSource(
        name=part.source.path,
        lengths=dataset.sequence_lengths[part.begin : part.end],
        first_document=part.begin,
    )


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
