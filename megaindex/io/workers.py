"""A few threads for reads that may hang.

A thread inside a read that never returns cannot be ended. concurrent.futures would wait for it when
the interpreter exits; these threads are daemons, and one that hangs is written off and replaced.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], bool]
"""What a thread does next; False if the thread was written off meanwhile and is to end."""


class Workers:
    """At most ``size`` threads that take jobs in order; started when needed.

    A child process after a fork starts threads of its own. The threads end when this object is
    closed or dropped.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._start_afresh()

    def submit(self, job: Job) -> None:
        if self._pid != os.getpid():  # threads do not survive a fork
            self._start_afresh()
        self._jobs.put(job)
        with self._lock:
            if self._alive == self._size:
                return
            self._alive += 1
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name="megaindex-read", daemon=True
        )
        thread.start()

    def write_off(self, count: int) -> None:
        """``count`` threads hang: others take their place with the next jobs."""
        with self._lock:
            self._alive -= count

    def close(self) -> None:
        """End the threads once they are idle; those that hang are left."""
        self._finalizer()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._alive = 0
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # one None is passed on from thread to thread
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._finalizer.atexit = False


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            jobs.put(None)
            return
        if not job():
            return
        del job  # it holds buffers, and the next may be long in coming
