"""From a target and a tail policy to iterations and the samples they consume."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megaindex.errors import InvalidArgument
from megaindex.kernels.sizes import ceil_div
from megaindex.plan.model import Tail
from megaindex.plan.serving import limit_of
from megaindex.plan.sizing import Sizing
from megaindex.recipe.run import Run

# Frameworks with a train_samples of their own: it, not whole batches, is asked of the datasets.
_TAKES_SAMPLES = ("megatron", "megatron-legacy")
_WHOLE_EPOCHS = ("epochs", "loader_epochs")


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a run will consume."""

    train_iters: int
    """Iterations from the samples consumed already."""
    samples_consumed: int
    """Real samples consumed in all: masked ones of a padded last batch do not count."""
    samples_requested: int
    """Samples asked of the blend."""
    samples_in_view: int
    """Samples of the epochs aimed at, or of the whole epochs that the target reaches into."""
    tokens_in_view: int
    """Tokens of those epochs."""


def aim_of(run: Run, sizing: Sizing) -> Aim:
    """Resolves the target of a run."""
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
    return Aim(
        train_iters=iterations,
        samples_consumed=consumed,
        samples_requested=requested,
        samples_in_view=in_view,
        tokens_in_view=tokens,
    )


def tails_of(run: Run, sizing: Sizing) -> tuple[Tail, ...]:
    """What each tail policy would cost; none for a target of iterations, which has no tail."""
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


def _ranks_masked(run: Run, iterations: int, masked: int) -> int:
    """Ranks without a sample in the last batch, whose samples are spread evenly."""
    if not masked or run.data_parallel_size is None:
        return 0
    last, end = (
        run.batch.samples_after(i, run.consumed_samples) for i in (iterations - 1, iterations)
    )
    return max(0, run.data_parallel_size - (end - last - masked))


def whole_epochs(sizing: Sizing, samples: int) -> int:
    """Least whole number of epochs, at least one, of all sources that hold ``samples`` samples."""
    if sizing.pass_samples is not None:
        return max(1, ceil_div(samples, sum(sizing.pass_samples)))
    size = len(sizing.tokens)
    epochs = max(1, samples * sizing.sequence_length // sum(sizing.tokens))
    while sum(sizing.samples_of([epochs] * size)) < samples:
        epochs += 1
    return epochs


def _epochs(run: Run) -> tuple[Fraction, ...]:
    return run.target.per_source or (run.target.value,) * len(run.data.train)


def _wanted(run: Run, sizing: Sizing) -> int:
    """Samples the target amounts to, from the very first on."""
    target = run.target
    if target.kind in _WHOLE_EPOCHS:
        return sum(sizing.samples_of(_epochs(run)))
    value = int(target.value)
    if target.kind == "iterations":
        return run.batch.samples_after(value, run.consumed_samples)
    return value if target.kind == "samples" else value // run.sequence_length


def _loader_iterations(run: Run, sizing: Sizing) -> int:
    """As GPT-NeoX's update_iterations: micro batches · train_epochs // accumulation, resumed ones
    included.

    Raises:
        InvalidArgument: the sources make not one micro batch.
    """
    limit, batch = limit_of(run, sizing.per_epoch()), run.batch.final
    assert limit is not None, "checked by Run"
    batches, accumulation = limit // run.loader_batch, batch // run.loader_batch
    if batches == 0:
        raise InvalidArgument(
            f"train_epochs: one epoch of the sources has no micro batch of {run.loader_batch} "
            "samples, and GPT-NeoX ends with a ZeroDivisionError; lower the batch size"
        )
    whole = batches * int(run.target.value) // accumulation
    return max(0, whole - run.consumed_samples // batch)


def _check_ramp(run: Run, consumed: int) -> None:
    """Megatron-LM rounds samples within a ramp up, so no setting of it ends there exactly."""
    ramp = run.batch.ramp
    is_megatron = run.row.order == "megatron"
    if is_megatron and ramp and run.target.kind != "samples" and consumed <= ramp[2]:
        raise InvalidArgument(
            f"the target of {consumed} samples ends before the ramp's {ramp[2]}, where Megatron-LM "
            "makes one iteration more; give --train-samples, or a longer target"
        )


def _requested(run: Run, wanted: int, iterations: int, consumed: int) -> int:
    """Samples asked of the blend: Megatron's train_samples, or train_iters nominal batches.

    Epochs and tokens are printed as train_samples.
    """
    if run.target.kind == "samples" and run.row.order in _TAKES_SAMPLES:
        return wanted if run.tail == "drop" else max(wanted, consumed)
    built_by_iterations = run.batch.stepped and run.target.kind == "iterations"
    if run.row.order != "megatron" or not built_by_iterations or run.unit is None:
        return consumed
    before = run.batch.iterations_within(run.consumed_samples)
    return (before + iterations) * run.nominal_batch


def _iterations(run: Run, wanted: int, tail: str) -> int:
    start = run.consumed_samples
    varies = run.row.order == "megatron" and (run.batch.stepped or run.batch.ramp is not None)
    if run.target.kind == "samples" and varies and tail == "drop":
        before = run.batch.iterations_within(start)
        return max(0, run.batch.iterations_for(wanted) - before)
    iterations = run.batch.iterations_within(wanted, start)
    short = run.batch.samples_after(iterations, start) < wanted
    return iterations + (short and tail != "drop")


def _consumed(run: Run, wanted: int, iterations: int, tail: str) -> int:
    served = run.batch.samples_after(iterations, run.consumed_samples)
    return min(served, max(wanted, run.consumed_samples)) if tail == "pad" else served
