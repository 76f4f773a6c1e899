"""The tables of a printed plan: totals, sources, coverage."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from megaindex.plan.model import Plan, Row
from megaindex.plan.printing import new_table

_MANY_SOURCES = 24
_SHOWN_TIMES = 4
_METHODS = {"closed-form": "exact", "built": "exact, counted", "expected": "expected"}


def totals(plan: Plan) -> RenderableType:
    table = new_table()
    table.add_column("train")
    for name in ("samples", "tokens"):
        table.add_column(name, justify="right")
    length = plan.sequence_length
    rows: list[tuple[str, int | None, int | None]] = [
        ("one epoch", plan.samples_per_epoch, plan.tokens_per_epoch),
        ("consumed", plan.samples_consumed, plan.tokens_consumed),
        ("left over", plan.samples_left_over, plan.tokens_left_over),
    ]
    if plan.consumed_samples:
        rows.insert(1, ("before this run", plan.consumed_samples, plan.consumed_samples * length))
    built = (
        "built" if plan.num_epochs_built is None else f"built, {epochs_text(plan.num_epochs_built)}"
    )
    rows.append((built, plan.samples_built, None))
    for name, samples, tokens in rows:
        table.add_row(name, _number(samples), _number(tokens) if tokens is not None else "")
    return table


def sources(plan: Plan) -> RenderableType:
    table = new_table("split", "source")
    weighted = any(row.weight is not None for row in plan.datasets)
    columns = ["weight"] * weighted + ["epoch", "asked", "drawn", "built", "epochs", "repeated"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.datasets[:_MANY_SOURCES]:
        table.add_row(_split(row), row.name, *_counts(row, weighted))
    _add_more(table, len(plan.datasets))
    return table


def _counts(row: Row, weighted: bool) -> list[str]:
    weight = [_weight(row.weight)] if weighted else []
    drawn = _number(row.drawn)
    if row.drawn is None:
        drawn = f"{row.drawn_bounds[0]:,}…{row.drawn_bounds[1]:,}"
    numbers = [row.built, row.epochs, row.repeated]
    first = [_number(row.samples_per_epoch), _number(row.requested), drawn]
    return weight + first + [_number(number) for number in numbers]


def coverage(plan: Plan) -> RenderableType | None:
    """Share of tokens, and of documents where they were counted, by times seen."""
    lines = [
        (row, kind, shares)
        for row in plan.datasets
        for kind, shares in (
            ("tokens", row.coverage.tokens),
            ("documents", row.coverage.documents if row.split == "train" else ()),
        )
        if shares
    ]
    if not lines:
        return None
    times = max(len(shares) for _, _, shares in lines)
    table = new_table("seen", "source", "share of")
    heads = [f"{k}×" for k in range(min(times, _SHOWN_TIMES))]
    for name in heads + [f"≥{_SHOWN_TIMES}×"] * (times > _SHOWN_TIMES):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("figures are")
    for row, kind, shares in lines[:_MANY_SOURCES]:
        cells = [_percent(share) for share in shares[:_SHOWN_TIMES]]
        cells += [""] * (len(heads) - len(cells))
        rest = shares[_SHOWN_TIMES:]
        cells += [_percent(sum(rest)) if rest else ""] * (times > _SHOWN_TIMES)
        table.add_row(_split(row), row.name, kind, *cells, _METHODS[row.coverage.method])
    _add_more(table, len(lines))
    return table


def _add_more(table: Table, count: int) -> None:
    if count > _MANY_SOURCES:
        table.add_row("", f"… {count - _MANY_SOURCES} more: --json lists all")


def epochs_text(count: int | None) -> str:
    """``one epoch`` or ``3 epochs``."""
    if count is None:
        return "? epochs"
    return "one epoch" if count == 1 else f"{count} epochs"


def _split(row: Row) -> str:
    return row.split if row.phase is None else f"{row.split}, phase {row.phase}"


def _weight(weight: float | None) -> str:
    if weight is None:
        return ""
    return f"{int(weight):,}" if weight >= 1000 and weight == int(weight) else f"{weight:g}"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _percent(share: float) -> str:
    """Two decimals, except that a small share never reads as none."""
    if 0 < share < 0.00005:
        return "<0.01 %"
    return f"{100 * share:.2f} %"
