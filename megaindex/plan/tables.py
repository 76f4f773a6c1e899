"""The tables of a printed plan: totals, sources, coverage."""

from __future__ import annotations

from rich.console import Group, RenderableType

from megaindex.plan.model import Plan, Row
from megaindex.plan.printing import Column, FittedTable, Prose, ShortNames

_MANY_SOURCES = 24
_SHOWN_TIMES = 4
_METHODS = {"closed-form": "exact", "built": "exact, counted", "expected": "expected"}


def totals(plan: Plan) -> RenderableType:
    table = FittedTable(
        Column(name="train", kind="label"), Column(name="samples"), Column(name="tokens")
    )
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


def sources(plan: Plan, names: ShortNames) -> RenderableType:
    weighted = any(row.weight is not None for row in plan.datasets)
    columns = ["weight"] * weighted + ["epoch", "asked", "drawn", "built", "epochs", "repeated"]
    table = FittedTable(
        Column(name="split", kind="label"),
        Column(name="source", kind="name"),
        *(Column(name=name) for name in columns),
    )
    for row in plan.datasets[:_MANY_SOURCES]:
        table.add_row(_split(row), names.name(row.name), *_counts(row, weighted))
    return Group(table, *_more(len(plan.datasets)), *names.note())


def _counts(row: Row, weighted: bool) -> list[str]:
    weight = [_weight(row.weight)] if weighted else []
    drawn = _number(row.drawn)
    if row.drawn is None:
        drawn = f"{row.drawn_bounds[0]:,}…{row.drawn_bounds[1]:,}"
    numbers = [row.built, row.epochs, row.repeated]
    first = [_number(row.samples_per_epoch), _number(row.requested), drawn]
    return weight + first + [_number(number) for number in numbers]


def coverage(plan: Plan, names: ShortNames) -> RenderableType | None:
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
    heads = [f"{k}×" for k in range(min(times, _SHOWN_TIMES))]
    heads += [f"≥{_SHOWN_TIMES}×"] * (times > _SHOWN_TIMES)
    table = FittedTable(
        Column(name="seen", kind="label"),
        Column(name="source", kind="name"),
        Column(name="share of", kind="label"),
        *(Column(name=name) for name in heads),
        Column(name="figures are", kind="note"),
    )
    for row, kind, shares in lines[:_MANY_SOURCES]:
        cells = [_percent(share) for share in shares[:_SHOWN_TIMES]]
        if rest := shares[_SHOWN_TIMES:]:
            cells.append(_percent(sum(rest)))
        cells += [""] * (len(heads) - len(cells))
        method = _METHODS[row.coverage.method]
        table.add_row(_split(row), names.name(row.name), kind, *cells, method)
    return Group(table, *_more(len(lines)))


def _more(count: int) -> list[RenderableType]:
    """A line for the rows that are left out."""
    if count <= _MANY_SOURCES:
        return []
    return [Prose(f"… {count - _MANY_SOURCES} more: --json lists all")]


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
    """Two decimals, and never 0 or 100 for a share that is only close to it."""
    if 0 < share < 0.00005:
        return "<0.01 %"
    if 0.99995 <= share < 1 - 1e-12:
        return ">99.99 %"
    return f"{100 * share:.2f} %"
