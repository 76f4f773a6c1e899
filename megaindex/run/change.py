"""Runs of a framework whose blend changed, or that were extended, in mid-run."""

from __future__ import annotations

from typing import Any

from megaindex.builders.extend import ExtendedRun, amend_run, extend_run
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.run.run import RunSource
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.run_settings import RunSettings


def changed_index(run: RunSettings, amend: AmendedBlend, end: int) -> ExtendedRun:
    """Return the first ``end`` samples of a run that began as ``amend`` says and went on by it.

    Args:
        run: the run of today, whose training data are those of the last change.
        amend: how the run began, and its changes.
        end: end of the run of today, beyond the last change.

    Raises:
        InvalidArgument: a setting has no such run, or the changes do not fit it.
        FormatError, StorageError: a source cannot be read.
    """
    _check(run, amend, end)
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


def _check(run: RunSettings, amend: AmendedBlend, end: int) -> None:
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


def changed_sources(run: RunSettings, changed: ExtendedRun) -> tuple[RunSource, ...]:
    """Return the sources of a changed run: those with which it began, then new ones."""
    return tuple(_source(run, dataset) for dataset in changed.datasets)


def _source(run: RunSettings, dataset: IndexedDataset) -> RunSource:
    split, whole = run.data.split, (0, len(dataset))
    begin, end = whole if split is None else run.row.split_bounds(split, len(dataset))[0]
    return RunSource(
        name=dataset.path_prefix,
        sequence_lengths=dataset.sequence_lengths[begin:end],
        first_document=begin,
        path_prefix=dataset.path_prefix,
    )
