"""Views on a terminal and in a pipe: the same layout in both, colours on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from typing import TextIO

_PIPED_WIDTH = 110


def print_view(view: RenderableType, file: TextIO | None = None) -> None:
    """Print, to stdout by default, without blanks at the ends of lines."""
    out = file or sys.stdout
    console = Console(file=out, width=None if out.isatty() else _PIPED_WIDTH, highlight=False)
    with console.capture() as text:
        console.print(view)
    out.write("\n".join(line.rstrip() for line in text.get().split("\n")))


def spaced(parts: Sequence[RenderableType]) -> RenderableType:
    """The parts one below the other, a blank line between them."""
    lines = [item for part in parts for item in (part, Text())]
    return Padding(Group(*lines[:-1]), (0, 1), expand=False)


def answer_panel(*lines: RenderableType) -> RenderableType:
    """What a plan begins with."""
    return Panel(
        Group(*lines), box=box.ROUNDED, border_style="green", title="plan", title_align="left"
    )


def warning(text: str) -> RenderableType:
    """A line that begins with an exclamation mark."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("!", "bold yellow"), Text(text, "yellow"))
    return grid


def new_table(*left: str) -> Table:
    """A plain table whose first columns are words, folded where they are long."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    return table
