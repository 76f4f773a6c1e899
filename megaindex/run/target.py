"""The target of a run in iterations and samples, its phases and its evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import SPLITS
from megaindex.run.parts import Parts, SplitPart
from megaindex.run.passes import loader_limit
from megaindex.run.sizing import Sizing
from megaindex.settings.run_settings import RunSettings, of_megatron_alone

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
    wanted = samples_wanted(run, sizing)
    iterations = iterations_of(run, wanted, run.tail)
    consumed = consumed_of(run, wanted, iterations, run.tail)
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


def samples_wanted(run: RunSettings, sizing: Sizing) -> int:
    """Return the samples of the target, counted from the first of the run."""
    target = run.target
    if target.kind in _WHOLE_EPOCHS:
        return _samples_in_epochs(run, sizing)
    value = int(target.value)
    if target.kind == "iterations":
        return run.batch.samples_after(value, run.consumed_samples)
    return value if target.kind == "samples" else value // run.sequence_length


def _samples_in_epochs(run: RunSettings, sizing: Sizing) -> int:
    """Return the samples of the target's epochs: of each source, in whole samples.

    Where the epochs of a source are of as many samples each, as in recipes, a part of an epoch is a
    part of the samples of all sources.
    """
    epochs, row = _epochs(run), sizing.row
    if run.target.per_source or row.left_over == "carry":
        return sum(sizing.samples_of(epochs))
    blocks = [row.epochs_mixed] * len(epochs)
    return int(epochs[0] * sum(sizing.samples_of(blocks)) / row.epochs_mixed)


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


def iterations_of(run: RunSettings, wanted: int, tail: str) -> int:
    start = run.consumed_samples
    varies = run.row.order == "megatron" and (run.batch.stepped or run.batch.ramp is not None)
    if run.target.kind == "samples" and varies and tail == "drop":
        before = run.batch.iterations_within(start)
        return max(0, run.batch.iterations_for(wanted) - before)
    iterations = run.batch.iterations_within(wanted, start)
    short = run.batch.samples_after(iterations, start) < wanted
    return iterations + (short and tail != "drop")


def consumed_of(run: RunSettings, wanted: int, iterations: int, tail: str) -> int:
    served = run.batch.samples_after(iterations, run.consumed_samples)
    return min(served, max(wanted, run.consumed_samples)) if tail == "pad" else served


def target_text(run: RunSettings) -> str:
    """Return the target of a run, such as ``1.5 epochs``."""
    target = run.target
    if target.per_source:
        return f"{', '.join(map(_number, target.per_source))} epochs"
    if target.kind == "loader_epochs":
        return f"train_epochs {target.value}{' under install(exact=True)' if run.exact else ''}"
    unit = target.kind if target.value != 1 else target.kind.removesuffix("s")
    return f"{_number(target.value)} {unit}"


def _number(value: Fraction) -> str:
    """Return a decimal where it is exact, else a fraction."""
    decimal = f"{float(value):.15g}"
    return decimal if Fraction(decimal) == value else str(value)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Iterations [begin, end) of the run for which Megatron builds separate datasets."""

    begin: int
    end: int
    first_sample: int
    samples: int


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


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Evaluations of the whole run."""

    rounds: int
    """Evaluations that data is built for; Megatron's --start-eval-at-iter skips some."""
    valid_samples: int
    """Samples requested of the validation blend; with full validation, those of one pass."""
    test_samples: int
    batch_size: int
    rounds_run: int
    """Evaluations that take place."""
    valid_samples_read: int
    test_samples_read: int
    full: bool = False
    """True if each evaluation reads all of each validation dataset."""
    iterations: tuple[int, ...] = ()
    """Iterations of an evaluation, for each validation set (Megatron's eval_iters)."""


def evaluation_of(run: RunSettings, train_iters: int, parts: Parts) -> Evaluations | None:
    """Return the evaluations of a run, None without data for them.

    Megatron and NeoX: (I // interval + 1) evaluations of eval_iters batches, then one test.
    """
    if run.evaluation.full or run.evaluation.multiple:
        _check_full_validation(run, parts)
    if not parts["valid"] and not parts["test"]:
        return None
    evaluation = run.evaluation
    size = evaluation.batch_size or run.nominal_batch
    total = run.batch.iterations_within(run.consumed_samples) + train_iters
    rounds = max(0, total // evaluation.interval + 1 - evaluation.start // evaluation.interval)
    first = max(1, ceil_div(evaluation.start, evaluation.interval))
    rounds_run = max(0, total // evaluation.interval + 1 - first) + 1  # one more after training
    rounds_run -= sum(  # Megatron-LM leaves the evaluation after a skipped iteration out
        first * evaluation.interval <= end <= total and end % evaluation.interval == 0
        for end in (step + 1 for step in run.skipped_steps)
    )
    if evaluation.alone:
        rounds = rounds_run = 1
    if evaluation.full:
        return _full_validation(run, parts, rounds_run, size)
    valid, test = (_asked(run, parts[split], size) for split in SPLITS[1:])
    return Evaluations(
        rounds=rounds,
        valid_samples=rounds * valid,
        test_samples=test,
        batch_size=size,
        rounds_run=rounds_run,
        valid_samples_read=rounds_run * valid,
        test_samples_read=test,
        iterations=(evaluation.iterations,),
    )


def _asked(run: RunSettings, parts: Sequence[SplitPart], size: int) -> int:
    """Return the samples of one evaluation of a split; 0 where it has no data."""
    return run.evaluation.iterations * size if any(part.tokens for part in parts) else 0


def _check_full_validation(run: RunSettings, parts: Parts) -> None:
    """Check the rules of Megatron-LM for --full-validation and --multiple-validation-sets."""
    evaluation = run.evaluation
    if run.row.order != "megatron":
        raise of_megatron_alone("--full-validation", run.row.order)
    if not evaluation.full:
        raise InvalidArgument(
            "--multiple-validation-sets requires --full-validation, or Megatron-LM stops with a "
            "NotImplementedError; give both, or neither"
        )
    if any(part.source.weight is not None for part in parts["valid"]):
        raise InvalidArgument(
            "--full-validation with weights of the validation data: Megatron-LM stops with an "
            "AssertionError (size_is_none => weights_are_none); remove the weights, or give "
            "--valid-data-path without weights"
        )
    if not any(part.tokens > 0 for part in parts["valid"]):
        raise InvalidArgument(
            "--full-validation without validation data: Megatron-LM stops with a TypeError; give "
            "--valid-data-path, or a share of --split"
        )
    if run.unit is None:
        raise InvalidArgument(
            "--full-validation counts the samples of each rank: give --micro-batch-size and "
            "--world-size"
        )


def _full_validation(run: RunSettings, parts: Parts, rounds: int, size: int) -> Evaluations:
    """Return the evaluations of --full-validation, each of which reads all validation datasets."""
    evaluation, version = run.evaluation, run.version
    ranks = run.data_parallel_size
    assert version is not None, "order megatron has one"
    assert ranks is not None, "checked by _check_full_validation"
    micro = evaluation.micro_batch_size or 1
    held = [
        run.row.samples_in_epochs(1, part.tokens, run.sequence_length) for part in parts["valid"]
    ]
    own = evaluation.multiple and run.data.split is None
    sets = held if own else [sum(held)]
    by_rank = version.full_validation == "ranks"
    iterations = tuple(ceil_div(samples, ranks) if by_rank else samples for samples in sets)
    # each rank reads one sample of each micro batch, or all of it
    each = size // (micro * ranks) * ranks if by_rank else size
    return Evaluations(
        rounds=rounds,
        valid_samples=sum(held),
        test_samples=_asked(run, parts["test"], size),
        batch_size=size,
        rounds_run=rounds,
        valid_samples_read=rounds * sum(iterations) * each,
        # the test runs for as many iterations as the validation
        test_samples_read=sum(iterations) * size * any(part.tokens for part in parts["test"]),
        full=True,
        iterations=iterations,
    )
