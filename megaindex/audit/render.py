"""The audit and its look-ups on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaindex.audit.lookup import Serving
from megaindex.audit.report import Audit, shares
from megaindex.audit.stream import Stream
from megaindex.audit.words import cut_words, distance_words, headline, jump_words, percent
from megaindex.kernels.types import F64, I64
from megaindex.plan.printing import print_view, spaced

_CURVE_WIDTH = 60
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_TIMES = 8
_MOST_ROWS = 200


def print_audit(audit: Audit, file: TextIO | None = None) -> None:
    """Prints the summary; the same layout on a terminal and in a pipe."""
    parts: list[RenderableType] = [Text(headline(audit), "bold"), _seen(audit), _curve(audit)]
    parts += [Text(jump_words(jump), "yellow") for jump in audit.jumps]
    parts += [Text(words, "yellow") for words in cut_words(audit)]
    if len(audit.stream.sources) > 1:
        parts.append(_sources(audit))
    parts.append(Text(distance_words(audit)))
    print_view(spaced(parts), file)


def print_servings(stream: Stream, found: Sequence[Serving], file: TextIO | None = None) -> None:
    """Prints a look-up as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("step", "rank", "micro batch", "sample", "document", "tokens")
    for name in names:
        table.add_column(name, justify="right")
    many = len(stream.sources) > 1
    if many:
        table.add_column("source")
    for s in found[:_MOST_ROWS]:
        dealt = ("–" if value is None else str(value) for value in (s.rank, s.micro_batch))
        cells = [str(s.step), *dealt, str(s.sample), str(s.document)]
        cells.append(f"{s.offset} … {s.offset + s.length - 1}")
        table.add_row(*cells, *([stream.sources[s.source].name] if many else []))
    rest = len(found) - _MOST_ROWS
    view: RenderableType = table
    if not found:
        view = Text(f"not served in the {stream.num_steps:,} steps of this run")
    elif rest > 0:
        view = Group(table, Text(f"{rest} more; --json lists all"))
    print_view(view, file)


def _seen(audit: Audit) -> RenderableType:
    """Shares by times seen, after the past steps and after all."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("seen")
    past, total = audit.exposure.past, audit.exposure.total
    moments = [("after all steps", total)]
    if audit.stream.past_steps:
        moments.insert(0, ("so far", past))
    columns: list[list[float]] = []
    for name, counts in moments:
        for what, values in (
            ("tokens", counts.tokens.sum(axis=0)),
            ("documents", counts.documents_in_part),
        ):
            table.add_column(f"{what} {name}", justify="right")
            columns.append(_folded(shares(values)))
    for times in range(max(map(len, columns))):
        more = " and more" if times == _MOST_TIMES else ""
        cells = [percent(c[times]) if times < len(c) else "" for c in columns]
        table.add_row(f"{times}×{more}", *cells)
    note = Text("a document counts by its most served token", "dim")
    return Group(table, note)


def _folded(values: list[float]) -> list[float]:
    return [*values[:_MOST_TIMES], *([sum(values[_MOST_TIMES:])] * (len(values) > _MOST_TIMES))]


def _curve(audit: Audit) -> RenderableType:
    curve = _resampled(audit.exposure.curve())
    most = float(curve.max())
    level = np.ceil(curve / most * (len(_BARS) - 1)).astype(int) if most > 0 else curve.astype(int)
    bars = "".join(_BARS[k] for k in level)
    title = Text("mean earlier exposures of the tokens of a step", "bold")
    scale = f"step 0 {' ' * (len(bars) - 12)} step {audit.stream.num_steps - 1}"
    return Group(title, Text(f"{bars}  highest {most:.2f}", "cyan"), Text(scale, "dim"))


def _resampled(curve: F64) -> F64:
    starts = np.unique(np.linspace(0, curve.size, _CURVE_WIDTH, endpoint=False).astype(np.int64))
    sums = np.add.reduceat(curve, starts)
    return np.asarray(sums / np.diff(starts, append=curve.size), np.float64)


def _sources(audit: Audit) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("source", "of tokens served", "unseen", "once", "twice or more", "epochs served")
    for name in names:
        table.add_column(name, justify="left" if name == "source" else "right")
    served = audit.exposure.composition.sum(axis=0)
    for source, counts, tokens in zip(
        audit.stream.sources, audit.exposure.total.tokens, served.tolist(), strict=True
    ):
        parts = shares(counts)
        table.add_row(
            source.name,
            percent(tokens / max(1, int(served.sum()))),
            *(percent(part) for part in (parts[0], parts[1], sum(parts[2:]))),
            f"{_epochs(counts):.3f}",
        )
    return table


def _epochs(counts: I64) -> float:
    return float(np.arange(counts.size) @ counts) / max(1, int(counts.sum()))
