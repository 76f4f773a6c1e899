"""Plan of a decided run, such as that of a lock, by counting what it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megaindex._types import I64
from megaindex.index.counts import origin_of
from megaindex.index.draws import Progress
from megaindex.index.spans import sequence_lengths_at
from megaindex.plan.coverage import BUILD_LIMIT, COVERAGES, coverage_of_sources
from megaindex.plan.model import Coverage, Plan, Row, effect_of
from megaindex.plan.subsets import subsets_of_run
from megaindex.run.run import Run
from megaindex.validation import check_choice

_SAMPLES_AT_ONCE = 1 << 18


def plan_of_run(run: Run, *, coverage: str | None = None, progress: Progress | None = None) -> Plan:
    """Return the plan of a decided run.

    Args:
        run: the run.
        coverage: auto, exact, expected or none; None: auto. Samples and tokens are counted by the
            index, under auto up to a limit, and never a mean over seeds.
        progress: called with (done, total) while they are counted.
    """
    coverage = check_choice("--coverage", coverage or "auto", COVERAGES)
    documents = int(run.document_base[-1])
    within = run.samples_served + documents <= BUILD_LIMIT
    counts = coverage == "exact" or (coverage == "auto" and within)
    rows = _rows(run, counts, progress)
    bounds, skips = run.step_bounds, run.skips
    skip, steps, end = None, run.num_steps, run.num_samples
    if skips is not None:  # moved steps are made behind the others
        steps = skips.num_steps
        end = int(bounds[min(steps, run.num_steps)])
        past = int(bounds[run.past_steps])
        skip = effect_of(skips, bounds, masked_rows=run.masked_rows, consumed=past)
        skip = skip.counted(run.index, [source.name for source in run.sources])
    size = int(bounds[-1] - bounds[-2]) + run.masked_rows
    tokens = [row.coverage.tokens_served for row in rows]
    served = [count for count in tokens if count is not None]
    return Plan(
        order=run.order or None,
        sequence_length=max(run.sequence_lengths),
        variance_buffer=None,
        tail=None,
        train_iters=steps - run.past_steps,
        global_batch_size=size,
        batch_schedule=run.batch.plain_stages,
        tokens_per_epoch=sum(row.tokens_per_epoch for row in rows),
        samples_per_epoch=None,
        samples_consumed=end - int(bounds[0]),
        tokens_consumed=sum(served) if len(served) == len(tokens) else None,
        samples_built=None,
        samples_left_over=None,
        num_epochs_built=None,
        max_train_iters_without_repeat=None,
        max_train_iters_same_epochs=None,
        datasets=rows,
        skip=skip,
        subsets=subsets_of_run(run),
        check_failures=tuple(_failures(rows, counts, size * max(run.sequence_lengths))),
    )


def _failures(rows: Sequence[Row], counts: bool, batch_tokens: int) -> Iterator[str]:
    """Yield the reasons for which ``--check`` fails: no target says which epochs were meant."""
    if not counts:
        yield "its coverage was not counted; give --coverage exact"
        return
    for row in rows:
        if again := sum(row.coverage.tokens[2:]):
            yield f"{row.name}: {again:.1%} of its tokens come twice or more"
    unseen = sum(round(row.coverage.tokens[0] * (row.tokens_per_epoch or 0)) for row in rows)
    if unseen > batch_tokens:
        yield f"{unseen} tokens stay unseen, more than one batch of {batch_tokens}"


def _rows(run: Run, counts: bool, progress: Progress | None) -> tuple[Row, ...]:
    drawn = run.counts(int(run.step_bounds[0]), run.num_samples).tolist()
    distinct = _distinct(run).tolist() if counts else [None] * len(run.sources)
    covered = [Coverage(method="none")] * len(run.sources)
    if counts:
        covered = coverage_of_sources(run, progress)
    return tuple(
        Row(
            split="train",
            source=number + 1,
            path=source.path_prefix,
            label="" if source.name == source.path_prefix else source.name,
            weight=None,
            tokens_per_epoch=int(source.lengths.sum(dtype=np.int64)),
            samples_per_epoch=None,
            requested=None,
            drawn=drawn[number],
            drawn_bounds=(drawn[number], drawn[number]),
            drawn_by_blend=None,
            built=None,
            epochs=None,
            distinct=distinct[number],
            repeated=None,
            coverage=covered[number],
        )
        for number, source in enumerate(run.sources)
    )


def _distinct(run: Run) -> I64:
    """Return int64[sources]: different samples among those served of each."""
    pieces = []
    for begin in range(int(run.step_bounds[0]), run.num_samples, _SAMPLES_AT_ONCE):
        ids = np.arange(begin, min(run.num_samples, begin + _SAMPLES_AT_ONCE), dtype=np.int64)
        if run.skips is not None:
            ids = ids[~run.skips.is_hole(ids)]
        source, sample = origin_of(run.index, ids)
        length = np.broadcast_to(sequence_lengths_at(run.index, ids), ids.shape)
        pieces.append(np.stack((source, length, sample), axis=1).astype(np.int64))
    found = np.unique(np.concatenate(pieces), axis=0)
    return np.bincount(found[:, 0], minlength=len(run.sources)).astype(np.int64)
