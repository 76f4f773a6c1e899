"""What a command asks of whatever runs its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Engine(Protocol):
    """Runs one function over many tasks, each in a process of its own choosing.

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
