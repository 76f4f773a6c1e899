"""Tables in HTML, which notebooks show, and in Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from megaindex.errors import visible


def html_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, labels: int, caption: str = ""
) -> str:
    """Return an HTML table, escaped; the first ``labels`` columns are aligned left."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ["left"] * labels + ["right"] * len(cells)
        return "".join(
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=False)
        )

    head = f"<thead><tr>{line('th', heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row holds the names of the columns."""
    cells = [[visible(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
