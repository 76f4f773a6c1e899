"""What came of a task, in a form that every engine can send: a value, or what was raised."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from megaindex.errors import EngineError

Task = TypeVar("Task")
Result = TypeVar("Result")


class InWorker(Exception):
    """The cause of an exception that was raised in another process: its traceback, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[Result]):
    """A result, or an exception with the text of its traceback."""

    value: Result | None = None
    error: Exception | None = None
    trace: str = ""

    def result(self) -> Result:
        """The value, or raises what the task raised, as itself."""
        if self.error is not None:
            raise self.error from InWorker(self.trace)
        return cast(Result, self.value)


def capture(function: Callable[[Task], Result], task: Task) -> Outcome[Result]:
    """Run one task; an exception is part of what it returns."""
    try:
        return Outcome(value=function(task))
    except Exception as error:
        return Outcome(error=_portable(error), trace=traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """``error``, or where pickling loses its kind or text, an EngineError that tells both."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # whatever a foreign __reduce__ or __init__ may raise
        pass
    return EngineError(f"a task raised {type(error).__name__}: {error}; its cause is the traceback")
