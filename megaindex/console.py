"""Tables and colours for terminals and pipes."""

from __future__ import annotations

import html
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megaindex.errors import visible
from megaindex.markup import html_table

if TYPE_CHECKING:
    from typing import Literal, TextIO


_PIPED_WIDTH = 110
_TEXT_WIDTH = 100
_GAP = 3  # between two columns
_LEAST_NAME = 16  # least characters of a shortened name in a table
_LINE_NAME = 40


def console_of(out: TextIO) -> Console:
    """Return a console for a file: of a terminal's width; otherwise of COLUMNS, or 110 columns."""
    columns = os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdecimal() and int(columns) else _PIPED_WIDTH
    return Console(file=out, width=None if out.isatty() else piped, highlight=False)


def print_view(view: RenderableType, file: TextIO | None = None) -> None:
    """Print to a file, stdout by default, without trailing blanks, as wide as `console_of`."""
    out = file or sys.stdout
    out.write(_lines(view, console_of(out)))


def text_of(view: RenderableType) -> str:
    """Return a view as text of at most 100 columns, without colours."""
    return _lines(view, Console(file=io.StringIO(), width=_TEXT_WIDTH, highlight=False)).rstrip()


def _lines(view: RenderableType, console: Console) -> str:
    with console.capture() as text:
        console.print(view)
    return "\n".join(line.rstrip() for line in text.get().split("\n"))


def html_of(view: Any) -> str:
    """Return a view as HTML, with every text escaped."""
    if isinstance(view, FittedTable):
        return view.to_html()
    if isinstance(view, Group):
        return "".join(map(html_of, view.renderables))
    if isinstance(view, (Padding, Panel)):
        return html_of(view.renderable)
    if isinstance(view, Table):  # a grid
        cells = zip(*(column.cells for column in view.columns), strict=True)
        rows = [[_plain(cell) for cell in row] for row in cells]
        return html_table([], rows, labels=len(view.columns))
    text = html.escape(_plain(view)).replace("\n", "<br>")
    return f"<p>{text}</p>" if text else ""


def _plain(text: Any) -> str:
    return text.plain if isinstance(text, Text) else str(getattr(text, "text", text))


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines to a file, stdout by default; on a terminal long lines are wrapped.

    Characters that a terminal does not show are escaped, ends of lines among them.
    """
    out = file or sys.stdout
    width = shutil.get_terminal_size().columns if out.isatty() else None
    for line in map(visible, lines):
        if width is None or cell_len(line) <= width:
            print(line, file=out)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.wrap(
            line.lstrip(),
            width,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,  # a path can be copied
            break_on_hyphens=False,
        )
        print("\n".join(wrapped), file=out)


def spaced(parts: Sequence[RenderableType]) -> RenderableType:
    """Return the parts one below the other, separated by blank lines."""
    lines = [item for part in parts for item in (part, Text())]
    return Padding(Group(*lines[:-1]), (0, 1), expand=False)


def answer_panel(*lines: RenderableType) -> RenderableType:
    """Return the frame at the top of a plan."""
    return Panel(
        Group(*lines), box=box.ROUNDED, border_style="green", title="plan", title_align="left"
    )


def warning(text: str) -> RenderableType:
    """Return a paragraph that begins with an exclamation mark."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("!", "bold yellow"), Prose(text, "yellow"))
    return grid


@dataclass(frozen=True)
class Prose:
    """Text wrapped between words; a word longer than a line has its middle replaced by …."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = re.split(r"(\s+)", "\n".join(map(visible, self.text.split("\n"))))
        yield Text("".join(elided(word, options.max_width) for word in words), self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(cell_len, self.text.split()), default=0)
        return Measurement(longest, cell_len(self.text)).with_maximum(options.max_width)


@dataclass(frozen=True)
class TableColumn:
    """A column of a `FittedTable`; only cells of kind ``words`` are wrapped."""

    name: str
    kind: Literal["number", "note", "label", "name", "words"] = "number"
    """``number`` is aligned right, the others left; ``label`` and ``name`` identify a row and are
    repeated when the table is divided; a ``name`` may be shortened."""

    @property
    def is_label(self) -> bool:
        return self.kind in ("label", "name")

    def least(self, cells: Sequence[str]) -> int:
        """Return the least width in characters."""
        if self.kind == "words":
            words = (word for cell in (self.name, *cells) for word in cell.split())
            return max(map(cell_len, words), default=0)
        whole = self.whole(cells)
        return min(whole, max(_LEAST_NAME, cell_len(self.name))) if self.kind == "name" else whole

    def whole(self, cells: Sequence[str]) -> int:
        """Return the width of the longest cell in characters."""
        return max(map(cell_len, (self.name, *cells)))


class FittedTable:
    """A table that is never wider than the console and never breaks a word.

    A column given as a string holds numbers. If the columns do not fit side by side, words are
    wrapped and names shortened; if that is not enough, the other columns are divided among several
    tables, each with the labels; as a last resort every row becomes a list.
    """

    def __init__(self, *columns: TableColumn | str) -> None:
        self.columns = [TableColumn(c) if isinstance(c, str) else c for c in columns]
        self._rows: list[tuple[str, ...]] = []
        self._styles: list[str] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """Append a row; ``style`` applies to its first cell."""
        assert len(cells) == len(self.columns)
        self._rows.append(tuple(map(visible, cells)))
        self._styles.append(style)

    def to_html(self) -> str:
        labels = sum(column.is_label for column in self.columns)
        return html_table([column.name for column in self.columns], self._rows, labels=labels)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        columns = range(len(self.columns))
        natural = [self.columns[i].whole(self._cells(i)) for i in columns]
        return Measurement(1, _total(natural)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = self._blocks(options.max_width)
        if blocks is None:
            yield self._list()
            return
        widths = [self._widths(block, options.max_width) for block in blocks]
        for i in (i for i, column in enumerate(self.columns) if column.kind == "name"):
            least = min(each[i] for each in widths)
            for each in widths:
                each[i] = least  # the same short name in all tables
        for number, (block, each) in enumerate(zip(blocks, widths, strict=True)):
            if number:
                yield Text()
            yield self._table(block, each, complete=number == 0)

    def _cells(self, column: int) -> list[str]:
        return [row[column] for row in self._rows]

    def _least(self, column: int) -> int:
        return self.columns[column].least(self._cells(column))

    def _blocks(self, width: int) -> list[list[int]] | None:
        """Return the columns of each table, or None if one does not fit beside the labels."""
        labels = [i for i, column in enumerate(self.columns) if column.is_label]
        block, blocks = list(labels), []
        if _total([self._least(i) for i in range(len(self.columns))]) <= width:
            return [list(range(len(self.columns)))]
        if any(column.kind == "words" for column in self.columns):
            return None
        for i in (i for i in range(len(self.columns)) if i not in labels):
            if _total([self._least(k) for k in (*block, i)]) > width and len(block) > len(labels):
                blocks.append(block)
                block = list(labels)
            block.append(i)
            if _total([self._least(k) for k in block]) > width:
                return None
        return [*blocks, block]

    def _table(self, block: Sequence[int], widths: Mapping[int, int], *, complete: bool) -> Table:
        """Build a table of some columns; unless ``complete``, empty rows are left out."""
        labels = [i for i in block if self.columns[i].is_label]
        complete = complete or any("" in self._cells(i) for i in labels)  # continued rows
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i in block:
            column = self.columns[i]
            table.add_column(
                column.name,
                justify="right" if column.kind == "number" else "left",
                no_wrap=column.kind != "words",
                width=widths[i],
            )
        names = {i: distinct(self._cells(i), widths[i]) for i in block}
        for row, style in zip(self._rows, self._styles, strict=True):
            if not (complete or any(row[i] for i in block if i not in labels)):
                continue
            cells = [names[i][row[i]] if self.columns[i].kind == "name" else row[i] for i in block]
            first = Text(cells[0], style)
            table.add_row(first, *map(Text, cells[1:]))
        return table

    def _widths(self, block: Sequence[int], width: int) -> dict[int, int]:
        """Return the width of each column, the widest reduced first."""
        widths = {i: self.columns[i].whole(self._cells(i)) for i in block}
        while (over := _total(widths.values()) - width) > 0:
            spare = {i: widths[i] for i in block if widths[i] > self._least(i)}
            widest = max(spare, key=lambda i: spare[i])
            others = [self._least(widest), *(w for w in spare.values() if w < spare[widest])]
            widths[widest] = max(spare[widest] - over, max(others) - 1, self._least(widest))
        return widths

    def _list(self) -> RenderableType:
        names = max(cell_len(column.name) for column in self.columns)
        lines: list[RenderableType] = []
        for row, style in zip(self._rows, self._styles, strict=True):
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="dim", no_wrap=True, width=names)
            grid.add_column()
            for column, cell in zip(self.columns, row, strict=True):
                if cell:
                    grid.add_row(column.name, Prose(cell, style * (cell is row[0])))
            lines += [Text(), grid]
        return Group(*lines[1:])


def _total(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + _GAP * (len(widths) - 1)


def elided(text: str, width: int) -> str:
    """Return the text, its middle replaced by … if it is longer than ``width``."""
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def distinct(names: Sequence[str], width: int) -> dict[str, str]:
    """Map each name to a form of at most ``width`` characters; equal forms are numbered."""
    found: dict[str, str] = {}
    for number, name in enumerate(dict.fromkeys(names), 1):
        short = elided(name, width)
        if short in found.values():
            short = f"{number}…{name[len(name) - (width - 1 - len(str(number))) :]}"
        found[name] = short
    return found


@dataclass(frozen=True)
class ShortNames:
    """Paths without their common folder and without a common end such as ``_text_document``."""

    common: str
    """The common part, such as ``/data/*_text_document``, or empty."""
    names: Mapping[str, str]

    @classmethod
    def of(cls, paths: Iterable[str]) -> ShortNames:
        """Shorten the paths of a plan; a single path is kept."""
        different = [path for path in dict.fromkeys(paths) if path]
        if len(different) < 2:
            return cls("", {path: path for path in different})
        folder = "".join(f"{part}/" for part in _shared(p.split("/")[:-1] for p in different))
        if folder == "/":
            folder = ""
        names = [path[len(folder) :] for path in different]
        end = "".join(f"_{part}" for part in _shared(n.split("_")[:0:-1] for n in names)[::-1])
        if any(len(name) == len(end) or name[: -len(end)].endswith("/") for name in names):
            end = ""
        short = {path: path[len(folder) : len(path) - len(end)] for path in different}
        return cls(f"{folder}*{end}" if folder or end else "", short)

    def name(self, path: str) -> str:
        return self.names.get(path, path)

    def cut(self, path: str) -> str:
        """Return the short name with at most 40 characters."""
        return elided(self.name(path), _LINE_NAME)

    def text(self, text: str) -> str:
        """Replace the paths in a sentence by their short names."""
        if not self.common:
            return text
        longest = sorted(self.names, key=len, reverse=True)
        paths = "|".join(re.escape(path) for path in longest)
        return re.sub(
            rf"(?<![\w./-])(?:{paths})(?![\w/-])", lambda found: self.names[found[0]], text
        )

    def note(self) -> list[RenderableType]:
        """Return a line with the common part, if there is one."""
        return [Prose(f"sources: {self.common}", "dim")] if self.common else []


def _shared(lists: Iterable[Sequence[str]]) -> list[str]:
    levels = zip(*lists, strict=False)
    return [level[0] for level in itertools.takewhile(lambda each: len(set(each)) == 1, levels)]
