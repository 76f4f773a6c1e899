"""Plots of the audit page, drawn with matplotlib as SVG text."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from megaindex._types import F64, I64
from megaindex.audit.exposure import SHARES
from megaindex.audit.report import Audit, shares

_WIDTH = 9.0  # inches, as all figures
# Okabe and Ito's colours, distinct for colour-blind readers and in grey, and a ramp for counts.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8A8A", "#F0E442")
_RAMP = ("#dbe9f6", "#a6cbe3", "#5fa3cf", "#2a76b5", "#0b4d94", "#08244a")
_MOST_SOURCES = len(_COLOURS)
_MOST_TIMES = 12
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text can be searched, and scales
    "svg.hashsalt": "megaindex",  # the same audit gives the same bytes
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}


def exposure_curve(audit: Audit) -> str:
    """Plot mean earlier exposures over steps, with the past shaded and jumps marked."""
    figure, axes = _figure(3.4)
    exposure = audit.exposure
    most = max(0.5, float(exposure.curve().max()))
    axes.stairs(
        exposure.curve(), exposure.stretches, baseline=None, color=_COLOURS[0], linewidth=1.8
    )
    for times, step in enumerate(audit.epoch_steps, 1):
        axes.axvline(step, color="#999999", linestyle=":", linewidth=1)
        axes.annotate(
            f"{times} × corpus",
            (step, most * 1.16),
            color="#666666",
            fontsize=8,
            ha="right",
            va="top",
            xytext=(-3, 0),
            textcoords="offset points",
        )
    for jump in audit.jumps:
        axes.annotate(
            f"step {jump.step:,}:\n{jump.before:.2f} → {jump.after:.2f}",
            (jump.step, (jump.before + jump.after) / 2),
            xytext=(-14, -4),
            textcoords="offset points",
            ha="right",
            va="center",
            color=_COLOURS[5],
            arrowprops={"arrowstyle": "->", "color": _COLOURS[5]},
        )
    _steps_axis(axes, audit)
    axes.set_ylim(0, most * 1.18)
    axes.set_ylabel("mean earlier exposures\n(times per token)")
    return _svg(figure, "exposure")


def exposure_shares(audit: Audit) -> str:
    """Plot the shares of each step's tokens that are seen for the first, second, … time."""
    figure, axes = _figure(3.2)
    counts = audit.exposure.shares
    used = max(1, int(np.flatnonzero(counts.sum(axis=0))[-1]) + 1)
    labels = [f"{_ordinal(k + 1)} time" for k in range(SHARES - 1)] + [f"{SHARES}th or later"]
    _stack(axes, audit, counts[:, :used], labels[:used], _RAMP)
    axes.set_ylabel("share of the tokens of a step")
    return _svg(figure, "shares")


def times_seen(audit: Audit) -> str:
    """Plot tokens and documents by times seen, so far and after all steps."""
    figure, panels = _figure(3.0, columns=2)
    colours = {"so far": _COLOURS[1], "after all steps": _COLOURS[0]}
    tokens = [(name, counts.tokens.sum(axis=0)) for name, counts in audit.moments()]
    documents = [(name, counts.documents_in_part) for name, counts in audit.moments()]
    for axes, what, moments in zip(
        panels, ("tokens", "documents"), (tokens, documents), strict=True
    ):
        _bars(axes, [(name, counts, colours[name]) for name, counts in moments])
        axes.set_ylabel(f"share of {what}")
        axes.set_xlabel("times seen")
    if audit.stream.past_steps:
        panels[0].legend(frameon=False, fontsize=9)
    return _svg(figure, "times")


def repeat_distances(audit: Audit) -> str:
    """Plot the tokens served again, by steps since the last time."""
    figure, axes = _figure(2.8)
    distances = audit.exposure.distances
    bins = min(60, distances.size)
    bounds = np.unique(np.linspace(0, distances.size, bins + 1).astype(np.int64))
    counts = np.add.reduceat(distances, bounds[:-1]) / max(1, int(distances.sum()))
    axes.stairs(counts, bounds, fill=True, color=_COLOURS[2])
    axes.set_xlabel("steps since the token was last served")
    axes.set_ylabel(f"share of repeated tokens\n(in {int(bounds[1]):,} steps)")
    axes.set_xlim(0, distances.size)
    axes.xaxis.set_major_formatter(_thousands())
    axes.yaxis.set_major_formatter(_percent())
    return _svg(figure, "distances")


def composition(audit: Audit) -> str:
    """Plot the share of each source in the tokens of a step; the smallest sources together."""
    figure, axes = _figure(3.2)
    counts = audit.exposure.composition
    names = [source.name.rsplit("/", 1)[-1] for source in audit.stream.sources]
    order = np.argsort(-counts.sum(axis=0), kind="stable")
    shown, rest = order[: _MOST_SOURCES - 1], order[_MOST_SOURCES - 1 :]
    columns, labels = counts[:, shown], [names[k] for k in shown]
    if rest.size:
        columns = np.column_stack((columns, counts[:, rest].sum(axis=1)))
        labels.append(f"{rest.size} others")
    _stack(axes, audit, columns, labels, _COLOURS)
    axes.set_ylabel("share of the tokens of a step")
    return _svg(figure, "composition")


def _stack(
    axes: Any, audit: Audit, counts: I64, labels: Sequence[str], colours: Sequence[str]
) -> None:
    parts = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    upper = np.cumsum(parts, axis=1)
    lower: F64 = np.zeros(len(parts))
    for k, label in enumerate(labels):
        axes.stairs(
            upper[:, k],
            audit.exposure.stretches,
            baseline=lower,
            fill=True,
            color=colours[k],
            label=label,
        )
        lower = upper[:, k]
    _steps_axis(axes, audit)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(_percent())
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _bars(axes: Any, moments: Sequence[tuple[str, I64, str]]) -> None:
    width = 0.8 / len(moments)
    most = 0
    for k, (name, counts, colour) in enumerate(moments):
        values = shares(counts)
        if len(values) > _MOST_TIMES:
            values[_MOST_TIMES:] = [sum(values[_MOST_TIMES:])]
        most = max(most, len(values))
        place = np.arange(len(values)) + (k - (len(moments) - 1) / 2) * width
        drawn = axes.bar(place, values, width * 0.95, color=colour, label=name)
        texts = [f"{100 * v:.1f}" if v >= 0.0005 else "" for v in values]
        axes.bar_label(drawn, texts, fontsize=8, padding=1)
    labels = [str(k) for k in range(most)]
    if most > _MOST_TIMES:
        labels[-1] = f"≥{_MOST_TIMES}"
    axes.set_xticks(range(most), labels)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(_percent())


def _steps_axis(axes: Any, audit: Audit) -> None:
    past = audit.stream.past_steps
    if past:
        axes.axvspan(0, past, color="#f2ead8", zorder=0, linewidth=0)
        axes.axvline(past, color="#8a6d1c", linewidth=1)
        axes.annotate("now", (past, 0), xytext=(3, 3), textcoords="offset points", color="#8a6d1c")
    axes.set_xlim(0, audit.stream.num_steps)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(_thousands())


def _figure(height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        return figure, figure.subplots(1, columns)


def _thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, symbol=" %")


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _svg(figure: Any, name: str) -> str:
    """Return the figure as an <svg> element with ids that are unique on the page."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(_STYLE):
        none: dict[Any, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=none)
    element = text.getvalue()
    element = element[element.index("<svg") :]
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)
