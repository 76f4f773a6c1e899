"""Interface of an engine, outcomes of tasks, and the queue that repeats lost tasks."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from megaindex.errors import EngineError

Task = TypeVar("Task")
Result = TypeVar("Result")

logger = logging.getLogger("megaindex")

ATTEMPTS = 3
"""Attempts to run a task whose worker is lost each time."""


class Engine(Protocol):
    """Interface of engines, which run a function over tasks in worker processes.

    Function, tasks and results must be picklable and small, and defined in importable modules, not
    in ``__main__``. Tasks must be idempotent: one may run twice, or in two workers at once.
    """

    @property
    def workers(self) -> int:
        """Number of tasks that run at a time."""

    def run(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield ``(number of the task, result)`` as tasks finish, in any order.

        Running tasks of a lost worker (killed, out of memory, node lost) are run again. If a task
        raises an exception, or the iterator is closed, no task is started any more, running tasks
        are ended, and the exception is raised here.

        Raises:
            EngineError: a task lost its worker `ATTEMPTS` times.
        """


class InWorker(Exception):
    """Cause of an exception raised in another process, with its traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class TaskOutcome(Generic[Result]):
    """Result of a task, or its exception with the traceback as text."""

    value: Result | None = None
    error: Exception | None = None
    trace: str = ""

    def result(self) -> Result:
        """Return the value or raise the exception of the task."""
        if self.error is not None:
            raise self.error from InWorker(self.trace)
        return cast(Result, self.value)


def capture(function: Callable[[Task], Result], task: Task) -> TaskOutcome[Result]:
    """Run a task and return its result or exception."""
    try:
        return TaskOutcome(value=function(task))
    except Exception as error:
        return TaskOutcome(error=_portable(error), trace=traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """Return ``error``, or an EngineError with its type and text if it cannot be pickled."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # of any __reduce__ or __init__
        pass
    return EngineError(f"a task raised {type(error).__name__}: {error}; see the traceback above")


class TaskQueue:
    """Queue of the numbers of tasks to start; those whose worker was lost come first."""

    def __init__(self, tasks: Sequence[object]) -> None:
        self._tasks = tasks
        self._fresh = iter(range(len(tasks)))
        self._again = deque[int]()
        self._losses = Counter[int]()

    def next(self) -> int | None:
        """Return the number of the next task, or None after the last one."""
        return self._again.popleft() if self._again else next(self._fresh, None)

    def put_back(self, number: int) -> None:
        """Queue a task again that was not started."""
        self._again.append(number)

    def count_loss(self, number: int, how: str) -> None:
        """Queue a task again whose worker was lost; EngineError after the last attempt."""
        task = self._tasks[number]
        self._losses[number] += 1
        if self._losses[number] == ATTEMPTS:
            raise EngineError(
                f"{task}: lost its worker {ATTEMPTS} times, the last one {how}; run it alone to "
                "find the reason, and use fewer workers if memory ran out"
            )
        logger.warning("%s: its worker was lost (%s); running it again", task, how)
        self._again.append(number)
