"""Warnings of a plan with their remedies, and the failures of ``--check``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from operator import itemgetter
from typing import Any

from megaindex.arithmetic import FinalEpoch, final_epoch
from megaindex.index.frameworks import DEFAULT_SPLIT, framework_rules
from megaindex.index.order_settings import order_of
from megaindex.plan.model import (
    MANY_SOURCES,
    BufferEffect,
    Padding,
    Plan,
    RecipePlan,
    Row,
    SettingsPlan,
    epochs_text,
    listed,
    sizes_text,
)
from megaindex.recipe.layout import RecipeLayout
from megaindex.run.passes import loader_limit
from megaindex.run.sizing import Sizing, own_buffers, own_sources
from megaindex.run.target import ResolvedTarget
from megaindex.settings.run_settings import RunSettings
from megaindex.settings.settings import ADAPTERS, adapter_call
from megaindex.validation import count_of

_COMMON_BUFFER = 1.005
_SHOWN_WARNINGS = 3
_NOTICEABLE = 0.01
"""Share of a source's tokens, unseen or in no sample, at which the plan warns."""
_LEAST_SHOWN = 0.0005  # share that is printed as 0.1 %
_MOST_DEFERRED = 0.05
"""Share of an epoch that changes of the sequence length defer at which the plan warns."""


def check_failures(
    plan: Plan,
    sources: Sequence[tuple[str, int | None, int]],
    *,
    errors: Sequence[str] = (),
    loaders: Sequence[str] = (),
    too_short: str = "",
) -> tuple[str, ...]:
    """Return the reasons for which ``--check`` fails.

    Args:
        plan: the plan, without its failures.
        sources: name of each source, the epochs that are built of it, or read where it is
            restarted, and those that the target asks for; empty for a run that does not train.
        errors: errors with which the run ends.
        loaders: failures of the framework's loaders.
        too_short: reason for which the run has no iteration.
    """
    reasons = [*errors]
    over = [(epochs, name) for name, epochs, most in sources if epochs and epochs > most]
    if over and plan.num_epochs_built is not None:
        epochs, name = max(over, key=itemgetter(0))
        named = f" of {name}" if len({name for name, _, _ in sources}) > 1 else ""
        asks_once = all(most == 1 for _, _, most in sources)
        last = plan.max_train_iters_without_repeat if asks_once else 0
        hint = f"; up to {last} iterations repeat no sample" if last else ""
        reasons.append(f"{plan.train_iters} iterations build {epochs} epochs{named}{hint}")
    reasons += loaders
    reasons += [too_short] * bool(too_short)
    left, (_, batch) = plan.samples_left_over or 0, plan.batch_schedule[-1]
    batch = batch if isinstance(batch, int) else max(batch.values())
    if sources and left > batch:
        reasons.append(f"{left} samples stay unseen, more than one batch of {batch}")
    return tuple(reasons)


def failures_of_settings(run: RunSettings, plan: SettingsPlan) -> tuple[str, ...]:
    """Return the reasons for which ``--check`` fails for the plan of settings."""
    rows = [] if run.evaluation.alone else plan.rows("train")
    asked = run.target.per_source or (run.target.value,) * len(run.data.train)
    if run.target.kind != "epochs":
        asked = (Fraction(1),) * len(run.data.train)
    return check_failures(
        plan,
        [(row.name, row.epochs, math.ceil(asked[row.source - 1])) for row in rows],
        errors=[*_errors(run, plan)],
        loaders=[*_loader_failures(run, plan)],
        too_short=_no_iteration(run, plan) if plan.train_iters == 0 else "",
    )


def _loader_failures(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    passes = run.target.value if run.target.kind == "loader_epochs" else 1
    for loader in plan.loaders:
        if loader.split == "train" and 0 < loader.samples_counted * passes < loader.samples_read:
            yield f"the loader starts over after {loader.samples_counted} samples"
    if len(plan.phases) > 1:
        yield "each phase after the first reads the data of an earlier one again"
    if short := ", ".join(row.name for row in plan.rows("train") if _is_short(row)):
        yield f"the blend draws more samples than are built of {short}"
    for dry in plan.dry_loaders:
        if dry.samples_read:
            yield (
                f"{dry.split}: the run stops, since it reads {dry.samples_read} samples and its "
                f"loader has {dry.samples_there}"
            )


def buffer_effect(run: RunSettings, sizing: Sizing, target: ResolvedTarget) -> BufferEffect | None:
    """Return the effect of a buffer of 1.005, or None where the plan has it or no buffer has one.

    For megaindex's own orders the effect is computed by Megatron's rules.
    """
    if sizing.one_epoch_only or (sizing.buffer == _COMMON_BUFFER and sizing.row.is_framework):
        return None
    if sizing.asks_one_epoch or sizing.row.exact_num_epochs is not None:
        return None
    weights = sizing.weights or (None if sizing.single else tuple(sizing.per_epoch()))
    row = sizing.row if sizing.row.is_framework else framework_rules("megatron")
    other = replace(sizing, row=row, buffer=_COMMON_BUFFER, weights=weights)
    requested = other.requested(target.samples_requested)
    assert requested is not None
    epochs = other.epochs(requested)
    drawn = sizing.drawn(target.samples_consumed)
    longest, _ = other.longest([1] * len(epochs))
    built = other.built(requested, epochs)
    if (counted := loader_limit(run, sizing.per_epoch())) is not None:
        longest = min(longest, counted)
    return BufferEffect(
        variance_buffer=_COMMON_BUFFER,
        num_epochs_built=max(epochs),
        samples_built=sum(built),
        max_train_iters_without_repeat=run.batch.iterations_within(longest, run.consumed_samples),
        short=None
        if drawn is None
        else tuple(name for name, d, b in zip(sizing.names, drawn, built, strict=True) if d > b),
    )


def _is_short(row: Row) -> bool:
    return row.built is not None and (row.drawn_by_blend or 0) > row.built


def warnings(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> tuple[str, ...]:
    """Return the warnings of a plan, most harmful first."""
    texts = (
        *_errors(run, plan),
        *_adapter_needed(run),
        *_blend(run, sizing, plan),
        *_repeats(run, sizing, plan),
        *_mixed_final_epoch(sizing, plan),
        *_loaders_start_over(run, plan),
        *_dry_loaders(run, sizing, plan),
        *_evaluations(run, plan),
        *_splits(run, plan),
        *_setup(run, sizing, plan),
        *_python_sum(run),
        *run.notes,
    )
    return tuple(dict.fromkeys(texts))


def caution(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> str:
    """Return the warning that opens the printed plan, or an empty string.

    It is set where the run ends with an error, and where the buffer builds more epochs than the
    target asks for.
    """
    for text in _errors(run, plan):
        return text
    train = plan.rows("train")
    unsized = sizing.exact or sizing.pass_samples_vary or plan.phases or run.evaluation.alone
    if run.target.kind != "epochs" or unsized or any(row.drawn is None for row in train):
        return ""
    needed = sizing.epochs([row.drawn or 0 for row in train])
    more = [row for row, least in zip(train, needed, strict=True) if (row.epochs or 0) > least]
    if not more:
        return ""
    last, exact = plan.max_train_iters_without_repeat, plan.max_train_iters_with_exact_buffer
    numbers = [f"{last} iterations to repeat no sample"] * bool(last)
    if exact is not None:
        numbers.append(f"{exact} with {adapter_call(run.row.order, {'variance_buffer': 'exact'})}")
    remedy = f": train {', or '.join(numbers)}" if numbers else ""
    return (
        f"variance_buffer {sizing.buffer} builds {epochs_text(more[0].epochs)} of {more[0].name}, "
        f"so the run differs from the target of {plan.target}{remedy}"
    )


def _install(run: RunSettings, **settings: Any) -> str:
    return adapter_call(run.row.order, settings) if run.row.order in ADAPTERS else ""


def adapter_settings(run: RunSettings) -> dict[str, Any]:
    """Return the arguments of the adapter's ``install`` without which the run differs."""
    if run.row.order not in ADAPTERS:
        return {}
    needed: dict[str, Any] = {}
    buffer, own = run.variance_buffer, own_buffers(run)
    if run.target.kind == "loader_epochs":
        buffer = None  # epochs are requested, not samples
    if buffer == "exact":
        # a single source without a buffer builds the same either way
        if any(count > 1 or value != 1 for count, value in own):
            needed["variance_buffer"] = "exact"
    elif (
        buffer is not None
        and run.row.order == "neox"
        and own_sources(run)
        and not applies_buffer(run)
    ):
        needed["variance_buffer"] = buffer
    elif buffer not in (None, 1.0) and run.row.order == "megatron" and (1, 1.0) in own:
        needed["variance_buffer"] = buffer  # of a path alone, to which Megatron applies no surplus
    return needed | changed_final_epoch(run) | ({"exact": True} if run.exact else {})


def changed_final_epoch(run: RunSettings) -> dict[str, Any]:
    """Return the settings of the final epoch that differ from the framework's own."""
    changed = order_of(run.order).changed_settings
    names = ["separate_final_epoch", "final_epoch_threshold"]
    if run.row.separate_final_epoch != "auto":  # the threshold has no effect, and is refused
        names.pop()
    return {name: changed[name] for name in names if name in changed}


def applies_buffer(run: RunSettings) -> bool:
    """Return True if the framework applies the buffer by itself."""
    return run.variance_buffer is None or all(
        value == run.variance_buffer for _, value in own_buffers(run)
    )


def _adapter_needed(run: RunSettings) -> Iterator[str]:
    if wanted := adapter_settings(run):
        named = " and ".join(f"{name} {value}" for name, value in wanted.items())
        yield (
            f"{run.row.framework} does not apply {named} by itself: call "
            f"{adapter_call(run.row.order, wanted)} in the run"
        )


def _python_sum(run: RunSettings) -> Iterator[str]:
    """Yield the version of Python that decides the weights of a blend or the bounds of a split."""
    if run.depends_on_python:
        versions = {"plain": "3.11 or earlier", "compensated": "3.12 or later"}
        own = run.row.python_sum
        (other,) = versions.keys() - {own}
        yield (
            f"{run.row.framework} adds weights and splits by Python's sum(), which rounds those of "
            f"this run otherwise from Python 3.12 on: this is the run under Python {versions[own]};"
            f" give --python-sum {other} if it trains under Python {versions[other]}"
        )


def _errors(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    """Yield the errors with which the run ends."""
    yield from _loader_errors(run, plan)
    yield from _blend_errors(run, plan)
    yield from _batch_errors(run, plan)


def _loader_errors(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    """Yield the errors with which GPT-NeoX ends: no iteration, no batch, an empty source."""
    nothing = run.target.kind == "iterations" and not run.target.value and not run.consumed_samples
    if nothing and run.row.order == "neox":
        yield "train_iters 0: GPT-NeoX ends with a ValueError before step 1: give at least 1"
    late = "RecursionError"  # when a batch is read
    yield from (_row_error(row) for row in plan.datasets if row.error and late not in row.error)
    yield from _empty_blends(run, plan)
    yield from _short_loaders(run, plan, ("train", "valid"))
    yield from (_row_error(row) for row in plan.datasets if late in row.error)
    yield from _short_loaders(run, plan, ("test",))


def _row_error(row: Row) -> str:
    remedy = "megaindex.adapters.neox.install() in the run avoids it"
    return f"{row.split}, {row.name}: GPT-NeoX ends with {row.error}; {remedy}"


def _empty_blends(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    for loader in plan.loaders:
        if empty := _stopping_sources(run, plan, loader.split):
            error = "an InvalidArgument" if run.exact else "a ValueError"
            yield (
                f"{loader.split}: GPT-NeoX ends with {error} before step 1: {empty[0].name} "
                "has no sample: remove it, or give it more documents"
            )


def _stopping_sources(run: RunSettings, plan: SettingsPlan, split: str) -> list[Row]:
    """Return the sources without a sample, if a run stops at them where it begins."""
    return _without_samples(plan, split) if run.exact or run.data.split is None else []


def _without_samples(plan: SettingsPlan, split: str) -> list[Row]:
    return [row for row in plan.rows(split) if row.built == 0 and row.tokens_per_epoch]


def _short_loaders(run: RunSettings, plan: SettingsPlan, splits: Sequence[str]) -> Iterator[str]:
    for loader in plan.loaders:
        empty = _without_samples(plan, loader.split)
        if loader.split not in splits or _stopping_sources(run, plan, loader.split):
            continue
        if loader.samples_counted == 0 and (loader.split != "test" or loader.samples_read):
            when = "where the test begins" if loader.split == "test" else "before step 1"
            error = "a ValueError" if empty else "a ZeroDivisionError"
            if loader.split == "test" and not empty:
                error = "a StopIteration"
            elif run.exact:
                error = "an InvalidArgument"
            rows = plan.rows(loader.split)
            held = sum(row.built or 0 for row in rows) - len(rows) * run.row.uncounted_samples
            short = "" if run.exact else " (one sample fewer for each dataset)"
            yield (
                f"{loader.split}: GPT-NeoX ends with {error} {when}: its loader counts "
                f"{max(0, held)} samples{short}, less than one micro batch of all ranks, "
                f"{run.loader_batch}: {_more_data(run, loader.split)}"
            )


def _blend_errors(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    for empty in _stopping_blends(run, plan):
        yield (
            f"{empty[0].split}: no sample in {_names(empty)}, at which Megatron's blend stops with "
            f"an AssertionError: {_widen(run)}"
        )


def _batch_errors(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    """Yield the first step at which a schedule of Megatron-LM has a smaller batch than before."""
    if run.row.order != "megatron" or not run.batch.stepped or run.evaluation.alone:
        return
    made = 0
    runs = run.batch.runs(plan.consumed_samples, plan.samples_consumed)
    for now, then in pairwise((each.size, each.steps or 0) for each in runs):
        made += now[1]
        if isinstance(now[0], int) and isinstance(then[0], int) and then[0] < now[0]:
            yield (
                f"--step-batch-size-schedule falls from {now[0]} to {then[0]}, at which "
                f"{plan.framework} stops after {made} iterations with an AssertionError (number of "
                "microbatches should not decrease); give batch sizes that rise"
            )
            return


def _stopping_blends(run: RunSettings, plan: SettingsPlan) -> Iterator[list[Row]]:
    """Yield the sources without a sample of Megatron's blends by size: their weight would be 0."""
    if run.row.order != "megatron":
        return
    for rows in _blends(plan):
        split, phase = rows[0].split, rows[0].phase
        sets = run.evaluation.multiple and run.data.apart and split == "valid"
        empty = [row for row in rows if row.samples_per_epoch == 0]
        if empty and len(rows) > 1 and rows[0].weight is None and phase in (None, 1) and not sets:
            yield empty


def _widen(run: RunSettings) -> str:
    return "widen --split" if run.data.split else "remove the source, or give it more documents"


def _more_data(run: RunSettings, split: str) -> str:
    if split == "train":
        return "train longer, or lower the batch size"
    widen = "widen --split" if run.data.split else f"give more {split} data"
    return f"{widen}, or raise --eval-iters"


def _blend(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> Iterator[str]:
    """Yield the blends that draw more samples of a source than are built."""
    if not sizing.row.is_framework:
        return
    for rows in _blends(plan):
        if len(rows) > 1 and all(row.built is not None for row in rows):
            unweighted = rows[0].weight is None and sizing.row.order == "megatron"
            if sizing.asks_one_epoch:
                yield from _uneven_epochs(run, rows)
            elif unweighted and sizing.buffer != "exact":
                if run.dataloader == "single":
                    yield from _unweighted_blend(plan, rows)
            else:
                yield from _short_blend(sizing, rows)


def _blends(plan: SettingsPlan) -> list[list[Row]]:
    """Return the rows of each blend: those of one split, or of one phase of it."""
    blends: dict[tuple[str, int | None], list[Row]] = {}
    for row in plan.datasets:
        blends.setdefault((row.split, row.phase), []).append(row)
    return list(blends.values())


def _unweighted_blend(plan: SettingsPlan, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a blend without weights that holds too little: Megatron builds one epoch of it."""
    split, phase = rows[0].split, rows[0].phase
    held = sum(row.built or 0 for row in rows)
    wanted = plan.samples_consumed if phase is None else plan.phases[phase - 1].samples
    if split != "train" and plan.evaluation is not None:
        evaluation = plan.evaluation
        wanted = evaluation.valid_samples if split == "valid" else evaluation.test_samples
    if wanted > held:
        last = f" after {plan.max_train_iters_without_repeat} iterations" * (split == "train")
        yield (
            f"{split}: Megatron builds one epoch of sources without weights, {held} samples, and "
            f"the run reads {wanted}: its loader runs out of samples{last}; give weights, or read "
            "fewer samples"
        )


def _uneven_epochs(run: RunSettings, rows: Sequence[Row]) -> Iterator[str]:
    short = [row for row in rows if (row.drawn or 0) > (row.distinct or 0)]
    if not short or (rows[0].split == "train" and int(run.target.value) > 1):
        return
    worst = max(short, key=lambda row: (row.drawn or 0) / (row.distinct or 1))
    yield (
        f"{worst.split}: train_epochs draws equally from all paths, whatever their size: "
        f"{_some_of(short, rows)} repeated, such as {worst.name} ({worst.drawn} drawn, "
        f"{worst.samples_per_epoch} in its epoch); use train_iters, with weights by size"
    )


def _short_blend(sizing: Sizing, rows: Sequence[Row]) -> Iterator[str]:
    short = [row for row in rows if _is_short(row)]
    if not short:
        return
    worst = max(short, key=lambda row: (row.drawn_by_blend or 0) - (row.built or 0))
    # in thousandths, the buffer that requests of every source what is drawn of it now
    assert isinstance(sizing.buffer, float)
    shares = [(row.requested or 0) / sizing.buffer for row in rows]
    ratio = max((row.drawn_by_blend or 0) / max(1, n) for row, n in zip(rows, shares, strict=True))
    enough = int(ratio * 1000) / 1000 + 0.002
    outcome = {
        "megatron": "Megatron stops with an IndexError",
        "neox": "NeoX silently serves other samples instead",
    }.get(sizing.row.order, "the framework reads beyond the index")
    yield (
        f"variance_buffer {sizing.buffer} is too small: {worst.split} draws more samples than are "
        f"built from {len(short)} of {len(rows)} sources, such as {worst.name} "
        f"({worst.drawn_by_blend} of {worst.built}); {outcome}: pass --variance-buffer exact, or "
        f"{enough:.3f} or more, and plan again, since a larger one may also draw more"
    )


def _repeats(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> Iterator[str]:
    """Yield epochs that the draws do not need, or that are shuffled so that tokens stay unseen."""
    rows = [row for row in plan.rows("train") if (row.epochs or 0) > 1 and row.drawn is not None]
    if not sizing.row.is_framework or not rows or run.evaluation.alone:
        return
    worst = max(rows, key=lambda row: (_unseen(row), row.epochs))
    blend = next(rows for rows in _blends(plan) if worst in rows)
    needed = sizing.epochs([row.drawn or 0 for row in blend])[blend.index(worst)]
    surplus = 0 if sizing.pass_samples_vary else (worst.epochs or 0) - needed
    apart = _final_epoch(sizing, worst, sizing.row.separate_final_epoch).apart
    if _unseen(worst) < _NOTICEABLE and (surplus == 0 or apart):
        return
    cause = f" ({surplus} more than drawn, for variance_buffer {sizing.buffer})" if surplus else ""
    mixed = "shuffles the last one separately" if apart else "shuffles them together"
    if (unseen := _unseen(worst)) >= _NOTICEABLE:
        twice = 1 - sum(worst.coverage.tokens[:2])
        mixed += f": {unseen:.1%} of its tokens stay unseen, {twice:.1%} come twice or more"
    yield (
        f"{sizing.row.framework} builds {worst.epochs} epochs of {worst.name}{cause} and {mixed}; "
        f"{_remedy(run, sizing, plan, needed, surplus)}"
    )


def _remedy(run: RunSettings, sizing: Sizing, plan: SettingsPlan, needed: int, surplus: int) -> str:
    last = plan.max_train_iters_without_repeat
    if surplus and not sizing.exact and (line := _install(run, variance_buffer="exact")):
        few = f"train at most {last} iterations, which repeat no sample, or " * (last > 0)
        return f"{few}plan with --variance-buffer exact and call {line} in the run"
    if last == 0 or (needed > 1 and not sizing.single):
        return "change the weights, or use --order epoch, which completes each epoch in turn"
    return f"train at most {last} iterations, which repeat no sample"


def _mixed_final_epoch(sizing: Sizing, plan: SettingsPlan) -> Iterator[str]:
    """Yield the cost of a final epoch that is mixed with the others against the framework's rule.

    Shuffled apart, the epochs before it are complete before it begins.
    """
    own = framework_rules(sizing.row.order).separate_final_epoch
    if sizing.row.separate_final_epoch != "never" or own == "never":
        return
    rows = [row for row in plan.rows("train") if (row.epochs or 0) > 1]
    lost = [_served_less(sizing, row) for row in rows]
    if not rows or max(lost) < _LEAST_SHOWN:
        return
    most, row = max(zip(lost, rows, strict=True), key=lambda pair: pair[0])
    complete = (row.epochs or 1) - 1
    less = "never come" if complete == 1 else f"come fewer than {complete} times"
    policy = own if _final_epoch(sizing, row, own).apart else "always"
    yield (
        f"separate_final_epoch never shuffles the last of {row.epochs} epochs of {row.name} with "
        f"the others: {most:.1%} of its tokens {less}; under {policy}, the first "
        f"{'is' if complete == 1 else f'{complete} are'} complete before the last begins"
    )


def _served_less(sizing: Sizing, row: Row) -> float:
    """Return the share of tokens served fewer times than there are epochs before the final one.

    It is 0 where the run does not read as many samples as these epochs hold, or without coverage.
    """
    before = _final_epoch(sizing, row, "always").samples_before
    return sum(row.coverage.tokens[: (row.epochs or 1) - 1]) if (row.drawn or 0) >= before else 0.0


def _final_epoch(sizing: Sizing, row: Row, policy: str) -> FinalEpoch:
    return final_epoch(
        row.requested or 0,
        row.epochs or 1,
        row.tokens_per_epoch,
        sizing.sequence_length,
        policy=policy,
        threshold=sizing.row.final_epoch_threshold,
    )


def _unseen(row: Row) -> float:
    return row.coverage.tokens[0] if row.coverage.tokens else 0.0


def _loaders_start_over(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    """Yield NeoX's loaders that start over: its datasets report one sample less than they hold."""
    if run.target.kind == "loader_epochs" and run.target.value > 1 and not run.exact:
        yield (
            f"train_epochs {run.target.value}: NeoX builds one epoch and replays it in the same "
            "order; use train_iters for epochs with orders of their own"
        )
    for loader in plan.loaders:
        counted, read = loader.samples_counted, loader.samples_read
        passes = run.target.value if run.target.kind == "loader_epochs" else 1
        if not 0 < counted < read or (loader.split == "train" and read <= counted * passes):
            continue
        rows = plan.rows(loader.split)
        held = sum(row.built or 0 for row in rows)
        remedy = "lower --eval-iters, or give more data"
        if loader.split == "train":
            last = plan.max_train_iters_without_repeat
            remedy = f"train {last} iterations" if last else "give more data"
        short = (
            f"NeoX counts {held - len(rows)} of {held} samples (each dataset's length is one "
            "short), so its"
        )
        yield (
            f"{loader.split}: {short if run.row.uncounted_samples else 'its'} loader starts over "
            f"after {counted} and serves {read - counted} of them again: {remedy}"
        )
        if run.micro_batch_size is None or run.data_parallel_size is None:
            yield (
                f"{loader.split}: where NeoX's loader starts over depends on the micro batch, "
                f"taken as {run.loader_batch}: give --micro-batch-size and --data-parallel-size"
            )


def _dry_loaders(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> Iterator[str]:
    """Yield Megatron-LM's loaders that run out of samples, except those of `_unweighted_blend`."""
    for dry in plan.dry_loaders:
        rows = plan.rows(dry.split)
        cyclic = run.dataloader == "cyclic"
        unweighted = len(rows) > 1 and rows[0].weight is None and not cyclic
        unweighted &= dry.samples_read > sum(row.built or 0 for row in rows)
        if dry.samples_read and unweighted and sizing.buffer != "exact":
            continue
        if dry.samples_there == dry.samples_read == 0:
            yield (
                f"{dry.split}: --eval-iters 0 makes a blend of no samples, at which "
                f"{plan.framework} stops with an AssertionError; raise it, or leave the part empty"
            )
            continue
        if cyclic:
            yield (
                f"{dry.split}: less than one micro batch of all ranks, at which the cyclic loader "
                f"of {plan.framework} stops with a ZeroDivisionError: {_widen(run)}"
            )
            continue
        when = "" if dry.train_iters is None else f" after {dry.train_iters} iterations"
        yield (
            f"{dry.split}: {plan.framework} builds {dry.samples_there} samples in whole micro "
            f"batches, and the run reads {dry.samples_read}: its loader runs out of samples{when}; "
            f"{_REMEDY[dry.split]}"
        )


_REMEDY = {
    "train": "give --train-samples, for which all samples of a batch schedule are built",
    "valid": "lower --eval-iters, or change --start-eval-at-iter",
    "test": "lower --eval-iters, or leave the test part empty",
}


def _evaluations(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    """Yield the evaluation flags of Megatron-LM with unexpected effects."""
    evaluation = plan.evaluation
    if run.evaluation.alone:
        yield "--skip-train: the training data is built and not read, and one evaluation runs"
    if run.dataloader == "cyclic":
        yield (
            "--dataloader-type cyclic permutes the built samples anew in every pass: the samples "
            "that a part of a pass reads, and coverage, are not planned"
        )
    if lacks_validation(run, plan) and (run.data.split is not None or run.data.apart):
        yield (
            f"no validation data: {plan.framework} stops with an error at its first evaluation, "
            "which comes after the last iteration at the latest; pass --eval-iters 0, or give some"
        )
    if evaluation is None or not evaluation.full:
        return
    read = evaluation.valid_samples_read // max(1, evaluation.rounds_run)
    if read >= 2 * evaluation.valid_samples:
        yield (
            f"--full-validation: each evaluation reads {read} samples, the "
            f"{evaluation.valid_samples} of its data several times, since each iteration reads all "
            f"micro batches of --eval-global-batch-size {evaluation.batch_size}"
        )
    if not run.evaluation.multiple:
        yield (
            "--full-validation without --multiple-validation-sets: Megatron-LM stops with a "
            "TypeError at its first evaluation ('int' object is not subscriptable); give both"
        )
    elif any(row.split == "test" and row.tokens_per_epoch for row in plan.datasets):
        yield (
            "--multiple-validation-sets with test data: Megatron-LM stops with a TypeError at the "
            "test; leave the test part empty"
        )


def lacks_validation(run: RunSettings, plan: SettingsPlan) -> bool:
    """Return True if Megatron-LM evaluates, and stops since it has no validation data."""
    needed = run.version is not None and run.version.needs_validation
    return needed and run.evaluation.iterations > 0 and not plan.rows("valid")


def _splits(run: RunSettings, plan: SettingsPlan) -> Iterator[str]:
    data = run.data
    has_default = run.row.is_framework and data.train[0].path
    if has_default and data.split is None and not data.apart:
        yield (
            f"--split is missing: all documents are training data, while the frameworks default to "
            f"{DEFAULT_SPLIT}; pass --split {DEFAULT_SPLIT} to plan as they do"
        )
    if run.packing is not None and data.split is not None and len(plan.datasets) > 1:
        yield (
            f"pack_impl {run.packing.pack_impl} with split: GPT-NeoX reads validation and test "
            "from the first document on, which is training data; give train_data_paths, "
            "valid_data_paths and test_data_paths, or call "
            "megaindex.adapters.neox.install(exact=True) in the run"
        )
    stopping = {empty[0].split for empty in _stopping_blends(run, plan)}
    for split in ("valid", "test"):
        rows = plan.rows(split)
        yield from _evaluation_rows(run, [row for row in rows if row.drawn])
        if split not in stopping:
            yield from _empty_sources(run, [row for row in rows if row.samples_per_epoch == 0])


def _evaluation_rows(run: RunSettings, rows: Sequence[Row]) -> Iterator[str]:
    repeated = [row for row in rows if row.samples_per_epoch and (row.epochs or 0) > 1]
    if repeated:
        worst = max(repeated, key=lambda row: row.epochs or 0)
        widen = "widen --split" if run.data.split else f"give more {worst.split} data"
        yield (
            f"{worst.split}: {_some_of(repeated, rows)} repeated, such as {worst.name} "
            f"({worst.drawn} drawn, {worst.samples_per_epoch} in an epoch); lower --eval-iters or "
            f"{widen} to evaluate on each sample once"
        )


def _some_of(some: Sequence[Row], rows: Sequence[Row]) -> str:
    return f"{len(some)} of {count_of(len(rows), 'source')} {'is' if len(some) == 1 else 'are'}"


def _empty_sources(run: RunSettings, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the sources of validation and test with less than one sample."""
    none = [row for row in rows if row.tokens_per_epoch == 0]
    few = [row for row in rows if row.tokens_per_epoch > 0]
    if none:
        effect = "and no evaluation of it"
        if run.row.order == "megatron":
            effect = "for which Megatron counts epochs without end"
        yield f"{none[0].split}: no token in {_names(none)}, {effect}: {_widen(run)}"
    if few:
        yield (
            f"{few[0].split}: less than one sample of {run.sequence_length + 1} tokens in "
            f"{_names(few)}: {_widen(run)}"
        )


def _names(rows: Sequence[Row]) -> str:
    names = ", ".join(row.name for row in rows[:3])
    return names if len(rows) <= 3 else f"{names} and {len(rows) - 3} more"


def _no_iteration(run: RunSettings, plan: SettingsPlan) -> str:
    if run.target.kind == "iterations":
        before = f" after the {run.consumed_samples} samples before" if run.consumed_samples else ""
        return f"no iteration: the target is {plan.target}{before}; raise it"
    held = plan.samples_left_over
    if run.target.kind in ("samples", "tokens"):
        held = int(run.target.value) // (run.sequence_length if run.target.kind == "tokens" else 1)
    return (
        f"no full iteration: the target holds {held} samples, one batch {plan.global_batch_size}; "
        f"raise the target{' or use --tail pad' if held else ''}"
    )


def _setup(run: RunSettings, sizing: Sizing, plan: SettingsPlan) -> Iterator[str]:
    if plan.train_iters == 0:
        yield _no_iteration(run, plan)
    if not sizing.row.is_framework and run.variance_buffer not in (None, "exact"):
        yield (
            f"--variance-buffer has no effect: order {run.row.order} builds exactly what is drawn"
        )
    if sizing.asks_one_epoch and run.variance_buffer is not None:
        yield "--variance-buffer has no effect: train_epochs requests epochs, not samples"
    elif sizing.one_epoch_only and run.variance_buffer is not None:
        yield "Megatron ignores a buffer for sources without weights; remove --variance-buffer"
    if plan.phases:
        yield (
            "each phase builds its datasets anew with the same seed: a later phase repeats the "
            "data of an earlier one unless its --data-path changes; the stages of a recipe do "
            "not, see --print-config recipe"
        )
    if run.dataloader == "single" and any(row.drawn is None for row in plan.datasets):
        limits = "" if plan.max_train_iters_exact else ", and max_train_iters safe lower bounds"
        yield (
            f"the draws of this long blend are not counted: they are bounds{limits}; pass "
            "--blend-counts exact to count them, about a minute for 10^9 samples"
        )


def recipe_warnings(layout: RecipeLayout, plan: RecipePlan) -> Iterator[str]:
    recipe = layout.recipe
    if plan.stopped_by:
        yield (
            f"the run stops on all ranks after step {plan.train_iters - 1}: {plan.stopped_by} is "
            f"exhausted; {recipe.exhaustion_remedy}"
        )
    sizes = list(zip(recipe.sources, layout.sizes, strict=True))
    if recipe.evaluation is not None and layout.validation is not None:
        sizes.append((recipe.evaluation.source, layout.validation))
    cut = [each for each in sizes if each[1].cut_tokens >= _NOTICEABLE * each[1].tokens]
    cut.sort(key=lambda each: -each[1].cut_tokens / max(1, each[1].tokens))
    yield from _of_sources(
        f"{source.name}: {recipe.called(f'long_documents {source.long_documents}')} leaves "
        f"{size.cut_tokens:,} of {size.tokens:,} tokens ({size.cut_tokens / size.tokens:.1%}) in "
        f"no sample; raise {recipe.called('sequence_length')}, or use "
        f"{recipe.called('long_documents split')}"
        for source, size in cut
    )
    ended = ((total, total.blocks) for total in plan.sources if total.blocks is not None)
    yield from _of_sources(
        f"{total.source}: {facts.deferred:,} of {total.tokens_per_epoch:,} tokens "
        f"({facts.deferred / total.tokens_per_epoch:.1%}) are left of the blocks in which the "
        f"sequence length changes; lower its block_tokens, {facts.block_tokens:,}, so that later "
        "stages read them"
        for total, facts in ended
        if facts.deferred >= _MOST_DEFERRED * total.tokens_per_epoch
    )
    yield from _short_stages(layout)
    for name, padding in (
        ("the last batch", plan.padding),
        ("the last batch of evaluation", plan.evaluation_padding),
    ):
        if padding.micro_batches:
            yield (
                f"{name} has {_padding_text(padding, recipe.data_parallel_size)}, where a mean "
                "over unmasked tokens is 0 / 0: normalise by the global count of unmasked tokens"
            )
    if plan.past is not None and any(row.assumed for row in plan.past.sources):
        yield (
            "past: which samples were read is assumed, because only their number is given; those "
            "expected to repeat are a mean over orders. A list of the documents read, as read: "
            "{web: {documents: FILE}}, makes it certain"
        )
    if plan.skip is not None and plan.skip.changes_counts:
        yield "stages show the samples of the order, with those skipped; sources what is served"
        needed = zip(plan.sources, layout.samples_needed(), strict=True)
        unsure = [row.source for row, end in needed if row.unseen and end > row.samples_per_epoch]
        if unsure:
            yield (
                f"never drawn counts the first epoch of {listed(unsure)}, of which no later "
                "epoch is served whole; `megaindex audit` counts the tokens"
            )
    unused = [source.source for source in plan.sources if source.drawn == 0]
    if unused:
        yield f"never drawn: {listed(unused)}"


def _of_sources(warnings: Iterable[str]) -> Iterator[str]:
    """Yield one warning a source; of many sources the first, and how many more there are."""
    found = list(warnings)
    shown = found if len(found) <= MANY_SOURCES else found[:_SHOWN_WARNINGS]
    yield from shown
    if left := len(found) - len(shown):
        yield f"so it is with {left:,} more sources"


def _padding_text(padding: Padding, parallel: int | None) -> str:
    if padding.ranks:
        return f"padding only on {padding.ranks} of {parallel} ranks"
    return f"{padding.micro_batches} micro batches of padding only"


def _short_stages(layout: RecipeLayout) -> Iterator[str]:
    """Yield the stages that whole batches end before their full length."""
    recipe, position = layout.recipe, layout.recipe.first_sample
    stages = {stage.name: {s.source for s in stage.streams} for stage in recipe.stages}
    for end in layout.ends[: -1 if layout.stopped_by else None]:
        begin, position = position, position + end.samples
        sources = stages.pop(end.stage)
        missing = end.samples_wanted - end.samples
        if missing <= 0 or end.length.startswith("tokens"):
            continue
        sizes = layout.batch.sizes(begin, position)
        later = [name for name, others in stages.items() if sources & others]
        outcome = "no later stage draws them"
        if later:
            outcome = f"stage {later[0]} goes on reading its sources from there"
        elif not stages:
            rows = layout.batch.samples_after(1, position) - position
            outcome = f"tail pad serves them too and masks {rows - missing} rows of their batch"
        yield (
            f"stage {end.stage}: whole batches of {sizes_text(sizes)} end {missing} samples "
            "short of its "
            f"{end.samples_wanted:,} ({end.length}); {outcome}"
        )
