"""All interleavings of builders that claim one key, at the granularity of system calls.

The search runs the builders again from the beginning for every choice of the next process, and
stops where the state is known. A state is the files, and of every process the positions and local
variables of the package's functions that it is in, and the call that it makes next. States that
differ only by an exchange of processes or by the digits of random tokens are one state. Times are
left out: a process that sleeps goes on when a file or a process has changed, and no time passes, so
no claim becomes stale. With ``kills`` any of the processes may be ended before any of its calls.

A directory gives its names in the order in which they came.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from robustness.simulation.calls import LOCAL, Calls, restore
from robustness.simulation.filesystem import ROOT
from robustness.simulation.world import Machine, Process, Task, World

import megaindex
from megaindex.cache import claim
from megaindex.cache.claim import Claim, build_once

_FOLDER = f"{ROOT}/folder"
_RESULT = f"{_FOLDER}/result"
_ALONE = {"read", "write", "close"}
_READS = {"stat", "lstat", "open", "read", "close", "listdir", "scandir", "fsync", "kill"}
_PACKAGE = os.path.dirname(megaindex.__file__)
_PIDS = 7_000_000  # a process is known by the digits of its number in texts
_NAMES = re.compile(r"[0-9a-f]{16}|\b70000\d\d\b")
_UNUSED = {"wait": {"last", "seen"}}
"""Local variables that decide nothing but times, or are equal to those of a function called."""


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
            try:
                self._search.note(self.world)
            except BaseException as error:  # of whatever thread comes here
                self.world.fail(error)
                return ready[0]
            self._search.waiting.extend([*self._made, other] for other in range(1, options))
        self._made.append(choice)
        task = ready[choice % len(ready)]
        if choice >= len(ready):
            self.world.kill(task.process)
        self.world.texts.pop(task, None)
        return task


class _Frozen(World):
    """A world in which no time passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.changes = 0
        self.killed: list[str] = []
        self.builds: list[Process] = []
        self.texts: dict[Task, str] = {}
        """Positions and local variables of processes that have not run since."""
        self._is_alone = False
        self._next_call: dict[Process, str] = {}
        self._seen: dict[Process, int] = {}

    def pass_turn(self, task: Task) -> None:
        if not self._is_alone:
            super().pass_turn(task)

    def call(self, task: Task, name: str, path: str, act: Any, fail: Any = None) -> Any:
        # These commute with every call of another process: the folder stays, and a claim has its
        # content before it has its name.
        self._is_alone = name in _ALONE or (path == _FOLDER and name in ("mkdir", "stat"))
        self._next_call[task.process] = f"{name} {path}"
        try:
            return super().call(task, name, path, act)
        finally:
            self._is_alone = False

    def wait(self, until: float | None, holds: Callable[[], bool] | None = None) -> None:
        before = self.changes
        process = self.current.process  # type: ignore[union-attr]
        self._next_call[process] = "sleep"
        super().wait(None, holds or (lambda: self.changes != before))
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
            result = tuple(result)
        self._seen[process] = hash((self._seen.get(process), name, path, result))

    def is_new(self, process: Process) -> bool:
        """Return True if a process has made no call yet."""
        return process not in self._seen

    def state(self) -> int:
        """Return a hash of the files and of where the processes are."""
        frames = sys._current_frames()
        texts = []
        for process in self.processes:
            parts = [f"{process.pid} {process.dead}"]
            for task in self.tasks:
                if task.process is process and not process.dead:
                    parts.append(f"{task.is_first} {task.began} {task.is_ready(0.0)}")
                    if task.is_first and task.began:
                        parts.append(self._text_of(task, frames[task.thread.ident]))
            texts.append("\n".join(parts))
        tree = self.files.tree()
        built = tree.pop("folder/result", "none")
        files = f"{len(self.builds)} {len(self.killed)} {built} {tree}"
        return min(
            hash(_with_numbers("\n".join((*order, files))))
            for order in itertools.permutations(texts)
        )

    def history(self) -> int:
        """Return a hash of the files and of all results of calls, which decide what comes next."""
        tasks = [(t.process.number, t.is_first, t.began, t.is_ready(0.0)) for t in self.tasks]
        seen = [(self._seen.get(p), p.dead) for p in self.processes]
        return hash((tuple(self.files.tree().items()), tuple(seen), tuple(sorted(tasks))))

    def _text_of(self, task: Task, innermost: FrameType | None) -> str:
        if task not in self.texts:
            process = task.process
            runs = self.current is not None and self.current.process is process
            memory = claim._listed if runs else process.memory["_listed"]
            parts = [self._next_call.get(process, ""), f"{list(memory)}"]
            frame = innermost
            while frame is not None:
                code = frame.f_code
                if code.co_filename.startswith(_PACKAGE):
                    unused = _UNUSED.get(code.co_name, set())
                    values = {k: _plain(v) for k, v in frame.f_locals.items() if k not in unused}
                    parts.append(f"{code.co_name} {frame.f_lasti} {values}")
                elif code.co_name == "build" and code.co_filename == __file__:
                    parts.append("build")
                frame = frame.f_back
            self.texts[task] = "\n".join(parts)
        return self.texts[task]


def _with_numbers(text: str) -> str:
    """Return a text with random tokens and process numbers replaced in their order."""
    numbers: dict[str, str] = {}
    return _NAMES.sub(lambda found: numbers.setdefault(found[0], f"<{len(numbers)}>"), text)


def _plain(value: Any) -> Any:
    """Return a local variable without times and functions."""
    if isinstance(value, Claim):
        value = vars(value)
    if value is None or isinstance(value, (str, int, Path)):
        plain: Any = value
    elif isinstance(value, (list, tuple)):
        plain = [_plain(each) for each in value]
    elif isinstance(value, set):
        plain = sorted(value)
    elif isinstance(value, dict):
        plain = {key: _plain(each) for key, each in value.items()}
    elif isinstance(value, OSError):
        plain = value.errno
    elif (
        isinstance(value, (float, BaseException, TracebackType))
        or callable(value)
        or type(value).__module__ == Calls.__module__
    ):
        plain = type(value).__name__
    else:
        raise TypeError(f"a local variable {value!r} of a type that the search does not know")
    return plain


class Search:
    """Search of all interleavings of ``builders`` processes, of which ``kills`` may be ended.

    With ``by_history`` states are told apart by all results of calls so far, which needs more runs.
    """

    def __init__(self, builders: int, kills: int = 0, *, by_history: bool = False) -> None:
        self.kills = kills
        self.states: set[int] = set()
        self.waiting: list[list[int]] = [[]]
        self.runs = self.completed = 0
        self._builders = builders
        self._histories: set[int] | None = set() if by_history else None

    def note(self, world: _Frozen) -> None:
        """Note the state of a world; raise _Known if it was known."""
        states, state = self.states, world.state()
        if self._histories is not None:
            states.add(state)
            states, state = self._histories, world.history()
        if state in states:
            raise _Known
        states.add(state)

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
        machine = Machine("node", pids=_PIDS)
        builds: list[Process] = world.builds
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
