"""A bar on stderr while bytes are copied or tasks run; on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaindex.io.copying import Progress, ignore

Bar = Callable[[int], Progress]
"""Given the bytes to come, what to tell of those that are done."""


def silent(_total: int) -> Progress:
    """No bar."""
    return ignore


@contextmanager
def copying(what: str) -> Iterator[Bar]:
    """Yield the `Bar` for a copy, or `silent` where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Display(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(what)

        def begin(total: int) -> Progress:
            display.update(task, total=total)
            return lambda count: display.advance(task, count)

        yield begin


@contextmanager
def counting(what: str, total: int) -> Iterator[Progress]:
    """Yield what to tell of tasks that are done, out of ``total``."""
    if not sys.stderr.isatty():
        yield ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Display(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(what, total=total)
        yield lambda count: display.advance(task, count)
