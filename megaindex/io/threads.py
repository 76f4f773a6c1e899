"""Threads for reads that may hang.

A thread in a read that never returns cannot be ended, and concurrent.futures would wait for it when
the interpreter exits. These threads are daemons, and one that hangs is abandoned and replaced.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

Job = Callable[[], bool]
"""Task of a thread; returns False if the thread was abandoned and must end."""

_QUEUE_SECONDS = 2.0  # DataLoader waits five for a worker to end


def num_cpus() -> int:
    """Return the number of CPUs that this process may use, of the machine where the system does not
    limit a process to some (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Pool of at most ``size`` threads that take jobs in order, started when needed.

    A forked child starts its own threads. The threads end when this object is closed or freed.
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

    def abandon(self, count: int) -> None:
        """Replace ``count`` threads that hang by new ones with the next jobs."""
        with self._lock:
            self._alive -= count

    def close(self) -> None:
        """End the threads when they are idle."""
        self._finalizer()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._alive = 0
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # a thread that takes None puts it back for the next
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
        del job  # free its buffers before waiting for the next


def map_interruptibly(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> list[Result]:
    """Return ``function(item)`` for each item, in order, computed by several threads.

    Python handles an interrupt only between calls of the main thread, and a request in a library
    may take half a minute. Here the main thread waits for a lock, which an interrupt ends; running
    calls are left to daemon threads, and no further call starts.

    Raises:
        Exception: the error of the first item that failed.
    """
    waiting = iter(range(len(items)))
    lock = threading.Lock()
    ended: SimpleQueue[tuple[int, Result | None, BaseException | None]] = SimpleQueue()
    given_up = False

    def work() -> None:
        while not given_up:
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            try:
                ended.put((number, function(items[number]), None))
            except BaseException as error:
                ended.put((number, None, error))

    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, name="megaindex-request", daemon=True).start()
    outcomes: dict[int, tuple[Result | None, BaseException | None]] = {}
    results: list[Any] = []
    try:
        while len(results) < len(items):
            number, result, error = ended.get()
            outcomes[number] = result, error
            while len(results) in outcomes:
                result, error = outcomes.pop(len(results))
                if error is not None:
                    raise error
                results.append(result)
    finally:
        given_up = True
    return results


@atexit.register
def _wait_for_queues() -> None:
    """Wait at exit for the feeder threads of a spawned process's queues.

    A DataLoader worker that is stopped while it reads still queues that batch. If the interpreter
    ends while the feeder thread handles the tensors, PyTorch takes the GIL in a destructor, and
    the process aborts: "terminate called without an active exception".
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return  # its queues are not closed yet
    deadline = time.monotonic() + _QUEUE_SECONDS
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(max(0.0, deadline - time.monotonic()))
