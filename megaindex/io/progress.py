"""A bar on stderr while bytes are copied or tasks run; on a terminal only.

One at a time: what is copied while another bar is shown, or by another thread, has none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megaindex.io.copying import Progress, ignore

if TYPE_CHECKING:
    from rich.progress import Progress as Display

Bar = Callable[[int], Progress]
"""Given the bytes to come, what to tell of those that are done."""


def silent(_total: int) -> Progress:
    """No bar."""
    return ignore


def on_terminal() -> bool:
    """Whether somebody looks at stderr; services have none."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


@contextmanager
def copying(what: str) -> Iterator[Bar]:
    """Yield the `Bar` for a copy, or `silent` where there is none."""
    if not on_terminal():
        yield silent
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _display(what, DownloadColumn(), TransferSpeedColumn()) as display:
        task = display.add_task(what)

        def begin(total: int) -> Progress:
            display.update(task, total=total)
            return lambda count: display.advance(task, count)

        yield begin


@contextmanager
def counting(what: str, total: int) -> Iterator[Progress]:
    """Yield what to tell of tasks that are done, out of ``total``."""
    if not on_terminal():
        yield ignore
        return
    from rich.progress import MofNCompleteColumn

    with _display(what, MofNCompleteColumn()) as display:
        task = display.add_task(what, total=total)
        yield lambda count: display.advance(task, count)


@contextmanager
def _display(what: str, *columns: Any) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    display = Progress(
        TextColumn(what),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    alone = _shown.acquire(blocking=False)
    if alone:
        display.start()
    try:
        yield display
    finally:
        if alone:
            display.stop()
            _shown.release()


_shown = threading.Lock()
