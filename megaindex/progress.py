"""Progress bars on stderr, on a terminal only.

One bar is shown at a time; work that begins while another bar is shown displays none. rich is
imported only for a bar, since every reader of corpora imports this module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from megaindex.io.paths import Progress, ignore

if TYPE_CHECKING:
    from rich.progress import Progress as Display

Bar = Callable[[int], Progress]
"""Function of the total number of bytes; it returns a function to call with each number copied."""


def silent(_total: int) -> Progress:
    """Return a function that shows nothing."""
    return ignore


def on_terminal() -> bool:
    """Return True if stderr is a terminal; services may have no stderr."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


@contextmanager
def copying(what: str) -> Iterator[Bar]:
    """Yield the `Bar` for a copy, or `silent` if stderr is not a terminal."""
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
    """Yield the function to call with each number of tasks done, out of ``total``."""
    if not on_terminal():
        yield ignore
        return
    from rich.progress import MofNCompleteColumn

    with _display(what, MofNCompleteColumn()) as display:
        task = display.add_task(what, total=total)
        yield lambda count: display.advance(task, count)


@contextmanager
def counting_samples() -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of (samples counted, total samples), or None if stderr is not a terminal.

    The bar appears with its first call.
    """
    if not on_terminal():
        yield None
        return
    with ExitStack() as stack:

        @cache
        def update() -> Callable[..., None]:
            display = stack.enter_context(_display("counting samples"))
            return partial(display.update, display.add_task("counting samples"))

        yield lambda done, total: update()(completed=done, total=total)


@contextmanager
def polling(
    under_way: Callable[[], int], progress: Progress, seconds: float = 1.0
) -> Iterator[Progress]:
    """Advance `progress` while tasks run in other processes.

    Progress never decreases, not even when a task loses its worker and starts again.

    Args:
        under_way: returns the bytes that unfinished tasks have processed; called by a thread
            every `seconds`.

    Yields:
        The `Progress` to call with the bytes of each finished task.
    """
    if progress is ignore:
        yield ignore
        return
    ended = reported = 0
    over = threading.Event()
    lock = threading.Lock()

    def report(now: int) -> None:
        nonlocal reported
        if now > reported:
            progress(now - reported)
            reported = now

    def poll() -> None:
        while not over.wait(seconds):
            now = under_way()
            with lock:
                report(ended + now)

    def add(nbytes: int) -> None:
        nonlocal ended
        with lock:
            ended += nbytes
            report(ended)

    thread = threading.Thread(target=poll, name="megaindex-progress", daemon=True)
    try:
        thread.start()
        yield add
    finally:
        over.set()
        with suppress(RuntimeError):  # a thread cannot be joined after Ctrl-C inside start()
            thread.join()


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
