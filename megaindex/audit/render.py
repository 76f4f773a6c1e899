"""The audit and its look-ups on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from megaindex.audit.lookup import Serving
from megaindex.audit.report import Audit, shares
from megaindex.audit.stream import Stream
from megaindex.audit.words import cut_words, distance_words, headline, jump_words, percent
from megaindex.kernels.types import F64, I64
from megaindex.plan.printing import Column, FittedTable, Prose, ShortNames, print_view, spaced

_CURVE_WIDTH = 60
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_TIMES = 8
_MOST_ROWS = 200


def print_audit(audit: Audit, file: TextIO | None = None) -> None:
    """Prints the summary; the same layout on a terminal and in a pipe."""
    names = ShortNames.of(source.name for source in audit.stream.sources)
    parts: list[RenderableType] = [Prose(headline(audit), "bold"), _seen(audit), _Curve(audit)]
    parts += [Prose(jump_words(jump), "yellow") for jump in audit.jumps]
    parts += [Prose(names.text(words), "yellow") for words in cut_words(audit)]
    if len(audit.stream.sources) > 1:
        parts.append(_sources(audit, names))
    parts.append(Prose(distance_words(audit)))
    print_view(spaced(parts), file)


def print_servings(stream: Stream, found: Sequence[Serving], file: TextIO | None = None) -> None:
    """Prints a look-up as a table."""
    many = len(stream.sources) > 1
    names = ShortNames.of(source.name for source in stream.sources)
    columns = ("step", "rank", "micro batch", "sample", "document", "tokens")
    table = FittedTable(
        *(Column(name=name) for name in columns), *[Column(name="source", kind="name")] * many
    )
    for s in found[:_MOST_ROWS]:
        dealt = ("–" if value is None else str(value) for value in (s.rank, s.micro_batch))
        cells = [str(s.step), *dealt, str(s.sample), str(s.document)]
        cells.append(f"{s.offset} … {s.offset + s.length - 1}")
        source = stream.sources[s.source].name
        table.add_row(*cells, *([names.name(source)] if many else []))
    rest = len(found) - _MOST_ROWS
    view: RenderableType = Group(table, *(names.note() if many else []))
    if not found:
        view = Prose(f"not served in the {stream.num_steps:,} steps of this run")
    elif rest > 0:
        view = Group(view, Prose(f"{rest} more; --json lists all"))
    print_view(view, file)


def _seen(audit: Audit) -> RenderableType:
    """Shares by times seen, after the past steps and after all."""
    past, total = audit.exposure.past, audit.exposure.total
    moments = [("after all steps", total)]
    if audit.stream.past_steps:
        moments.insert(0, ("so far", past))
    names: list[str] = []
    columns: list[list[float]] = []
    for name, counts in moments:
        for what, values in (
            ("tokens", counts.tokens.sum(axis=0)),
            ("documents", counts.documents_in_part),
        ):
            names.append(f"{what} {name}")
            columns.append(_folded(shares(values)))
    table = FittedTable(Column(name="seen", kind="label"), *(Column(name=name) for name in names))
    for times in range(max(map(len, columns))):
        more = " and more" if times == _MOST_TIMES else ""
        cells = [percent(c[times]) if times < len(c) else "" for c in columns]
        table.add_row(f"{times}×{more}", *cells)
    return Group(table, Prose("a document counts by its most served token", "dim"))


def _folded(values: list[float]) -> list[float]:
    return [*values[:_MOST_TIMES], *([sum(values[_MOST_TIMES:])] * (len(values) > _MOST_TIMES))]


@dataclass(frozen=True)
class _Curve:
    """Mean earlier exposures over steps, as wide as fits."""

    audit: Audit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        exposure, last = self.audit.exposure.curve(), self.audit.stream.num_steps - 1
        highest = f"  highest {float(exposure.max()):.2f}"
        width = max(1, min(_CURVE_WIDTH, options.max_width - len(highest)))
        curve = _resampled(exposure, width)
        most = float(curve.max())
        level = (
            np.ceil(curve / most * (len(_BARS) - 1)).astype(int) if most > 0 else curve.astype(int)
        )
        bars = "".join(_BARS[k] for k in level)
        yield Prose("mean earlier exposures of the tokens of a step", "bold")
        yield Text(bars + highest, "cyan")
        yield Text(f"step 0 {' ' * (len(bars) - 12)} step {last}", "dim")


def _resampled(curve: F64, width: int) -> F64:
    starts = np.unique(np.linspace(0, curve.size, width, endpoint=False).astype(np.int64))
    sums = np.add.reduceat(curve, starts)
    return np.asarray(sums / np.diff(starts, append=curve.size), np.float64)


def _sources(audit: Audit, short: ShortNames) -> RenderableType:
    names = ("of tokens served", "unseen", "once", "twice or more", "epochs served")
    table = FittedTable(Column(name="source", kind="name"), *(Column(name=name) for name in names))
    served = audit.exposure.composition.sum(axis=0)
    for source, counts, tokens in zip(
        audit.stream.sources, audit.exposure.total.tokens, served.tolist(), strict=True
    ):
        parts = shares(counts)
        table.add_row(
            short.name(source.name),
            percent(tokens / max(1, int(served.sum()))),
            *(percent(part) for part in (parts[0], parts[1], sum(parts[2:]))),
            f"{_epochs(counts):.3f}",
        )
    return Group(table, *short.note())


def _epochs(counts: I64) -> float:
    return float(np.arange(counts.size) @ counts) / max(1, int(counts.sum()))
