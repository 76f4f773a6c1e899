"""How often each token is served: in closed form, by building the index, or expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megaindex.index.arithmetic import FinalEpoch, final_epoch
from megaindex.index.dialect import Dialect
from megaindex.index.draws import Progress
from megaindex.kernels.types import F64
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
            policy=self.row.separate_final_epoch,
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
    """Mean coverage over seeds, for documents that are short against an epoch."""
    reach = _framework_reach(draw) if draw.row.is_framework else _epoch_reach(draw)
    served = reach.served * draw.sequence_length
    if reach.carried == 0 or reach.served == 0:
        shares = _chances(draw, reach, reach.carried, served)
    else:
        # The sample that begins in the block before is among those served, or it is not.
        share = reach.served / reach.samples
        shares = share * _chances(draw, reach, 0, served - reach.carried)
        if share < 1:
            shares = shares + (1 - share) * _chances(draw, reach, reach.carried, served)
    return Coverage(method="expected", tokens=_trimmed(shares.tolist()))


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """Blocks, of epochs that are shuffled together, which the samples served reach into."""

    passed: int = 0
    """Complete blocks, all of their samples served."""
    passed_copies: int = 1
    """Epochs of each of them."""
    lost: int = 0
    """Tokens of each of them that are in no sample."""
    carried: int = 0
    """Tokens of the last of them that the first sample of the next block begins with."""
    copies: int
    """Epochs of the block that is being served."""
    samples: int
    served: int
    """Those of its samples that are served, which may be any."""


def _framework_reach(draw: Draw) -> _Reach:
    """One block of all epochs, or one of all but the last and one of the last."""
    final, tokens = draw.final_epoch(), draw.part.tokens
    before = final.samples_before
    if not final.apart:
        return _Reach(copies=draw.epochs, samples=draw.built, served=draw.served)
    if draw.served <= before:
        return _Reach(copies=draw.epochs - 1, samples=before, served=draw.served)
    return _Reach(
        passed=1,
        passed_copies=draw.epochs - 1,
        carried=(draw.epochs - 1) * tokens - before * draw.sequence_length,
        copies=1,
        samples=draw.built - before,
        served=draw.served - before,
    )


def _epoch_reach(draw: Draw) -> _Reach:
    """Blocks of order epoch, which drop what fills no sample or carry it into the next one."""
    copies, length = draw.row.epochs_mixed, draw.sequence_length
    size, carries = copies * draw.part.tokens, draw.row.left_over == "carry"

    def samples_of(blocks: int) -> int:
        return draw.row.samples_in_epochs(blocks * copies, draw.part.tokens, length)

    # With carry, n * samples_of(1) samples of n blocks may be a few less than theirs.
    passed = draw.served * length // size if carries else draw.served // samples_of(1)
    passed += samples_of(passed + 1) <= draw.served
    before = samples_of(passed)
    return _Reach(
        passed=passed,
        passed_copies=copies,
        lost=0 if carries else size - samples_of(1) * length,
        carried=passed * size - before * length if carries else 0,
        copies=copies,
        samples=samples_of(passed + 1) - before,
        served=draw.served - before,
    )


def _chances(draw: Draw, reach: _Reach, unserved: int, served: int) -> F64:
    """Chances of times served: ``unserved`` tokens of the last complete block are not, and
    ``served`` tokens of the block after it are."""
    tokens = draw.part.tokens
    now = _hypergeometric(reach.copies, reach.copies * tokens, served)
    if not reach.passed:
        return now
    size = reach.passed_copies * tokens - reach.lost
    each, last = (
        _hypergeometric(reach.passed_copies, reach.passed_copies * tokens, count)
        for count in (size, size - unserved)
    )
    return np.convolve(np.convolve(_power(each, reach.passed - 1), last), now)


def _power(shares: F64, exponent: int) -> F64:
    """The distribution of a sum of ``exponent`` numbers drawn from one."""
    result = np.ones(1)
    while exponent:
        if exponent % 2:
            result = np.convolve(result, shares)
        exponent //= 2
        if exponent:
            shares = np.convolve(shares, shares)
    return result


def _hypergeometric(copies: int, tokens: int, served: int) -> F64:
    """Chances that 0 … ``copies`` of a token's copies are among ``served`` of ``tokens``."""
    left = tokens - served

    def ratio(k: int) -> float:
        return (copies - k) * (served - k) / ((k + 1) * (left - copies + k + 1))

    return _from_ratios(copies, max(0, copies - left), min(copies, served), ratio)


def _from_ratios(last: int, low: int, high: int, ratio: Callable[[int], float]) -> F64:
    """Chances of 0 … last from p(k + 1) / p(k), nothing outside low … high.

    Begins at the most likely k and normalises at the end, so nothing over- or underflows.
    """
    mode = low
    while mode < high and ratio(mode) > 1:
        mode += 1
    shares = np.zeros(last + 1)
    shares[mode] = 1.0
    for k in range(mode, high):
        shares[k + 1] = shares[k] * ratio(k)
    for k in range(mode - 1, low - 1, -1):
        shares[k] = shares[k + 1] / ratio(k)
    return np.asarray(shares / shares.sum(), np.float64)


def _trimmed(shares: Sequence[float]) -> tuple[float, ...]:
    """Without the negligible tail; always with the shares seen 0 and 1 times."""
    end = len(shares)
    while end > 2 and shares[end - 1] < _NEGLIGIBLE:
        end -= 1
    return tuple(shares[:end]) + (0.0,) * (2 - len(shares))
