"""Progress of tasks in other processes, from what they leave in the work folder."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaindex.corpus.tokenize.work import WorkFolder
from megaindex.io.copying import Progress, ignore

_LOOK_SECONDS = 1.0


@contextmanager
def watching(folder: WorkFolder, progress: Progress) -> Iterator[Callable[[int], None]]:
    """Move `progress` on while parts are worked on; yields what to tell the bytes of each that is
    finished. Progress never goes back, though a part that lost its worker does.
    """
    if progress is ignore:
        yield ignore
        return
    finished = told = 0
    over = threading.Event()
    lock = threading.Lock()

    def tell(now: int) -> None:
        nonlocal told
        if now > told:
            progress(now - told)
            told = now

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            underway = folder.bytes_in_progress()
            with lock:
                tell(finished + underway)

    def add(nbytes: int) -> None:
        nonlocal finished
        with lock:
            finished += nbytes
            tell(finished)

    thread = threading.Thread(target=look, name="megaindex-progress", daemon=True)
    try:
        thread.start()
        yield add
    finally:
        over.set()
        with contextlib.suppress(RuntimeError):  # Ctrl-C inside start(): it cannot be joined
            thread.join()
