"""What a task does on a node of a cluster before it begins: it makes sure where it is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megaindex.engine.outcome import Outcome, capture
from megaindex.errors import EngineError

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a command was started: relative paths mean the same wherever its tasks run."""

    version: str
    directory: str

    def enter(self) -> None:
        """Work from the same directory, and with the same megaindex.

        Raises:
            EngineError: this node has another one, or none.
        """
        from megaindex import __version__

        node = platform.node()
        if __version__ != self.version:
            raise EngineError(
                f"node {node} has megaindex {__version__}, the command runs {self.version}; "
                "install the same one on every node"
            )
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise EngineError(
                f"{self.directory}: the command was started there, and node {node} cannot enter "
                f"it ({os.strerror(error.errno or 0)}); start it in a directory of the shared file "
                "system"
            ) from error


def run_on_node(home: Home, function: Callable[[Task], Result], task: Task) -> Outcome[Result]:
    """One task in a process of a node, on one thread: as many tasks run there as it has CPUs."""
    os.environ.setdefault("MEGAINDEX_NUM_THREADS", "1")
    try:
        home.enter()
    except EngineError as error:
        return Outcome(error=error)
    return capture(function, task)
