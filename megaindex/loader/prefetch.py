"""Prefetch of results in order, with a bounded queue and a few threads."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from megaindex.errors import InvalidArgument

Task = TypeVar("Task")
Result = TypeVar("Result")

_EXIT_SECONDS = 2.0  # the interpreter must end even if a thread hangs in a read


class ReadAhead(Generic[Task, Result]):
    """Iterator over ``prepare(task)`` for each task, in order, computed ahead by threads.

    An error of ``prepare`` or ``tasks`` is raised in place of its result and at each later call;
    nothing further is prepared.

    The threads end when the iterator is exhausted, closed or freed, and before the interpreter
    exits. Use in a forked child is refused.

    Args:
        tasks: taken one at a time, by any of the threads.
        prepare: called by several threads at once. It must not refer to this object, or freeing
            this object would not end the threads.
        depth: maximum number of results in preparation or waiting, at least 1.
        threads: number of threads, at least 1.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        prepare: Callable[[Task], Result],
        *,
        depth: int,
        threads: int,
    ) -> None:
        if depth < 1 or threads < 1:
            raise InvalidArgument(
                f"depth and threads must be at least 1, got depth={depth}, threads={threads}"
            )
        self._pid = os.getpid()
        self._queue = queue = _Queue(tasks, prepare, depth)
        self._threads = [
            threading.Thread(target=queue.work, name=f"megaindex-ahead-{number}", daemon=True)
            for number in range(min(threads, depth))
        ]
        _running.add(self)
        # A forked child has this object, but not its threads, and must not take its lock.
        self._finalizer = weakref.finalize(self, _stop_in, self._pid, weakref.ref(queue))
        self._finalizer.atexit = False
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> ReadAhead[Task, Result]:
        return self

    def __next__(self) -> Result:
        if self._pid != os.getpid():
            raise InvalidArgument(
                "an iteration must be used in the process that started it, got a forked child, "
                "which lacks its threads; start a new iteration in the child"
            )
        return self._queue.take()

    def close(self, timeout: float | None = None) -> None:
        """End the threads and wait for them, at most ``timeout`` seconds."""
        if self._pid != os.getpid():
            return
        self._queue.stop()
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> ReadAhead[Task, Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_EXIT_SECONDS)  # bounded: a thread may hang in a read


class _Queue(Generic[Task, Result]):
    """The state that the threads share, without a reference to the `ReadAhead`."""

    def __init__(
        self, tasks: Iterator[Task], prepare: Callable[[Task], Result], depth: int
    ) -> None:
        self._tasks = tasks
        self._prepare = prepare
        self._depth = depth
        # Re-entrant: garbage collection inside may free the ReadAhead, which stops this queue.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._begun = 0
        self._taken = 0
        self._over = False  # no further task is started
        self._results: dict[int, Result] = {}
        self._errors: dict[int, BaseException] = {}

    def work(self) -> None:
        while (begun := self._begin()) is not None:
            number, task = begun
            try:
                result = self._prepare(task)
            except BaseException as error:  # raised where the result is taken
                self._fail(number, error)
                return
            with self._lock:
                self._results[number] = result
                del begun, task, result
                if number == self._taken:
                    self._ready.notify()

    def take(self) -> Result:
        with self._lock:
            number = self._taken
            while number not in self._results:
                if number in self._errors:
                    raise self._errors[number]
                if self._over and number >= self._begun:
                    raise StopIteration
                self._ready.wait()
            self._taken += 1
            self._room.notify()
            return self._results.pop(number)

    def stop(self) -> None:
        with self._lock:
            self._over = True
            self._room.notify_all()
            self._ready.notify_all()

    def _begin(self) -> tuple[int, Task] | None:
        with self._lock:
            while self._begun - self._taken >= self._depth and not self._over:
                self._room.wait()
            if self._over:
                return None
            try:
                task = next(self._tasks)
            except StopIteration:
                self.stop()
                return None
            except BaseException as error:
                self._fail(self._begun, error)
                return None
            number, self._begun = self._begun, self._begun + 1
            return number, task

    def _fail(self, number: int, error: BaseException) -> None:
        with self._lock:
            self._errors[number] = error
            self.stop()


_running: weakref.WeakSet[ReadAhead[Any, Any]] = weakref.WeakSet()


def _stop_in(pid: int, queue: weakref.ref[_Queue[Any, Any]]) -> None:
    # A weak reference: a raised error holds its frames, and they hold the ReadAhead.
    alive = queue()
    if alive is not None and pid == os.getpid():
        alive.stop()


@atexit.register
def _close_all() -> None:
    """End the threads at exit: one that copies from a mapping must not outlive it."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for ahead in list(_running):
        ahead.close(max(0.0, deadline - time.monotonic()))
