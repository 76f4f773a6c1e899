"""All interleavings of builders that claim one key, at the granularity of system calls.

The search runs the builders again from the beginning for every choice of the next process, and
stops where the state is known: the files, and the results of the calls of each process, which
decide what it does next. A process that sleeps goes on when a file or a process has changed; no
time passes, so no claim becomes stale. With ``kills`` any of the processes may be ended before any
of its calls.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

from robustness.simulation.calls import LOCAL, Calls, restore
from robustness.simulation.filesystem import ROOT
from robustness.simulation.world import Machine, Process, Task, World

from megaindex.cache.claim import build_once

_FOLDER = f"{ROOT}/folder"
_RESULT = f"{_FOLDER}/result"
_ALONE = {"read", "write", "close"}
_READS = {"stat", "lstat", "open", "read", "close", "listdir", "scandir", "fsync"}


class _Known(Exception):
    """Ends a run in a state that was reached before."""


class _Choices:
    """Decisions of one run: the given ones, then the first possible."""

    def __init__(self, search: Search, given: Sequence[int]) -> None:
        self._search = search
        self._given = given
        self._made: list[int] = []
        self.world: Any = None

    def draw(self, count: int) -> int:
        return 0

    def next(self, ready: Sequence[Task], current: Task | None) -> Task:
        helpers = [task for task in ready if not task.is_first or task.process.dead]
        if helpers:
            return helpers[0]
        # processes are alike, so their first calls come in one order
        new = [task for task in ready if self.world.is_new(task.process)]
        ready = [task for task in ready if task not in new[1:]]
        kills = self._search.kills - len(self.world.killed)
        # another process goes on, or one is ended
        options = len(ready) * (2 if kills > 0 else 1)
        place = len(self._made)
        choice = self._given[place] if place < len(self._given) else 0
        if place >= len(self._given) and self.world.error is None:
            state = self.world.state()
            if state in self._search.states:
                self.world.fail(_Known())
                return ready[0]
            self._search.states.add(state)
            self._search.waiting.extend([*self._made, other] for other in range(1, options))
        self._made.append(choice)
        task = ready[choice % len(ready)]
        if choice >= len(ready):
            self.world.kill(task.process)
        return task


class _Frozen(World):
    """A world in which no time passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.changes = 0
        self.killed: list[str] = []
        self._is_alone = False
        self._seen: dict[Process, int] = {}

    def pass_turn(self, task: Task) -> None:
        if not self._is_alone:
            super().pass_turn(task)

    def call(self, task: Task, name: str, path: str, act: Any, fail: Any = None) -> Any:
        # These commute with every call of another process: the folder stays, and a claim has its
        # content before it has its name.
        self._is_alone = name in _ALONE or (path == _FOLDER and name in ("mkdir", "stat"))
        try:
            return super().call(task, name, path, act)
        finally:
            self._is_alone = False

    def wait(self, until: float | None, holds: Callable[[], bool] | None = None) -> None:
        before = self.changes
        super().wait(None, holds or (lambda: self.changes != before))
        process = self.current.process  # type: ignore[union-attr]
        self._seen[process] = hash((self._seen.get(process), "woken"))

    def kill(self, process: Process) -> None:
        self._log("killed", process)
        process.dead = True
        self.changes += 1
        self.killed.append(process.name)

    def end(self, task: Task, *, first: bool) -> None:
        self.changes += 1
        super().end(task, first=first)

    def _record(self, process: Process, name: str, path: str, result: Any) -> None:
        super()._record(process, name, path, result)
        if name not in _READS:
            self.changes += 1
        if isinstance(result, os.stat_result):
            result = result.st_size, result.st_nlink
        elif isinstance(result, int) and name in ("open", "create"):
            result = "descriptor"
        elif isinstance(result, list):
            result = tuple(sorted(result))
        self._seen[process] = hash((self._seen.get(process), name, path, result))

    def is_new(self, process: Process) -> bool:
        """Return True if a process has made no call yet."""
        return process not in self._seen

    def state(self) -> int:
        """Return a hash of the files and of all that the processes have seen."""
        tasks = [(t.process.number, t.is_first, t.began, t.is_ready(0.0)) for t in self.tasks]
        seen = [(self._seen.get(p), p.dead) for p in self.processes]
        return hash((frozenset(self.files.tree().items()), tuple(seen), tuple(sorted(tasks))))


class Search:
    """Search of all interleavings of ``builders`` processes, of which ``kills`` may be ended."""

    def __init__(self, builders: int, kills: int = 0) -> None:
        self.kills = kills
        self.states: set[int] = set()
        self.waiting: list[list[int]] = [[]]
        self.runs = self.completed = 0
        self._builders = builders

    def run(self, most: int | None = None) -> bool:
        """Run all interleavings, or at most ``most``; return True if none is left.

        Raises:
            AssertionError: two processes build at a time, or the result is built twice without a
                kill, or something is left. Its text has the calls of the run.
        """
        while self.waiting and self.runs != most:
            self._run(self.waiting.pop())
            if self.runs % 500 == 0:
                gc.collect()  # the worlds of these runs
        return not self.waiting

    def _run(self, given: Sequence[int]) -> None:
        self.runs += 1
        choices = _Choices(self, given)
        world: Any = _Frozen(choices, LOCAL, restore=restore)
        choices.world = world
        world.calls = Calls(world)
        world.files.mkdir(_FOLDER)
        machine = Machine("node")
        builds: list[Process] = []
        active: list[Process] = []

        def build() -> bool:
            process = LOCAL.task.process  # type: ignore[union-attr]
            assert all(other.dead for other in active), "two processes build at the same time"
            active.append(process)
            builds.append(process)
            os.mkdir(_RESULT)
            active.remove(process)
            return True

        def program() -> None:
            assert build_once(_FOLDER, "key", lambda: os.path.exists(_RESULT) or None, build)

        for number in range(self._builders):
            world.start(machine, f"p{number}", program)
        try:
            world.run()
            assert len(builds) <= 1 + len(world.killed), f"{len(builds)} builds"
            left = world.files.tree().keys() - {"folder", "folder/result"}
            assert not left or world.killed, f"left in the folder: {left}"
        except _Known:
            return
        except BaseException as error:
            raise AssertionError(f"{error!r}\n{world.transcript()}") from error
        self.completed += 1
