"""Tasks in processes of this machine; a process that is lost costs its own task alone."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

from megaindex.engine.losses import Losses
from megaindex.engine.outcome import Outcome
from megaindex.engine.worker import Worker
from megaindex.errors import InvalidArgument

Task = TypeVar("Task")
Result = TypeVar("Result")

_GRACE = 5.0  # seconds that a task has to tidy up once it is told to end


class LocalEngine:
    """So many processes of this machine; one worker is this process itself.

    Processes are spawned with the first task of a run and end with its last. They share the CPUs:
    MEGAINDEX_NUM_THREADS is set in them unless it is set here.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self._threads = max(1, len(os.sched_getaffinity(0)) // self._workers)
        self._alive: set[Worker] = set()

    @property
    def workers(self) -> int:
        """Processes that run tasks."""
        return self._workers

    def run(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """As `Engine.run`. Tasks that run when another one fails are ended."""
        if self._workers == 1:
            yield from ((number, function(task)) for number, task in enumerate(tasks))
            return
        _check_importable(function)
        run = _Run(self, function, tasks)
        try:
            while finished := run.finished():
                yield from finished
        finally:
            self._end(run.workers)

    def close(self) -> None:
        """End what still runs, of iterators that were left open."""
        self._end(set(self._alive))

    def new_worker(self) -> Worker:
        worker = Worker(self._threads)
        self._alive.add(worker)
        return worker

    def drop(self, worker: Worker) -> str:
        """Forget a worker that was lost; tells how it ended."""
        self._alive.discard(worker)
        return worker.post_mortem()

    def _end(self, workers: Iterable[Worker]) -> None:
        """All at once: each gets the same time to tidy up."""
        ended = [worker for worker in workers if worker in self._alive]
        self._alive.difference_update(ended)
        for worker in ended:
            worker.end()
        deadline = time.monotonic() + _GRACE
        for worker in ended:
            worker.join(deadline)


def _check_importable(function: Callable[..., object]) -> None:
    """A process that cannot find its task would look like one that was lost."""
    if getattr(function, "__module__", None) == "__main__":
        raise InvalidArgument(
            f"{function}: is defined in the script that runs, which other processes do not run "
            f"again; put it in a module of its own, or pass workers=1"
        )


class _Run(Generic[Task, Result]):
    """One call of `run`: what is to be begun, what runs, and on which worker."""

    def __init__(
        self, engine: LocalEngine, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> None:
        self._engine = engine
        self._function = function
        self._tasks = tasks
        self._losses = Losses()
        self._waiting = deque[int]()  # those to be run again
        self._fresh = iter(range(len(tasks)))
        self._running: dict[Future[Outcome[Result]], tuple[Worker, int]] = {}
        self.workers = {engine.new_worker() for _ in range(min(engine.workers, len(tasks)))}
        self._idle = list(self.workers)

    def finished(self) -> list[tuple[int, Result]]:
        """Numbers and results of tasks that have ended since; empty where all have.

        One task is with each worker and none in front of it: what is lost with a worker is then
        no other task, and however many tasks there are, few are pickled at a time.
        """
        results: list[tuple[int, Result]] = []
        while not results:
            self._begin()
            if not self._running:
                break
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                worker, number = self._running.pop(future)
                try:
                    results.append((number, future.result().result()))
                    self._idle.append(worker)
                except BrokenProcessPool:
                    self._replace(worker)
                    self._losses.add(number, self._tasks[number], self._engine.drop(worker))
                    self._waiting.append(number)
        else:
            self._begin()  # before the caller takes its time with these
        return results

    def _begin(self) -> None:
        """Give every idle worker a task, as long as there are any."""
        while self._idle and (number := self._next()) is not None:
            worker = self._idle.pop()
            try:
                future = worker.submit(self._function, self._tasks[number])
            except BrokenProcessPool:  # killed while idle: no task's fault
                self._replace(worker)
                self._engine.drop(worker)
                self._waiting.append(number)
            else:
                self._running[future] = (worker, number)

    def _next(self) -> int | None:
        return self._waiting.popleft() if self._waiting else next(self._fresh, None)

    def _replace(self, worker: Worker) -> None:
        fresh = self._engine.new_worker()
        self.workers.discard(worker)
        self.workers.add(fresh)
        self._idle.append(fresh)
