"""The interface of an engine, the outcome of a task, and limits of lost workers."""

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
"""A task that was begun so often and lost its worker each time is not begun again."""


class Engine(Protocol):
    """An engine that runs one function over many tasks, each in a process of its choosing.

    Function, tasks and results are picklable and small: data goes through files. They are of
    modules that can be imported: other processes do not run the caller's script again, so what
    that script (__main__) defines cannot be found there. A task is idempotent and names its output
    itself, so one that is run twice, or by two workers at once, leaves what one run leaves. Nothing
    of a result may depend on who ran it.
    """

    @property
    def workers(self) -> int:
        """Tasks that run at the same time, as far as is known."""

    def run(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """``(number of the task, its result)``, as they finish, in any order.

        A worker that is lost (killed, out of memory, its node gone) costs its running tasks alone:
        they are run again elsewhere. What a task raises is never tried again: it is raised here,
        after no further task was begun and those running were ended or waited for. Closing the
        iterator does the same.

        Raises:
            EngineError: a task lost its worker too often; names the task.
        """


class InWorker(Exception):
    """The cause of an exception that was raised in another process: its traceback, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class TaskOutcome(Generic[Result]):
    """A result, or an exception with the text of its traceback."""

    value: Result | None = None
    error: Exception | None = None
    trace: str = ""

    def result(self) -> Result:
        """Return the value, or raise what the task raised, as itself."""
        if self.error is not None:
            raise self.error from InWorker(self.trace)
        return cast(Result, self.value)


def capture(function: Callable[[Task], Result], task: Task) -> TaskOutcome[Result]:
    """Run one task; an exception is part of what it returns."""
    try:
        return TaskOutcome(value=function(task))
    except Exception as error:
        return TaskOutcome(error=_portable(error), trace=traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """``error``, or where pickling loses its kind or text, an EngineError that tells both."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # whatever a foreign __reduce__ or __init__ may raise
        pass
    return EngineError(f"a task raised {type(error).__name__}: {error}; its cause is the traceback")


class TaskQueue:
    """Numbers of the tasks that are to be begun: first those whose worker was lost."""

    def __init__(self, tasks: Sequence[object]) -> None:
        self._tasks = tasks
        self._fresh = iter(range(len(tasks)))
        self._again = deque[int]()
        self._losses = Counter[int]()

    def next(self) -> int | None:
        """Return the number of a task that is to be begun now; None where all are."""
        return self._again.popleft() if self._again else next(self._fresh, None)

    def put_back(self, number: int) -> None:
        """Have a task begun again that no worker took."""
        self._again.append(number)

    def count_loss(self, number: int, how: str) -> None:
        """Have a task begun again that lost its worker, which ended as ``how`` says.

        Raises:
            EngineError: it was the last attempt.
        """
        task = self._tasks[number]
        self._losses[number] += 1
        if self._losses[number] == ATTEMPTS:
            raise EngineError(
                f"{task}: lost its worker {ATTEMPTS} times, the last one {how}; run it alone to "
                "see why, and with fewer workers if memory ran out"
            )
        logger.warning("%s: its worker was lost (%s); it is run again", task, how)
        self._again.append(number)
