"""Tables that look alike on a terminal and in a pipe, colours on a terminal only."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

_PIPED_WIDTH = 110


def new_table() -> Table:
    """A plain table."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def print_view(view: RenderableType) -> None:
    """Print to stdout, without blanks at the ends of lines."""
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    with console.capture() as text:
        console.print(view)
    sys.stdout.write("\n".join(line.rstrip() for line in text.get().split("\n")))
