"""Brings what was published to disk in the background and marks what is there.

The mark is of a disk, not of the data: caches of the same build may differ by it (docs/scale.md).
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DURABLE = "durable"

# Building is over by then, or goes on with the next dataset: neither should wait for a disk.
_DELAY_SECONDS = 2.0


def make_durable_later(entry: Path) -> None:
    """Sync an entry soon and mark it, so that no reader of a later boot need verify it.

    A process that ends before leaves it unmarked: it is verified once, by its first reader.
    """
    later(functools.partial(make_durable, entry))


def later(sync: Callable[[], None]) -> None:
    """Call ``sync``, which handles its own errors, when building is likely to be over."""
    _worker.schedule(sync)


def make_durable(entry: Path) -> None:
    """Sync an entry now and mark it."""
    with contextlib.suppress(OSError), opened(entry) as directory:
        # By descriptor: whatever bears the entry's name by now, this marks what was synced.
        for name in os.listdir(directory):
            with opened(name, directory) as file:
                os.fsync(file)
        os.fsync(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(DURABLE, flags, 0o666, dir_fd=directory))


class _Worker:
    """One thread for all that the process has to sync, started with the first."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def schedule(self, sync: Callable[[], None]) -> None:
        self._tasks.put((time.monotonic() + _DELAY_SECONDS, sync))
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="megaindex-durable", daemon=True).start()

    def _run(self) -> None:
        while True:
            due, sync = self._tasks.get()
            time.sleep(max(0.0, due - time.monotonic()))
            sync()


_worker = _Worker()


def _forget_the_thread() -> None:
    """After a fork the thread is the parent's, and so is what it has to sync."""
    global _worker  # noqa: PLW0603
    _worker = _Worker()


os.register_at_fork(after_in_child=_forget_the_thread)


@contextlib.contextmanager
def opened(
    path: str | Path, directory: int | None = None, mode: int = os.O_RDONLY
) -> Iterator[int]:
    """A descriptor of a file, neither behind a link nor of a pipe that has no writer."""
    flags = mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
