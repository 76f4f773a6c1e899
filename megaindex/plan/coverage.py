"""How often each token is served: in closed form, by building the index, or expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaindex.index.arithmetic import FinalEpoch, final_epoch
from megaindex.index.dialect import Dialect
from megaindex.index.draws import Progress
from megaindex.plan.corpus import Part
from megaindex.plan.model import Coverage

BUILD_LIMIT = 10**8
"""Documents x epochs up to which coverage is counted in the built index without being asked."""
_MOST_EPOCHS = 10_000  # a table of times served has a place for each
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Samples drawn from one source in one split."""

    row: Dialect
    part: Part
    sequence_length: int
    seed: int
    requested: int
    epochs: int
    built: int
    per_epoch: int
    drawn: int
    counted: bool
    """False where `drawn` is only a likely number."""

    @property
    def served(self) -> int:
        return min(self.drawn, self.built)

    def final_epoch(self) -> FinalEpoch:
        return final_epoch(
            self.requested,
            self.epochs,
            self.part.tokens,
            self.sequence_length,
            policy=self.row.final_epoch,
            threshold=self.row.final_epoch_threshold,
        )


def coverage_of(draw: Draw, method: str, progress: Progress | None = None) -> Coverage:
    """Coverage by the cheapest exact way, or as ``method`` (auto, exact, expected, none) asks."""
    if method == "none" or draw.epochs > _MOST_EPOCHS:
        return Coverage(method="none")
    closed = closed_form(draw) if draw.counted else None
    if closed is not None and method == "auto":
        return closed
    if _can_build(draw) and (method == "exact" or _is_cheap(draw, method)):
        from megaindex.plan.counting import built_coverage

        return built_coverage(draw, progress)
    return closed or expected(draw)


def _can_build(draw: Draw) -> bool:
    return bool(
        draw.counted
        and draw.row.order != "window"  # always closed
        and draw.part.source.path
        and draw.per_epoch > 0
        and draw.served > 0
    )


def _is_cheap(draw: Draw, method: str) -> bool:
    return method == "auto" and draw.part.sequences * draw.epochs <= BUILD_LIMIT


def closed_form(draw: Draw) -> Coverage | None:
    """Exact coverage where no permutation can change it, else None.

    The samples of one epoch never overlap: c of them serve c * S of its T tokens once. That holds
    for one epoch built, and for the first of two when the second is shuffled apart.
    """
    tokens, length, served = draw.part.tokens, draw.sequence_length, draw.served
    if draw.row.order == "window":
        return _windows(draw)
    one_pass = draw.epochs == 1 or served == 0
    if draw.row.is_framework and draw.epochs == 2:
        final = draw.final_epoch()
        one_pass = final.apart and served <= final.samples_before
    elif not draw.row.is_framework:
        one_pass = served <= draw.per_epoch and draw.row.epochs_mixed == 1
    if not one_pass:
        return None
    once = served * length / tokens
    return Coverage(method="closed-form", tokens=(1 - once, once))


def _windows(draw: Draw) -> Coverage:
    """Windows are the same in every epoch, so the left-over is too."""
    passes, rest = divmod(draw.served, draw.per_epoch)
    tokens, length = draw.part.tokens, draw.sequence_length
    shares = [0.0] * (passes + 2)
    shares[0] += (tokens - draw.per_epoch * length) / tokens
    shares[passes] += (draw.per_epoch - rest) * length / tokens
    shares[passes + 1] += rest * length / tokens
    return Coverage(method="closed-form", tokens=_trimmed(shares))


def expected(draw: Draw) -> Coverage:
    """Mean coverage over seeds: samples are drawn evenly from epochs shuffled together."""
    if not draw.row.is_framework:
        return _expected(_from_passes(draw))
    final = draw.final_epoch()
    if not final.apart:
        return _expected(_from_block(draw, draw.epochs, draw.built, draw.served))
    before = final.samples_before
    first = min(draw.served, before)
    shares = _from_block(draw, draw.epochs - 1, before, first)
    last = _from_block(draw, 1, draw.built - before, draw.served - first)
    return _expected(_convolved(shares, last))


def _from_passes(draw: Draw) -> list[float]:
    """Complete blocks of order epoch, which leave out what fills no sample, and a part of one."""
    copies, tokens, length = draw.row.epochs_mixed, draw.part.tokens, draw.sequence_length
    block = draw.row.samples_in_epochs(copies, tokens, length)
    if draw.row.carries_left_over:
        passes = draw.served * length // (copies * tokens)
        held, before = 1.0, passes * copies * tokens // length
    else:
        passes = draw.served // block
        held, before = block * length / (copies * tokens), passes * block
    shares = _binomial(passes * copies, held)
    return _convolved(shares, _from_block(draw, copies, block, draw.served - before))


def _expected(shares: Sequence[float]) -> Coverage:
    return Coverage(method="expected", tokens=_trimmed(shares))


def _from_block(draw: Draw, copies: int, samples: int, served: int) -> list[float]:
    """Chances that k of a token's ``copies`` are among ``served`` samples: hypergeometric.

    The tokens that end an epoch belong to no sample, so there is room for a fraction of a sample
    more than there are samples.
    """
    room = max(copies * draw.part.tokens / draw.sequence_length, float(samples))
    if room < copies:
        # Less than a sample an epoch: one sample holds a token several times.
        return _binomial(copies, served / room)
    rest = room - served

    def ratio(k: int) -> float:
        return (copies - k) / (k + 1) * (served - k) / max(rest - copies + k + 1, _NEGLIGIBLE)

    low = min(max(0, math.ceil(copies - rest)), copies, served)
    return _from_ratios(copies, low, min(copies, served), ratio)


def _binomial(trials: int, chance: float) -> list[float]:
    if chance >= 1 or chance <= 0:
        return [0.0] * (trials if chance > 0 else 0) + [1.0]
    return _from_ratios(trials, 0, trials, lambda k: (trials - k) / (k + 1) * chance / (1 - chance))


def _from_ratios(last: int, low: int, high: int, ratio: Callable[[int], float]) -> list[float]:
    """Chances of 0 … last from p(k + 1) / p(k), nothing outside low … high.

    Begins at the most likely k and normalises at the end, so nothing over- or underflows.
    """
    mode = low
    while mode < high and ratio(mode) > 1:
        mode += 1
    shares = [0.0] * (last + 1)
    shares[mode] = 1.0
    for k in range(mode, high):
        shares[k + 1] = shares[k] * ratio(k)
    for k in range(mode - 1, low - 1, -1):
        shares[k] = shares[k + 1] / ratio(k)
    total = sum(shares)
    return [share / total for share in shares]


def _convolved(first: Sequence[float], second: Sequence[float]) -> list[float]:
    result = [0.0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            result[i + j] += a * b
    return result


def _trimmed(shares: Sequence[float]) -> tuple[float, ...]:
    """Without the negligible tail; always with the shares seen 0 and 1 times."""
    end = len(shares)
    while end > 2 and shares[end - 1] < _NEGLIGIBLE:
        end -= 1
    return tuple(shares[:end]) + (0.0,) * (2 - len(shares))
