"""The audit of a run: counts, jumps, the object of ``--json``, findings and suggestions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.audit.balance import BalanceModel, model_balance
from megaindex.audit.exposure import Exposure, Histograms, count_exposure
from megaindex.index.balance import CostModel
from megaindex.index.draws import Progress
from megaindex.index.frameworks import FRAMEWORK_RULES
from megaindex.plan.model import SkipEffect, effect_of, json_value
from megaindex.run.run import Run
from megaindex.validation import check_kind, count_of, percent

_LEAST_RISE = 0.25
"""Least rise of the mean earlier exposures that counts as a jump."""


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A step from which on tokens have been seen clearly more often than just before."""

    step: int
    before: float
    """Mean earlier exposures of a token in a small window of steps before it."""
    after: float
    """The same in the window from it on."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Audit:
    """Result of `audit`: a run, its exact counts and the jumps of its exposure.

    It prints as `megaindex audit` prints it.

    Attributes:
        run: samples and steps of the run.
        exposure: counts of the tokens by times seen, over the steps.
        jumps: steps at which exposure jumps; none of an evaluation, which trains nothing.
        balance: modelled work of the rows, None if no cost model was given.
        skip: effect of skipped steps and documents, None without. A masked document counts as seen:
            it is input, and carries no loss.
    """

    run: Run
    exposure: Exposure
    jumps: tuple[Jump, ...]
    balance: BalanceModel | None = None
    skip: SkipEffect | None = None

    def __repr__(self) -> str:
        """Return the summary that the command prints, of at most 100 columns."""
        view = import_module("megaindex.audit.render").audit_view(self)  # which imports this module
        return str(import_module("megaindex.console").text_of(view))

    @property
    def tokens(self) -> int:
        """Tokens of the corpus, each counted once."""
        return int(self.exposure.total.tokens.sum())

    def moments(self) -> list[tuple[str, Histograms]]:
        """Return named histograms: so far, if there are past steps, and after all steps."""
        has_past = self.run.past_steps > self.run.steps_elsewhere
        past = [("so far", self.exposure.past)] if has_past else []
        return [*past, ("after all steps", self.exposure.total)]

    @property
    def epoch_steps(self) -> list[int]:
        """Steps in which the tokens served reach once, twice, … the tokens of the corpus."""
        served = np.cumsum(self.exposure.step_tokens)
        whole = int(served[-1]) // self.tokens
        return np.searchsorted(served, np.arange(1, whole + 1) * self.tokens).tolist()  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        run, exposure = self.run, self.exposure
        repeats = np.flatnonzero(exposure.distances)
        balance = {} if self.balance is None else {"balance": self.balance.to_json()}
        skip = {} if self.skip is None else {"skip": json_value(self.skip)}
        return (
            balance
            | skip
            | {
                "order": run.order,
                "run_settings": dict(run.settings),
                "sequence_length": run.index.sequence_length,
                "steps": run.num_steps,
                "past_steps": run.past_steps,
                "consumed_samples": int(run.step_bounds[run.past_steps]),
                "samples": run.samples_served,
                "rounds": run.rounds,
                "num_epochs_built": run.index.num_epochs,
                "tokens_per_epoch": self.tokens,
                "method": "exact, token by token",
                "past": _histograms(exposure.past),
                "total": _histograms(exposure.total),
                "sources": [
                    {
                        "path": source.name,
                        "tokens": int(total.sum()),
                        "cut_tokens": source.cut_tokens,
                        "tokens_by_times_seen": {"past": past.tolist(), "total": total.tolist()},
                        "first_repeated_step": None if repeat < 0 else repeat,
                    }
                    for source, past, total, repeat in zip(
                        run.sources,
                        exposure.past.tokens,
                        exposure.total.tokens,
                        exposure.first_repeats.tolist(),
                        strict=True,
                    )
                ],
                "exposure_curve": {
                    "first_step": exposure.stretches[:-1].tolist(),
                    "mean_earlier_exposures": exposure.curve().tolist(),
                    "tokens_by_earlier_exposures": exposure.shares.tolist(),
                    "tokens_by_source": exposure.composition.tolist(),
                    "earlier_exposures_by_source": exposure.source_earlier.tolist(),
                },
                "jumps": [vars(jump) for jump in self.jumps],
                "epoch_steps": self.epoch_steps,
                "repeat_distances": {
                    "steps": repeats.tolist(),
                    "tokens": exposure.distances[repeats].tolist(),
                },
            }
        )


def audit(
    run: Run,
    *,
    points: int = 400,
    progress: Progress | None = None,
    cost_model: CostModel | None = None,
) -> Audit:
    """Return exact counts of the times that a run serves each token, and of repeats over steps.

    Args:
        run: the run, from `run_of_settings`, `run_of_recipe` or `run_of_index`.
        points: greatest number of points of the exposure curve.
        progress: called with (done, total) while samples are located.
        cost_model: model of the work of a row; with it, the audit shows the time that ranks wait
            for each other in order and balanced. See docs/balance.md.

    Raises:
        InvalidArgument: a cost model is given, and the run has no micro batch size or
            data-parallel size.

    Memory: about 40 bytes for each token run of a sample.
    """
    remedy = (
        "`megaindex.audit.run_of_index` makes one of an index, and "
        "`megaindex.open_run(…).audit()` opens one"
    )
    check_kind("run", run, Run, "a run", remedy)
    balance = None if cost_model is None else model_balance(run, cost_model)
    exposure = count_exposure(run, points=points, progress=progress)
    skip = None
    if run.skips is not None:
        names = [source.name for source in run.sources]
        effect = effect_of(run.skips, run.step_bounds, masked_rows=run.masked_rows)
        skip = effect.counted(run.index, names)
    return Audit(
        run=run,
        exposure=exposure,
        jumps=() if run.is_evaluation else tuple(_jumps(exposure)),
        balance=balance,
        skip=skip,
    )


def shares(counts: I64) -> list[float]:
    """Return counts as fractions of their sum."""
    return [float(share) for share in counts / max(1, int(counts.sum()))]


def times_seen(
    audit: Audit, most: int, cell: Callable[[float, int], str]
) -> tuple[list[str], list[list[str]]]:
    """Return names of columns and rows of a table of tokens and documents by times seen, so far and
    after all steps; ``cell(share, count)`` is the text of a cell, ``most`` the last row."""
    names: list[str] = []
    columns: list[list[int]] = []
    for name, counts in audit.moments():
        names += [f"tokens {name}", f"documents {name}"]
        for values in (counts.tokens.sum(axis=0), counts.documents_in_part):
            rest = [values[most:].sum()] if values.size > most else []
            columns.append([*map(int, (*values[:most], *rest))])
    rows = [
        [
            f"{times}×" + " and more" * (times == most),
            *(cell(c[times] / max(1, sum(c)), c[times]) if times < len(c) else "" for c in columns),
        ]
        for times in range(max(map(len, columns)))
    ]
    return names, rows


def _histograms(counts: Histograms) -> dict[str, list[int]]:
    return {
        "tokens": counts.tokens.sum(axis=0).tolist(),
        "documents_in_part": counts.documents_in_part.tolist(),
        "documents_whole": counts.documents_whole.tolist(),
    }


def _jumps(exposure: Exposure) -> list[Jump]:
    """Return the steps with the greatest rises between neighbouring windows of 1 % of the steps.

    A jump must exceed the median rise, which is that of a ramp where epochs are shuffled together,
    and six standard errors of a difference of windows, since few samples a step make a noisy curve.
    """
    served = np.flatnonzero(exposure.step_tokens)  # without skipped steps
    steps = served.size
    window = max(1, steps // 100)
    sums = np.zeros((2, steps + 1), np.int64)
    counts = (exposure.step_earlier[served], exposure.step_tokens[served])
    np.cumsum(counts, axis=1, out=sums[:, 1:])
    middle = np.arange(window, steps - window + 1)
    left, right = (
        (sums[:, middle + a] - sums[:, middle + b]) for a, b in ((0, -window), (window, 0))
    )
    before, after = (side[0] / np.maximum(side[1], 1) for side in (left, right))
    rise = after - before
    if not rise.size:
        return []
    # median absolute step-to-step change, as a standard deviation of one step (0.6745 x sqrt 2)
    noise = float(np.median(np.abs(np.diff(exposure.mean_earlier[served])))) / 0.954
    least = float(np.median(rise)) + max(_LEAST_RISE, 6 * noise * (2 / window) ** 0.5)
    found: list[Jump] = []
    for k in np.argsort(-rise, kind="stable"):
        if rise[k] < least:
            break
        step = int(served[middle[k]])
        if all(abs(step - jump.step) > 2 * window for jump in found):
            found.append(Jump(step=step, before=float(before[k]), after=float(after[k])))
    return sorted(found, key=lambda jump: jump.step)


_NOTABLE = 0.01
"""Least share of unseen tokens of a source for which a change is suggested."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """Tokens of one source after all steps."""

    name: str
    tokens: int
    served: int
    of_served: float
    """Share of this source in the tokens served."""
    unseen: float
    once: float
    more: float
    first_repeat: int | None
    """First step that serves a token again."""

    @property
    def epochs(self) -> float:
        """Mean number of times that a token is served."""
        return self.served / max(1, self.tokens)


def source_counts(audit: Audit) -> list[SourceCounts]:
    """Return the counts of each source."""
    exposure = audit.exposure
    served = exposure.composition.sum(axis=0)
    columns = zip(
        audit.run.sources,
        exposure.total.tokens,
        served.tolist(),
        shares(served),
        exposure.first_repeats.tolist(),
        strict=True,
    )
    found = []
    for source, counts, tokens_served, share, repeat in columns:
        unseen, once, *more = shares(counts)
        found.append(
            SourceCounts(
                name=source.name,
                tokens=int(counts.sum()),
                served=tokens_served,
                of_served=share,
                unseen=unseen,
                once=once,
                more=sum(more),
                first_repeat=None if repeat < 0 else repeat,
            )
        )
    return found


def headline(audit: Audit) -> str:
    """Return a line with the order, the samples and the corpus."""
    run = audit.run
    order = f"order {run.order}, " if run.order else ""
    past = f", of which {run.past_steps:,} are past" if run.past_steps else ""
    if run.steps_elsewhere:
        past = f", {run.steps_elsewhere:,} of them in another system, whose reading is not counted"
    rounds = f", one of {run.rounds:,} rounds that are alike" if run.rounds > 1 else ""
    return (
        f"{order}{run.samples_served:,} samples of {run.lengths_text} tokens in "
        f"{count_of(run.num_steps, 'step')}{past}{rounds}; corpus of {audit.tokens:,} tokens"
    )


def findings(audit: Audit) -> list[str]:
    """Return sentences on what a run sees, as at the top of the audit's page.

    Shares of the corpus never seen, seen once and more often, so far and after all steps; the
    sources that repeat, those served most often for their size first, with their first repeats;
    jumps; and tokens that are in no sample.

    Args:
        audit: result of `megaindex.audit.audit`.
    """
    steps = {
        "so far": f"So far, after {audit.run.past_steps:,} steps",
        "after all steps": f"After all {audit.run.num_steps:,} steps",
    }
    return [
        *skip_texts(audit),
        *(f"{steps[name]}: {_seen(counts.tokens.sum(axis=0))}" for name, counts in audit.moments()),
        *_repeats(source_counts(audit)),
        *map(jump_text, audit.jumps),
        *cut_texts(audit),
    ]


def skip_texts(audit: Audit) -> list[str]:
    """Return sentences on the skips of a run."""
    return [] if audit.skip is None else [f"Skips: {'; '.join(audit.skip.lines())}."]


def _seen(counts: I64) -> str:
    unseen, once, more = (int(part.sum()) for part in (counts[:1], counts[1:2], counts[2:]))
    tokens = int(counts.sum())
    times = f", at most {int(np.flatnonzero(counts)[-1]):,} times" if more else ""
    parts = [(unseen, "never seen"), (once, "seen once"), (more, f"seen twice or more{times}")]
    parts = [(part, words) for part, words in parts if part]
    if len(parts) == 1:
        return f"all {tokens:,} tokens of the corpus are {parts[0][1]}."
    shown = (f"{percent(part / max(1, tokens))} ({part:,}) {words}" for part, words in parts)
    return f"of the corpus's {tokens:,} tokens, {'; '.join(shown)}."


def _repeats(sources: list[SourceCounts]) -> Iterator[str]:
    repeated = [s for s in sources if s.first_repeat is not None]
    if len(sources) == 1:
        for source in repeated:
            yield f"A token is seen for the second time from step {source.first_repeat:,} on."
        return
    repeated.sort(key=lambda source: -source.epochs)
    for source in repeated[:_MOST_NAMED]:
        yield (
            f"{source.name} repeats from step {source.first_repeat:,} on; it is served "
            f"{source.epochs:.2f} times over, and "
            + (
                f"{percent(source.unseen)} of it is never seen."
                if source.unseen
                else "all is seen."
            )
        )
    rest = len(repeated) - _MOST_NAMED
    if rest > 0:
        verb = "repeats" if rest == 1 else "repeat"
        yield f"{count_of(rest, 'more source')} {verb}; the table of sources lists the steps."
    if repeated and len(repeated) < len(sources):
        yield f"{len(sources) - len(repeated):,} of {len(sources):,} sources never repeat."


def suggestions(audit: Audit) -> list[str]:
    """Return sentences on what to change about a run, as at the top of the audit's page.

    A source counts as unseen in part from 1 % of its tokens on.

    Args:
        audit: result of `megaindex.audit.audit`.
    """
    found = list(_changes(audit, source_counts(audit)))
    if found:
        return found
    return [
        "No change is suggested: less than 1 % of each source is never seen, and the exposure does "
        "not jump."
    ]


def _changes(audit: Audit, sources: list[SourceCounts]) -> Iterator[str]:
    run = audit.run
    if any(source.cut_tokens for source in run.sources):
        yield (
            "To see the tokens that long_documents leaves out, set `long_documents: split` in "
            "these sources."
        )
    policy = run.settings.get("separate_final_epoch")
    if audit.jumps and policy in ("auto", "always"):
        whole = ", or end the run with a whole epoch" * (policy == "auto")
        yield (
            "To avoid the jump, shuffle the last epoch with the others (`--separate-final-epoch "
            f"never`; this page then shows the share never seen){whole}."
        )
    elif audit.jumps:
        yield (
            "The jumps are boundaries of epochs, or of stages. Compare losses of the same epoch "
            "only."
        )
    sources.sort(key=lambda source: -source.epochs)
    unseen = [source for source in sources if source.unseen >= _NOTABLE]
    mixed = [source for source in unseen if source.more >= _NOTABLE]
    if mixed:
        flag = "--epochs N" if len(sources) == 1 else "--epochs N,N,…"
        order = ", or order epoch, which finishes each epoch before the next"
        yield (
            f"{_names(mixed)}: tokens repeat before all are seen, as where epochs are shuffled "
            "together and the run ends within them. Choose a whole number of epochs"
            + ("." if not _is_frameworks(run.order) else f" (`megaindex plan {flag}`){order}.")
        )
    short = [source for source in unseen if source.more < _NOTABLE]
    if len(sources) == 1 and short:
        steps = -(-run.num_steps * short[0].tokens // short[0].served)
        yield (
            f"The run ends before one epoch: the whole corpus takes about {steps:,} steps, not "
            f"{run.num_steps:,}."
        )
    least = min((source.epochs for source in unseen), default=np.inf)
    over = [source for source in sources if source.epochs >= max(1, 2 * least)]
    if over:
        up_to = "up to " * (len(over) > 1)
        equal = "; ".join(
            f"{s.name} {percent(s.tokens / audit.tokens)} (now {percent(s.of_served)})"
            for s in dict.fromkeys([*over[:_MOST_NAMED], *unseen[:_MOST_NAMED]])
        )
        yield (
            f"{_names(over)}: served {up_to}{over[0].epochs:.2f} times over, while parts of "
            f"{_names(unseen)} are never seen. Sources that are seen equally often have these "
            f"shares of the tokens served: {equal}."
        )
    elif short and len(sources) > 1:
        yield (
            f"{_names(short)}: the run ends before one epoch of them; a longer run, or a larger "
            "share of it, reads more."
        )


def _names(sources: list[SourceCounts]) -> str:
    rest = len(sources) - _MOST_NAMED
    more = [f"{rest:,} more"] if rest > 0 else []
    return ", ".join([*(source.name for source in sources[:_MOST_NAMED]), *more])


def jump_text(jump: Jump) -> str:
    """Return a sentence on a jump and its effect on the loss."""
    return (
        f"From step {jump.step:,} on, tokens have been seen {jump.after:.2f} times before, just "
        f"before it {jump.before:.2f} times: the training loss tends to fall there, because the "
        "model has seen these tokens before, not because it generalises better."
    )


def cut_texts(audit: Audit) -> list[str]:
    """Return a sentence on each source with tokens that no sample holds; of many, on some."""
    texts = [
        f"{source.name}: {source.cut_tokens:,} tokens "
        f"({percent(source.cut_tokens / int(counts.sum()))}) are in no sample of an epoch, because "
        f"of {source.cut_by}, and stay unseen."
        for source, counts in zip(audit.run.sources, audit.exposure.total.tokens, strict=True)
        if source.cut_tokens
    ]
    rest = len(texts) - _MOST_NAMED
    verb = "has" if rest == 1 else "have"
    more = f"{count_of(rest, 'more source')} {verb} tokens in no sample of an epoch."
    return [*texts[:_MOST_NAMED], *[more] * (rest > 0)]


def distance_text(audit: Audit) -> str:
    """Return sentences on the steps between repeats."""
    distances = audit.exposure.distances
    repeated = int(distances.sum())
    if repeated == 0:
        if audit.run.rounds > 1:
            return f"Each of the {audit.run.rounds:,} rounds serves the same tokens, each once."
        return "No token is served twice."
    cumulated = np.cumsum(distances)
    least = int(np.flatnonzero(distances)[0])
    tenth, median, most = (
        int(np.searchsorted(cumulated, share * repeated)) for share in (0.1, 0.5, 0.9)
    )
    return (
        f"Tokens served again: {repeated:,}. Steps since the last time: at least {least:,}, "
        f"median {median:,}; 10 % within {tenth:,}, 90 % within {most:,}."
    )


def _is_frameworks(order: str) -> bool:
    row = FRAMEWORK_RULES.get(order)
    return row is not None and row.is_framework
