"""Brings published entries to disk in the background and marks those that are there."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

DURABLE = "durable"

# Building is over by then, or goes on with the next dataset: neither should wait for a disk.
_DELAY_SECONDS = 2.0


def make_durable_later(entry: Path) -> None:
    """Sync an entry soon and mark it, so that no reader of a later boot need verify it.

    A process that ends before leaves it unmarked: it is verified once, by its first reader.
    """
    _worker.schedule(entry)


def make_durable(entry: Path) -> None:
    """Sync an entry now and mark it."""
    with contextlib.suppress(OSError), _opened(entry) as directory:
        # By descriptor: whatever bears the entry's name by now, this marks what was synced.
        for name in os.listdir(directory):
            with _opened(name, directory) as file:
                os.fsync(file)
        os.fsync(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(DURABLE, flags, 0o666, dir_fd=directory))


class _Worker:
    """One thread for all entries of the process, started with the first."""

    def __init__(self) -> None:
        self._entries: queue.SimpleQueue[tuple[float, Path]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def schedule(self, entry: Path) -> None:
        self._entries.put((time.monotonic() + _DELAY_SECONDS, entry))
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="megaindex-durable", daemon=True).start()

    def _run(self) -> None:
        while True:
            due, entry = self._entries.get()
            time.sleep(max(0.0, due - time.monotonic()))
            make_durable(entry)


_worker = _Worker()


def _forget_the_thread() -> None:
    """After a fork the thread is the parent's, and so are the entries it has to sync."""
    global _worker  # noqa: PLW0603
    _worker = _Worker()


os.register_at_fork(after_in_child=_forget_the_thread)


@contextlib.contextmanager
def _opened(path: str | Path, directory: int | None = None) -> Iterator[int]:
    # neither out of the entry through a link nor into a pipe that has no writer
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
