"""Limits of the iterations of a run: tails, further epochs, and loaders that run dry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megaindex.configs.run import RunSettings
from megaindex.errors import InvalidArgument
from megaindex.index.blend import Blend
from megaindex.plan.model import DryLoader, Neighbour, Row, Tail
from megaindex.run.passes import loader_limit
from megaindex.run.sizing import Sizing
from megaindex.run.target import (
    Evaluations,
    ResolvedTarget,
    consumed_of,
    iterations_of,
    samples_wanted,
)


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
