"""The run of settings of a framework, by the rules of its version, changed in mid-run or not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from megaindex.builders import build_index
from megaindex.builders.extend import ExtendedRun, amend_run, extend_run
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import blend_index
from megaindex.index.draws import Progress
from megaindex.index.frameworks import Split
from megaindex.index.order_settings import order_of_row
from megaindex.index.spans import Index, pass_counts
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.run.parts import Parts, SplitPart, open_dataset, parts_of
from megaindex.run.passes import ServedRange, loader_limit, loader_passes
from megaindex.run.run import Run, RunSource, StepShape, skipped_run
from megaindex.run.sizing import Sizing, sizing_of
from megaindex.run.target import (
    ResolvedTarget,
    evaluation_of,
    masked_rows,
    phase_request,
    phases_of,
    resolve_target,
    target_text,
)
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.batch_schedule import BatchSchedule, steps_of
from megaindex.settings.run_settings import RunSettings

Folder: TypeAlias = str | os.PathLike[str]


def run_of_settings(
    run: RunSettings,
    *,
    subset: Split = "train",
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
    most_samples: int | None = None,
    amend: AmendedBlend | None = None,
) -> Run:
    """Return the run of a framework's settings, by the rules of its version.

    Args:
        run: the run, such as `megaindex.plan.resolve` returns; its consumed samples are the past.
        subset: train, or valid or test with the samples of all evaluations.
        cache_dir: cache of built indices; None: build in memory.
        progress: called with (done, total) while draws are counted.
        most_samples: samples that an index may be built for, as of a run whose settings a file
            states; None: any number.
        amend: how the run began, and the changes of its blend since, as under ``install(amend=…)``.

    Raises:
        InvalidArgument: the run cannot be built: it has no files, more samples of a source are
            drawn than built, or it asks for more than ``most_samples``.
        FormatError, StorageError: a dataset cannot be read.
    """
    _check(run, subset)
    if run.packing is not None:
        raise InvalidArgument(
            f"pack_impl {run.packing.pack_impl}: a lock cannot hold samples of whole documents, "
            "which GPT-NeoX chooses by the tokens of their labels, and serves others for some of "
            "them; it is planned, and neither audited nor locked: use `megaindex plan`"
        )
    parts = parts_of(run)
    if not parts[subset]:
        raise InvalidArgument(
            f"the run has no {subset} data; give --split, or --{subset}-data-path"
        )
    # a built blend needs the exact draws
    exact = replace(run, blend_counts="exact")
    sizing = sizing_of(exact, parts["train"], "train", progress)
    target = resolve_target(run, sizing)
    sources = tuple(_source(run, part) for part in parts[subset])
    schedule, consumed, total = run.batch, run.consumed_samples, target.samples_consumed
    if subset == "train":
        _check_validation(exact, target, parts)
        _check_consumed(run, resolve_target(replace(run, consumed_samples=0), sizing))
        if amend is None:
            index = _train_index(run, sizing, parts["train"], target, cache_dir, most_samples)
        else:
            _check_size(subset, max(total, amend.num_samples), most_samples)
            changed = _changed_index(run, amend, total)
            index, sources = changed.index, _changed_sources(run, changed)
    else:
        sizing = sizing_of(exact, parts[subset], subset, progress, parts["train"])
        schedule, asked, total = _evaluations(run, subset, target, parts)
        index = _index(run, sizing, parts[subset], asked, total, cache_dir, most_samples, subset)
        consumed = 0
    steps, past = steps_of(schedule, consumed, total)
    found = Run(
        index=index,
        sources=sources,
        steps=steps,
        past_steps=past,
        masked_rows=masked_rows(run, target) if subset == "train" else 0,
        order=run.row.order,
        settings=_settings(run, subset),
        shapes=(StepShape(0, run.micro_batch_size, run.data_parallel_size),),
        every=run.evaluation.interval if subset == "valid" else None,
        is_evaluation=subset != "train",
    )
    return skipped_run(found, run.skips(steps.count), schedule) if subset == "train" else found


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
        "variance_buffer": None if run.variance_buffer is None else str(run.variance_buffer),
        "tail": run.tail,
        "separate_final_epoch": getattr(run.order, "separate_final_epoch", None),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _check(run: RunSettings, subset: Split) -> None:
    if any(source.tokens is not None for source in run.data.train):
        raise InvalidArgument(
            "--tokens-per-epoch and --length-histogram have no documents to audit; give "
            "--data-path with the .bin/.idx pair"
        )
    if run.dataloader != "single":
        raise InvalidArgument(
            "--dataloader-type cyclic: its order is that of PyTorch's generator on each rank, so "
            "that the run is planned, and neither audited nor locked; remove it"
        )
    if subset == "train" and run.evaluation.alone:
        raise InvalidArgument(
            "--skip-train: the run trains on nothing, and reads its evaluation alone; give "
            "--subset valid, or remove it"
        )
    if subset != "train" and run.evaluation.full:
        raise InvalidArgument(
            f"--full-validation: micro batches and ranks decide which samples of the {subset} data "
            "are read, so that they are planned, and neither audited nor locked; remove it"
        )


def _check_consumed(run: RunSettings, whole: ResolvedTarget) -> None:
    """Check the consumed samples against ``whole``, the same target without a resume."""
    beyond = run.consumed_samples > whole.samples_requested + run.batch.final
    if run.target.kind != "iterations" and beyond:
        raise InvalidArgument(
            f"--consumed-samples {run.consumed_samples} lies beyond the target of the run, which "
            f"consumes {whole.samples_consumed} samples in all; raise the target"
        )


def _check_validation(run: RunSettings, target: ResolvedTarget, parts: Parts) -> None:
    """Refuse a run of GPT-NeoX that ends before its first step, with its validation loader empty.

    So it does at a source of its own without a sample.
    """
    evaluation = evaluation_of(run, target.train_iters, parts)
    filled = [part for part in parts["valid"] if part.tokens]
    if run.row.train_epochs == "none" or evaluation is None or not filled:
        return
    sizing = sizing_of(run, filled, "valid", None, parts["train"])
    requested = sizing.requested(evaluation.valid_samples)
    assert requested is not None, "draws are counted"
    built = sizing.built(requested, sizing.epochs(requested))
    own = run.exact or run.data.split is None
    if loader_limit(run, built) == 0 or (own and 0 in built):
        raise _empty_loader("valid")


def _empty_loader(subset: Split) -> InvalidArgument:
    return InvalidArgument(
        f"{subset}: GPT-NeoX's loader has less than one micro batch; see `megaindex plan`"
    )


def _evaluations(
    run: RunSettings, subset: Split, target: ResolvedTarget, parts: Parts
) -> tuple[BatchSchedule, int, int]:
    """Return the batches of all evaluations of a run, or of its test, and the samples that are
    requested for them and read."""
    evaluation = evaluation_of(run, target.train_iters, parts)
    assert evaluation is not None, "there is data of the subset"
    asked, read = evaluation.valid_samples, evaluation.valid_samples_read
    if subset == "test":
        asked, read = evaluation.test_samples, evaluation.test_samples_read
    if read == 0:
        raise InvalidArgument(f"--eval-iters 0 reads nothing of the {subset} data; raise it")
    return BatchSchedule.constant(evaluation.batch_size), asked, read


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
    stretches = [
        Stretch(
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
    return StretchedIndex(stretches=tuple(stretches))


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

    A loader that starts over reads some samples again, or reshuffles them in each pass.
    """
    _check_size(subset, max(asked, consumed), most)
    requested = sizing.requested(asked)
    assert requested is not None
    _check_size(subset, max(requested), most)

    def sources(number: int) -> list[Any]:  # of a pass
        return [
            build_index(
                open_dataset(part.source.path, run.row),
                sequence_length=run.sequence_length,
                seed=(run.seed + number) % 2**32,
                num_samples=max(1, num_samples),
                documents=part.documents,
                source_name=part.shuffle_name,
                order=order_of_row(sizing.row),
                cache_dir=cache_dir,
            )
            for part, num_samples in zip(parts, requested, strict=True)
        ]

    named = [f"{subset}, {name}" for name in sizing.names]
    indices = sources(0)
    passes = loader_passes(run, [index.num_samples for index in indices], subset, consumed)
    if passes.is_empty:
        raise _empty_loader(subset)
    positions = passes.positions()
    size = max((part.end for part in positions), default=0)

    def blended(indices: Sequence[Any]) -> Index:
        first: Index = indices[0]
        if sizing.single:
            return first
        short = sizing.row.uncounted_samples
        return blend_index(sizing.blend.draws, indices, size, short, named)

    index = blended(indices)
    if positions in ((), (ServedRange(0, consumed, 1),)):
        return index
    bases = [index] * len(positions)
    if run.row.train_epochs == "reshuffled" and subset == "train":
        positions = tuple(replace(part, times=1) for part in positions for _ in range(part.times))
        bases = [index, *(blended(sources(number)) for number in range(1, len(positions)))]
    return StretchedIndex(
        stretches=tuple(
            Stretch(
                index=base,
                samples=range(part.begin, part.end),
                times=part.times,
                first_passes=pass_counts(index) * (0 if base is index else number),
            )
            for number, (base, part) in enumerate(zip(bases, positions, strict=True))
        )
    )


def _check_size(subset: Split, samples: int, most: int | None) -> None:
    if most is not None and samples > most:
        raise InvalidArgument(
            f"{subset}: the settings ask for {samples} samples, and must for at most {most}; "
            "restore the settings"
        )


def _source(run: RunSettings, part: SplitPart) -> RunSource:
    dataset = open_dataset(part.source.path, run.row)
    return RunSource(
        name=part.source.path,
        sequence_lengths=dataset.sequence_lengths[part.begin : part.end],
        first_document=part.begin,
        cut_tokens=0 if part.packing is None else part.tokens - part.packing.input_tokens,
        cut_by=f"long_documents {run.row.long_documents}",
        path_prefix=part.source.path,
        members=part.members,
    )


def _changed_index(run: RunSettings, amend: AmendedBlend, end: int) -> ExtendedRun:
    """Return the first ``end`` samples of a run that began as ``amend`` says and went on by it.

    Args:
        run: the run of today, whose training data are those of the last change.
        amend: how the run began, and its changes.
        end: end of the run of today, beyond the last change.

    Raises:
        InvalidArgument: a setting has no such run, or the changes do not fit it.
        FormatError, StorageError: a source cannot be read.
    """
    _check_change(run, amend, end)
    given = [source.path for source in amend.sources]
    blended = amend.weights is not None or len(given) > 1
    buffer = run.variance_buffer if run.surplus is None else 1 + run.surplus
    common: dict[str, Any] = {
        "sequence_length": run.sequence_length,
        "seed": run.seed,
        "order": run.order,
        "num_samples": amend.num_samples,
        "weights": amend.weights,
        "variance_buffer": buffer if blended else None,
        "split": run.data.split,
    }
    if amend.changes:
        more = end - amend.changes[-1].consumed_samples
        return amend_run(given, changes=amend.changes, more_samples=more, **common)
    consumed = amend.consumed_samples
    assert consumed is not None, "without changes"
    corpora = given if blended else given[0]
    more = end - consumed
    return extend_run(corpora, consumed_samples=consumed, more_samples=more, **common)


def _check_change(run: RunSettings, amend: AmendedBlend, end: int) -> None:
    data, row = run.data, run.row
    weights = [source.weight for source in data.train if source.weight is not None]
    amend.check_present([source.path for source in data.train], weights or None)
    refused = (
        (not row.is_framework, f"a run of order {row.order} changes as a recipe; write one"),
        (run.phases, "--phase-transition-iterations counts the samples of each phase anew"),
        (
            run.target.kind not in ("iterations", "samples"),
            "the run must end after iterations or samples; give --train-iters or --train-samples",
        ),
        (
            not amend.changes
            and amend.weights is None
            and len(amend.sources) > 1
            and row.request == "megatron",
            "without weights, whole epochs go on by another rule than they began by, of which "
            "there is no lock; train on the index of megaindex.extend_run",
        ),
        (data.documents_alpha is not None, "weight_by_num_documents computes weights; give them"),
    )
    for applies, reason in refused:
        if applies:
            raise InvalidArgument(f"amend: {reason}")
    last = amend.changes[-1].consumed_samples if amend.changes else amend.consumed_samples or 0
    if last >= end:
        raise InvalidArgument(
            f"amend: the change at sample {last} lies at or beyond the end of the run, sample "
            f"{end}; make the run longer"
        )


def _changed_sources(run: RunSettings, changed: ExtendedRun) -> tuple[RunSource, ...]:
    """Return the sources of a changed run: those with which it began, then new ones."""
    return tuple(_changed_source(run, dataset) for dataset in changed.datasets)


def _changed_source(run: RunSettings, dataset: IndexedDataset) -> RunSource:
    split, whole = run.data.split, (0, len(dataset))
    begin, end = whole if split is None else run.row.split_bounds(split, len(dataset))[0]
    return RunSource(
        name=dataset.path_prefix,
        sequence_lengths=dataset.sequence_lengths[begin:end],
        first_document=begin,
        path_prefix=dataset.path_prefix,
    )
