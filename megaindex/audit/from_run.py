"""From the planner's `Run` to the stream of its train split: every source built, then blended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaindex.audit.blend import blended
from megaindex.audit.stream import AuditSource, Stream, step_bounds
from megaindex.build import build_index
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.dialect import dialect
from megaindex.index.orders.epoch import LeftOver
from megaindex.index.spans import Index
from megaindex.plan.corpus import Part
from megaindex.plan.draws import Progress
from megaindex.plan.sources import parts_of, sizing_of
from megaindex.plan.target import Aim, aim_of
from megaindex.recipe.run import Run


@dataclass(frozen=True, kw_only=True)
class Building:
    """How the indices are built, where the run itself does not say."""

    separate_final_epoch: str | None = None
    """auto, always or never. None: what the framework does."""
    final_epoch_threshold: float | None = None
    epochs_mixed: int = 1
    """Order epoch: complete epochs that are shuffled together."""
    left_over: LeftOver | None = None
    """Order epoch: drop or carry. None: drop."""
    cache_dir: str | os.PathLike[str] | None = None


def stream_of_run(
    run: Run, building: Building | None = None, *, progress: Progress | None = None
) -> Stream:
    """What a run serves, its consumed samples first.

    Raises:
        InvalidArgument: the run cannot be built: no files, phases, or a source that runs short.
        FormatError, StorageError: a dataset cannot be read.
    """
    _check(run)
    row = dialect(run.order)
    parts = parts_of(run.data, row)["train"]
    # the built blend needs the exact draws, however long they take to count
    sizing = sizing_of(replace(run, blend_counts="exact"), row, parts, "train", progress)
    aim = aim_of(run, sizing)
    _check_consumed(run, aim_of(replace(run, consumed_samples=0), sizing))
    requested = sizing.requested(aim.samples_requested)
    assert requested is not None
    indices, sources = [], []
    for part, num_samples in zip(parts, requested, strict=True):
        index, source = _built(run, part, num_samples, building or Building())
        indices.append(index)
        sources.append(source)
    bounds, past = step_bounds(run.batch, run.consumed_samples, aim.samples_consumed)
    return Stream(
        index=blended(indices, sizing, aim.samples_consumed),
        sources=tuple(sources),
        step_bounds=bounds,
        past_steps=past,
        order=run.order,
        micro_batch_size=run.micro_batch_size,
        data_parallel_size=run.data_parallel_size,
    )


def _check(run: Run) -> None:
    if any(source.tokens is not None for source in run.data.train):
        raise InvalidArgument(
            "--tokens-per-epoch has no documents to audit; give --data-path with the .bin/.idx pair"
        )
    if run.phases:
        raise InvalidArgument(
            f"--phase-transition-iterations {_words(run.phases)}: each phase has datasets of its "
            "own; audit the phases one at a time, without that setting"
        )


def _check_consumed(run: Run, whole: Aim) -> None:
    """``whole``: what the same target consumes from the first sample on."""
    beyond = run.consumed_samples > whole.samples_requested + run.batch.final
    if run.target.kind != "iterations" and beyond:
        raise InvalidArgument(
            f"--consumed-samples {run.consumed_samples} lies beyond the target of the run, which "
            f"consumes {whole.samples_consumed} samples in all; raise the target"
        )


def _built(run: Run, part: Part, num_samples: int, building: Building) -> tuple[Index, AuditSource]:
    dataset = IndexedDataset(part.source.path, dialect=dialect(run.order).file_dialect)
    index = build_index(
        dataset,
        sequence_length=run.sequence_length,
        seed=run.seed,
        num_samples=max(1, num_samples),
        documents=range(part.begin, part.end),
        order=run.order,
        separate_final_epoch=building.separate_final_epoch,
        final_epoch_threshold=building.final_epoch_threshold,
        epochs_mixed=building.epochs_mixed,
        left_over=building.left_over,
        cache_dir=building.cache_dir,
    )
    source = AuditSource(
        name=part.source.path,
        lengths=dataset.sequence_lengths[part.begin : part.end],
        first_document=part.begin,
    )
    return index, source


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
