"""Plots of the audit page as SVG: fonts keep their size at any width, colours come from CSS.

A plot has no viewBox. Lines and texts lie at percentages of its width; curves lie in an inner
picture that is stretched to the width of the axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from megaindex._types import F64, I64
from megaindex.audit.balance import BalanceModel
from megaindex.audit.exposure import SHARES
from megaindex.audit.report import Audit

MOST_COLOURS = 7
"""Most sources that are drawn, each in one colour on the whole page."""
_LEFT, _RIGHT = 9.0, 98.0  # bounds of the axes, in percent of the width
_TOP, _BOTTOM = 28, 38  # pixels above and below the axes
_UNITS = 1000  # width of the inner picture
_MOST_LABELS = 6
_NARROW = 368  # pixels: a plot on a screen of 400, where texts must not overlap
_LETTER, _LINE = 6.7, 12  # pixels of a text: width of a digit, height
_LEAST_SAMPLES, _LEAST_POINTS = 20, 20  # of a curve: samples a point, points
# Colours of light and dark pages, each of one meaning. a to g: sources, Okabe and Ito's, distinct
# for colour-blind readers; r: a ramp for counts
_PALETTE = {
    "a": ("#0072b2", "#58a6ff"),
    "b": ("#d55e00", "#ff9b57"),
    "c": ("#009e73", "#2fc796"),
    "d": ("#cc79a7", "#e3a0c6"),
    "e": ("#e69f00", "#f0b73f"),
    "f": ("#56b4e9", "#8fd0f5"),
    "g": ("#b3a100", "#d9cb3c"),
    "others": ("#8a8a8a", "#a5a5a5"),
    "all": ("#37474f", "#b8c7d0"),
    "balanced": ("#7b3fa0", "#c79bea"),
    "jump": ("#b3261e", "#ff8a80"),
    "r0": ("#dbe9f6", "#17324d"),
    "r1": ("#a6cbe3", "#1f5482"),
    "r2": ("#5fa3cf", "#2f7fbd"),
    "r3": ("#2a76b5", "#62a9de"),
    "r4": ("#0b4d94", "#a3cfee"),
    "r5": ("#08244a", "#e2f1fb"),
    "back": ("#ffffff", "#0d1117"),
    "text": ("#1a1a1a", "#dde3ea"),
    "soft": ("#5c5c5c", "#9aa4af"),
    "grid": ("#e2e2e2", "#2d333b"),
    "past": ("#f2ead8", "#2e2a1f"),
    "mark": ("#8a6d1c", "#d4a72c"),
}
COLOURS = (*"abcdefg", "others")
BALANCE = ("all", "balanced")
"""Colours of steps in order, and balanced."""
RAMP = tuple(f"r{k}" for k in range(SHARES))
STYLE = """svg { font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); }
svg .grid { stroke: var(--grid); }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .now { stroke: var(--mark); }
svg .past { fill: var(--past); }
svg text.now { fill: var(--mark); stroke: none; }
svg text.jump { fill: var(--jump); font-weight: 600; }
svg .line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; }
svg .jump { fill: var(--jump); }"""


def variables(*, dark: bool) -> str:
    """Return the CSS variables of the colours of a light or dark page."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in _PALETTE.items())


def picture(plot: str) -> str:
    """Return a plot as an SVG file of its own, 900 pixels wide, in light colours."""
    style = f"<style>svg {{ {variables(dark=False)} }}\n{STYLE}</style>"
    paper = f'{style}<rect width="100%" height="100%" fill="var(--back)"/>'
    height = plot.partition('height="')[2].partition('"')[0]
    size = f'width="900" viewBox="0 0 900 {height}"'
    return plot.replace('width="100%"', size, 1).replace("\n", f"\n{paper}\n", 1) + "\n"


@dataclass(eq=False)
class _Plot:
    """Axes of one plot and what is drawn in them."""

    title: str
    height: int
    x_end: float
    y_end: float
    y_title: str
    y_text: Callable[[float], str] = "{:g}".format
    back: list[str] = field(default_factory=list)
    curves: list[str] = field(default_factory=list)
    front: list[str] = field(default_factory=list)
    boxes: list[tuple[float, float, float]] = field(default_factory=list)

    def x(self, value: float) -> float:
        """Return a place in percent of the width."""
        return round(_LEFT + (_RIGHT - _LEFT) * value / self.x_end, 3)

    def y(self, value: float) -> float:
        """Return a place in pixels from above."""
        return round(_TOP + self.height * (1 - value / self.y_end), 2)

    def text(self, x: float, y: float, words: str, kind: str = "", *, dx: int = 0) -> None:
        """Add a text that ends at ``x``, or begins there in the left half of the axes.

        One that would overlap another where the page is narrow is left out.
        """
        right = x > self.x_end / 2
        width = len(words) * _LETTER + dx
        begin = self.x(x) / 100 * _NARROW - width * right
        over = (
            abs(y - other_y) < _LINE and begin < other_end and other_begin < begin + width
            for other_begin, other_end, other_y in self.boxes
        )
        if any(over):
            return
        self.boxes.append((begin, begin + width, y))
        self.front.append(
            f'<text class="{kind}" x="{self.x(x)}%" y="{y}" dx="{-dx if right else dx}" '
            f'text-anchor="{"end" if right else "start"}">{escape(words)}</text>'
        )

    def upright(self, x: float, kind: str) -> None:
        """Add a line from the lower axis to the top."""
        place = f'x1="{self.x(x)}%" x2="{self.x(x)}%" y1="{_TOP}" y2="{self.y(0)}"'
        self.front.append(f'<line class="{kind}" {place}/>')

    def stairs(self, values: F64, bounds: I64 | F64, colour: str) -> None:
        """Add a line of steps, interrupted where a value is NaN."""
        drawn = self._path(values, bounds)
        self.curves.append(f'<path class="line" style="stroke: var(--{colour})" d="{drawn}"/>')

    def area(self, lower: F64, upper: F64, bounds: I64 | F64, colour: str) -> None:
        """Add the area between two lines of steps."""
        back = self._path(lower[::-1], bounds[::-1]).replace("M", "L", 1)
        drawn = self._path(upper, bounds)
        self.curves.append(f'<path style="fill: var(--{colour})" d="{drawn}{back}Z"/>')

    def _path(self, values: F64, bounds: I64 | F64) -> str:
        across = np.round(bounds * (_UNITS / self.x_end), 2).tolist()
        down = np.round(self.height * (1 - values / self.y_end), 2).tolist()
        parts: list[str] = []
        before = math.nan
        for begin, end, level in zip(across, across[1:], down, strict=False):
            if not math.isnan(level):
                if math.isnan(before):
                    parts.append(f"M{begin:g} {level:g}")
                elif level != before:
                    parts.append(f"V{level:g}")
                parts.append(f"H{end:g}")
            before = level
        return "".join(parts)

    def svg(self, x_title: str) -> str:
        grid, below = [], self.height + _TOP + 17
        for value in _ticks(self.y_end, 4):
            y = self.y(value)
            grid.append(f'<line class="grid" x1="{_LEFT}%" x2="{_RIGHT}%" y1="{y}" y2="{y}"/>')
            grid.append(
                f'<text x="{_LEFT}%" dx="-6" y="{y + 4}" text-anchor="end">'
                f"{self.y_text(value)}</text>"
            )
        for value in _ticks(self.x_end * 0.9, 4, least=1):
            place = f'x="{self.x(value)}%" y="{below}" text-anchor="middle"'
            grid.append(f"<text {place}>{value:,.0f}</text>")
        grid.append(f'<text x="{_RIGHT}%" y="{below + 14}" text-anchor="end">{x_title}</text>')
        grid.append(f'<text x="0" y="12">{escape(self.y_title)}</text>')
        inner = (
            f'<svg x="{_LEFT}%" y="{_TOP}" width="{_RIGHT - _LEFT}%" height="{self.height}" '
            f'viewBox="0 0 {_UNITS} {self.height}" preserveAspectRatio="none" overflow="visible">'
        )
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
                f'aria-label="{escape(self.title)}" width="100%" '
                f'height="{self.height + _TOP + _BOTTOM}">',
                *self.back, *grid, inner, *self.curves, "</svg>", *self.front, "</svg>",
            )
        )  # fmt: skip


def exposure_curve(audit: Audit) -> str:
    """Plot mean earlier exposures over steps, with the past shaded and jumps marked."""
    exposure = audit.exposure
    most = max(0.5, float(exposure.curve().max()))
    plot = _of_steps(audit, "Exposure by step", 200, most * 1.15, "earlier exposures of a token")
    epochs = list(enumerate(audit.epoch_steps, 1))
    for times, step in epochs:
        plot.upright(step, "mark")
        if times % -(-len(epochs) // _MOST_LABELS) == 0:
            plot.text(step, _TOP + 10, f"{times} ×", dx=4)
    plot.stairs(exposure.curve(), exposure.stretches, "all")
    for jump in sorted(audit.jumps, key=lambda jump: jump.before - jump.after)[:_MOST_LABELS]:
        middle = plot.y((jump.before + jump.after) / 2)
        plot.front.append(f'<circle class="jump" cx="{plot.x(jump.step)}%" cy="{middle}" r="3.5"/>')
        words = f"step {jump.step:,}: {jump.before:.2f} → {jump.after:.2f}"
        plot.text(jump.step, middle + 4, words, "jump", dx=9)
    return plot.svg("step")


def source_colours(audit: Audit) -> dict[int, str]:
    """Return the colours of the sources that are drawn, those served most first.

    Of more than `MOST_COLOURS` they are those served most, and those served most for their size.
    """
    exposure = audit.exposure
    served = exposure.composition.sum(axis=0)
    sizes = [max(1, int(source.lengths.sum(dtype=np.int64))) for source in audit.run.sources]
    most = np.argsort(-served, kind="stable").tolist()
    often = np.argsort(-served / np.array(sizes), kind="stable").tolist()
    shown = list(dict.fromkeys([*most[: MOST_COLOURS // 2 + 1], *often]))[:MOST_COLOURS]
    return dict(zip((number for number in most if number in shown), COLOURS, strict=False))


def exposure_by_source(audit: Audit, colours: dict[int, str]) -> str:
    """Plot mean earlier exposures over steps for some of the sources, by their numbers.

    Stretches are joined until each holds some samples of the source that is served least.
    """
    exposure, bounds, shown = audit.exposure, audit.exposure.stretches, list(colours)
    served = exposure.composition[:, shown]
    samples = served.sum(axis=0) / audit.run.index.sequence_length / len(served)
    joined = math.ceil(_LEAST_SAMPLES / max(float(samples.min()), 1e-9))
    starts = np.arange(0, len(served), max(1, min(joined, len(served) // _LEAST_POINTS)))
    sums = [np.add.reduceat(c, starts) for c in (exposure.source_earlier[:, shown], served)]
    curves = sums[0] / np.where(sums[1], sums[1], np.nan)
    most = max(0.5, float(curves[sums[1] > 0].max(initial=0)))
    title = "Exposure of each source by step"
    plot = _of_steps(audit, title, 200, most * 1.1, "earlier exposures of a token, by source")
    for curve, colour in zip(curves.T, colours.values(), strict=True):
        plot.stairs(curve, np.append(bounds[starts], bounds[-1]), colour)
    return plot.svg("step")


def exposure_shares(audit: Audit) -> str:
    """Plot the shares of each step's tokens that are seen for the first, second, … time."""
    used = max(1, int(np.flatnonzero(audit.exposure.shares.sum(axis=0))[-1]) + 1)
    counts = audit.exposure.shares[:, :used]
    return _stack(audit, "New and repeated tokens", counts, RAMP)


def composition(audit: Audit, counts: I64, colours: Sequence[str]) -> str:
    """Plot the shares of groups of sources, columns of ``counts``, in the tokens of a step."""
    return _stack(audit, "Sources by step", counts, colours)


def repeat_distances(audit: Audit) -> str:
    """Plot the tokens served again, by steps since the last time."""
    distances = audit.exposure.distances
    bins = min(60, distances.size)
    bounds = np.unique(np.linspace(0, distances.size, bins + 1).astype(np.int64))
    counts = np.add.reduceat(distances, bounds[:-1]) / max(1, int(distances.sum()))
    width = "a step" if bounds[1] == 1 else f"{int(bounds[1]):,} steps"
    plot = _Plot(
        title="Distance between repeats",
        height=150,
        x_end=float(distances.size),
        y_end=float(counts.max()) * 1.1,
        y_title=f"share of repeated tokens, for each {width.removeprefix('a ')}",
        y_text=_percent,
    )
    plot.area(np.zeros(counts.size), np.asarray(counts, np.float64), bounds, "all")
    return plot.svg("steps")


def step_time(audit: Audit, model: BalanceModel) -> str:
    """Plot the modelled time of a step in order and balanced, over steps."""
    most = float(model.step_time.max())
    plot = _of_steps(audit, "Time of a step", 150, most * 1.1, "time, in multiples of even work")
    for values, colour in zip(model.step_time.T, BALANCE, strict=True):
        plot.stairs(np.asarray(values, np.float64), model.step_bounds, colour)
    return plot.svg("step")


def work_of_rows(model: BalanceModel) -> str:
    """Plot the histogram of rows by work."""
    shares = np.asarray(model.work_rows / model.rows, np.float64)
    plot = _Plot(
        title="Work of rows",
        height=150,
        x_end=100.0,
        y_end=float(shares.max()) * 1.1,
        y_title="share of rows",
        y_text=_percent,
    )
    bounds = np.asarray(model.work_bounds / model.work_bounds[-1] * 100)
    plot.area(np.zeros(shares.size), shares, bounds, "all")
    return plot.svg("work, % of the largest")


def _of_steps(audit: Audit, title: str, height: int, y_end: float, y_title: str) -> _Plot:
    """Return axes over the steps of the run, with the past shaded."""
    plot = _Plot(
        title=title, height=height, x_end=audit.run.num_steps, y_end=y_end, y_title=y_title
    )
    past = audit.run.past_steps
    if past:
        width = f'width="{plot.x(past) - _LEFT:.3f}%" height="{height}"'
        plot.back.append(f'<rect class="past" x="{_LEFT}%" y="{_TOP}" {width}/>')
        plot.upright(past, "now")
        plot.text(past, _TOP - 3, "now", "now")
    return plot


def _stack(audit: Audit, title: str, counts: I64, colours: Sequence[str]) -> str:
    plot = _of_steps(audit, title, 180, 1.0, "share of the tokens of a step")
    plot.y_text = _percent
    parts = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    levels = np.column_stack((np.zeros(len(parts)), np.cumsum(parts, axis=1)))
    for (lower, upper), colour in zip(itertools.pairwise(levels.T), colours, strict=False):
        plot.area(lower, upper, audit.exposure.stretches, colour)
    return plot.svg("step")


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _ticks(end: float, most: int, *, least: float = 0) -> list[float]:
    """Return at most ``most`` + 1 round multiples of one step, from 0 to ``end``."""
    least = max(least, end / most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= least * (1 - 1e-9))
    return [round(k * step, 12) for k in range(int(end / step * (1 + 1e-9)) + 1)]
