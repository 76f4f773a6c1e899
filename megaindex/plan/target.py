"""The target of a run in iterations, and limits of the iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from megaindex.arithmetic import ceil_div
from megaindex.configs.run import RunSettings
from megaindex.errors import InvalidArgument
from megaindex.index.blending import request_weights
from megaindex.plan.model import Coverage, DryLoader, Evaluations, Neighbour, Phase, Row, Tail
from megaindex.plan.sizing import Sizing, loader_limit

# Frameworks with a setting train_samples, which they request of the datasets in place of batches.
_TAKES_SAMPLES = ("megatron", "megatron-legacy")
_WHOLE_EPOCHS = ("epochs", "loader_epochs")


@dataclass(frozen=True, kw_only=True)
class ResolvedTarget:
    """Iterations, samples and tokens of a run's target."""

    train_iters: int
    """Iterations from the samples consumed already."""
    samples_consumed: int
    """Samples consumed in all, without the masked ones of a padded last batch."""
    samples_requested: int
    """Samples requested of the blend."""
    samples_in_view: int
    """Samples of the target's epochs, or of the whole epochs that the target reaches into."""
    tokens_in_view: int
    """Tokens of those epochs."""


def resolve_target(run: RunSettings, sizing: Sizing) -> ResolvedTarget:
    """Return the target of a run in iterations, samples and tokens."""
    wanted = _wanted(run, sizing)
    iterations = _iterations(run, wanted, run.tail)
    consumed = _consumed(run, wanted, iterations, run.tail)
    if run.target.kind == "loader_epochs":
        iterations = _loader_iterations(run, sizing)
        consumed = run.batch.samples_after(iterations, run.consumed_samples)
    requested = _requested(run, wanted, iterations, consumed)
    _check_ramp(run, consumed)
    if run.evaluation.alone:
        consumed = run.consumed_samples
    if run.target.kind in _WHOLE_EPOCHS:
        tokens = sum(
            int(epochs * size) for epochs, size in zip(_epochs(run), sizing.tokens, strict=True)
        )
        in_view = wanted
    else:
        epochs = whole_epochs(sizing, consumed)
        tokens = epochs * sum(sizing.tokens)
        in_view = sum(sizing.samples_of([epochs] * len(sizing.tokens)))
    return ResolvedTarget(
        train_iters=iterations,
        samples_consumed=consumed,
        samples_requested=requested,
        samples_in_view=in_view,
        tokens_in_view=tokens,
    )


def masked_rows(run: RunSettings, target: ResolvedTarget) -> int:
    """Return the rows of the last batch that are padding, under tail pad."""
    rows = run.batch.samples_after(target.train_iters, run.consumed_samples)
    return max(0, rows - target.samples_consumed)


def tails_of(run: RunSettings, sizing: Sizing) -> tuple[Tail, ...]:
    """Return the cost of each tail policy; empty for a target of iterations, which has no tail."""
    if run.target.kind in ("iterations", "loader_epochs"):
        return ()
    wanted = _wanted(run, sizing)
    tails = []
    for policy in ("drop", "pad", "wrap"):
        iterations = _iterations(run, wanted, policy)
        served = run.batch.samples_after(iterations, run.consumed_samples)
        beyond = max(0, served - wanted)
        tails.append(
            Tail(
                policy=policy,
                train_iters=iterations,
                samples_consumed=_consumed(run, wanted, iterations, policy),
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


def whole_epochs(sizing: Sizing, samples: int) -> int:
    """Return the least number of epochs, from 1, of all sources that hold ``samples`` samples."""
    if sizing.pass_samples is not None:
        return max(1, ceil_div(samples, sum(sizing.pass_samples)))
    size = len(sizing.tokens)
    epochs = max(1, samples * sizing.sequence_length // sum(sizing.tokens))
    while sum(sizing.samples_of([epochs] * size)) < samples:
        epochs += 1
    return epochs


def _epochs(run: RunSettings) -> tuple[Fraction, ...]:
    return run.target.per_source or (run.target.value,) * len(run.data.train)


def _wanted(run: RunSettings, sizing: Sizing) -> int:
    """Return the samples of the target, counted from the first of the run."""
    target = run.target
    if target.kind in _WHOLE_EPOCHS:
        return sum(sizing.samples_of(_epochs(run)))
    value = int(target.value)
    if target.kind == "iterations":
        return run.batch.samples_after(value, run.consumed_samples)
    return value if target.kind == "samples" else value // run.sequence_length


def _loader_iterations(run: RunSettings, sizing: Sizing) -> int:
    """Return the iterations of GPT-NeoX's train_epochs, without those before a resume.

    As update_iterations: micro batches · train_epochs // accumulation.
    """
    limit, batch = loader_limit(run, sizing.per_epoch()), run.batch.final
    assert limit is not None, "checked by RunSettings"
    batches, accumulation = limit // run.loader_batch, batch // run.loader_batch
    if batches == 0:
        raise InvalidArgument(
            f"train_epochs: one epoch of the sources holds less than a micro batch of "
            f"{run.loader_batch} samples, and GPT-NeoX ends with a ZeroDivisionError; lower the "
            "batch size"
        )
    whole = batches * int(run.target.value) // accumulation
    return max(0, whole - run.consumed_samples // batch)


def _check_ramp(run: RunSettings, consumed: int) -> None:
    """Refuse a target within a ramp: Megatron-LM rounds up there, so no setting is exact."""
    ramp = run.batch.ramp
    is_megatron = run.row.order == "megatron"
    if is_megatron and ramp and run.target.kind != "samples" and consumed <= ramp[2]:
        raise InvalidArgument(
            f"the target of {consumed} samples ends before the ramp's {ramp[2]}, where Megatron-LM "
            "runs one iteration more; give --train-samples, or a longer target"
        )


def _requested(run: RunSettings, wanted: int, iterations: int, consumed: int) -> int:
    """Return the samples requested of the blend.

    They are Megatron's train_samples, as which epochs and tokens are printed, or train_iters
    nominal batches.
    """
    if run.target.kind == "samples" and run.row.order in _TAKES_SAMPLES:
        return wanted if run.tail == "drop" else max(wanted, consumed)
    built_by_iterations = run.batch.stepped and run.target.kind == "iterations"
    if run.row.order != "megatron" or not built_by_iterations or run.unit is None:
        return consumed
    before = run.batch.iterations_within(run.consumed_samples)
    return (before + iterations) * run.nominal_batch


def _iterations(run: RunSettings, wanted: int, tail: str) -> int:
    start = run.consumed_samples
    varies = run.row.order == "megatron" and (run.batch.stepped or run.batch.ramp is not None)
    if run.target.kind == "samples" and varies and tail == "drop":
        before = run.batch.iterations_within(start)
        return max(0, run.batch.iterations_for(wanted) - before)
    iterations = run.batch.iterations_within(wanted, start)
    short = run.batch.samples_after(iterations, start) < wanted
    return iterations + (short and tail != "drop")


def _consumed(run: RunSettings, wanted: int, iterations: int, tail: str) -> int:
    served = run.batch.samples_after(iterations, run.consumed_samples)
    return min(served, max(wanted, run.consumed_samples)) if tail == "pad" else served


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


def phases_of(run: RunSettings, target: ResolvedTarget) -> tuple[Phase, ...]:
    """Return Megatron's phases since the start of the run, each with datasets of its own."""
    if not run.phases:
        return ()
    size = run.batch.final
    last = run.consumed_samples // size + target.train_iters
    phases = []
    for begin, end in pairwise([0, *(each for each in run.phases if each < last), last]):
        first, stop = begin * size, min(end * size, target.samples_consumed)
        phases.append(Phase(begin=begin, end=end, first_sample=first, samples=stop - first))
    return tuple(phases)


def phase_request(run: RunSettings, target: ResolvedTarget, phase: Phase) -> int:
    """Return the samples that the datasets of a phase are built for, which decides their order.

    They reach to the next transition or to train_samples, as in Megatron-LM's
    ``get_train_valid_test_num_samples``, also where these do not fill the last batch.
    """
    bounds = [*(each * run.batch.final for each in run.phases), target.samples_requested]
    after = (each for each in bounds if each > phase.first_sample)
    return min(after, default=phase.first_sample) - phase.first_sample


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
    shares = request_weights(weights, run.row)
    return sum(run.row.samples_requested(requested, share, 1.0, len(rows)) for share in shares)


def permuted(rows: Sequence[Row], samples: int) -> tuple[Row, ...]:
    """Return the rows of a blend of which Megatron's cyclic loader draws so many samples.

    It permutes the built samples: draws from one of several sources have bounds alone, and coverage
    is not planned.
    """
    found = []
    one_pass = samples <= sum(row.built or 0 for row in rows)
    for row in rows:
        once = one_pass and row.epochs == 1 and (row.drawn or 0) <= row.samples_per_epoch
        row = replace(row, repeated=0 if once else None, coverage=Coverage(method="none"))
        if len(rows) > 1:
            row = replace(row, drawn=None, drawn_bounds=(0, samples))
        found.append(row)
    return tuple(found)
