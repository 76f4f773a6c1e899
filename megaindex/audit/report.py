"""The audit of a stream: counts, jumps, and the object of ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.audit.balance import BalanceModel, model_balance
from megaindex.audit.exposure import Exposure, Histograms, count_exposure
from megaindex.audit.streams import AuditStream
from megaindex.index.balance import CostModel
from megaindex.index.blending import Progress
from megaindex.plan.model import json_value
from megaindex.plan.skip_effect import SkipEffect, effect_of

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit:
    """Result of `audit`: a stream, its exact counts and the jumps of its exposure.

    Attributes:
        stream: samples and steps of the run.
        exposure: counts of the tokens by times seen, over the steps.
        jumps: steps at which exposure jumps.
        balance: modelled work of the rows, None if no cost model was given.
        skip: effect of skipped steps and documents, None without. A masked document counts as seen:
            it is input, and carries no loss.
    """

    stream: AuditStream
    exposure: Exposure = field(repr=False)
    jumps: tuple[Jump, ...]
    balance: BalanceModel | None = field(default=None, repr=False)
    skip: SkipEffect | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the corpus, each counted once."""
        return int(self.exposure.total.tokens.sum())

    def moments(self) -> list[tuple[str, Histograms]]:
        """Return named histograms: so far, if there are past steps, and after all steps."""
        past = [("so far", self.exposure.past)] if self.stream.past_steps else []
        return [*past, ("after all steps", self.exposure.total)]

    @property
    def epoch_steps(self) -> list[int]:
        """Steps in which the tokens served reach once, twice, … the tokens of the corpus."""
        served = np.cumsum(self.exposure.step_tokens)
        whole = int(served[-1]) // self.tokens
        return np.searchsorted(served, np.arange(1, whole + 1) * self.tokens).tolist()  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        stream, exposure = self.stream, self.exposure
        repeats = np.flatnonzero(exposure.distances)
        balance = {} if self.balance is None else {"balance": self.balance.to_json()}
        skip = {} if self.skip is None else {"skip": json_value(self.skip)}
        return (
            balance
            | skip
            | {
                "order": stream.order,
                "run_settings": dict(stream.settings),
                "sequence_length": stream.index.sequence_length,
                "steps": stream.num_steps,
                "past_steps": stream.past_steps,
                "consumed_samples": int(stream.step_bounds[stream.past_steps]),
                "samples": stream.samples_served,
                "num_epochs_built": stream.index.num_epochs,
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
                        stream.sources,
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
    stream: AuditStream,
    *,
    points: int = 400,
    progress: Progress | None = None,
    cost_model: CostModel | None = None,
) -> Audit:
    """Return exact counts of the times that a run serves each token, and of repeats over steps.

    Args:
        stream: the run, from `stream_of_run`, `stream_of_recipe` or `stream_of_index`.
        points: greatest number of points of the exposure curve.
        progress: called with (done, total) while samples are located.
        cost_model: model of the work of a row; with it, the audit shows the time that ranks wait
            for each other in order and balanced. See docs/balance.md.

    Raises:
        InvalidArgument: a cost model is given, and the stream has no micro batch size or
            data-parallel size.

    Memory: about 40 bytes for each token run of a sample.
    """
    balance = None if cost_model is None else model_balance(stream, cost_model)
    exposure = count_exposure(stream, points=points, progress=progress)
    skip = None
    if stream.skips is not None:
        names = [source.name for source in stream.sources]
        effect = effect_of(stream.skips, stream.step_bounds, masked_rows=stream.masked_rows)
        skip = effect.counted(stream.index, names)
    return Audit(
        stream=stream,
        exposure=exposure,
        jumps=tuple(_jumps(exposure)),
        balance=balance,
        skip=skip,
    )


def shares(counts: I64) -> list[float]:
    """Return counts as fractions of their sum."""
    return [float(share) for share in counts / max(1, int(counts.sum()))]


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
