"""Simulated processes on simulated machines, of which one runs at a time.

A process is a thread that runs real code. Before each of its calls to the system it may be
suspended in favour of another, as `Decisions` says, or meet a fault. So a run depends on the
decisions alone, and repeats when they do.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from robustness.simulation.filesystem import FileSystem, failure

CALL_SECONDS = 1e-4
_BEGIN = 1_000_000.0  # seconds of the first call
_MOST_CALLS = 30_000
_NAMES = ("write", "writev", "pwrite", "copy_file_range", "posix_fallocate")
_FULL = (*_NAMES, "mkdir", "link", "symlink", "rename", "create")


class Killed(BaseException):
    """Ends the thread of a process that was killed; its calls have no effect any more."""


class Stuck(Exception):
    """No process can go on, or one never ends."""


class Decisions:
    """Choices of one run, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._switch = self._random.choice((0.01, 0.05, 0.2, 0.6))

    def draw(self, count: int) -> int:
        """Return a number below ``count``."""
        return int(self._random.random() * count)

    def next(self, ready: Sequence[Task], current: Task | None) -> Task:
        """Return the task that runs next, one of ``ready``."""
        if len(ready) == 1 or (current in ready and self._random.random() >= self._switch):
            return current if current in ready else ready[0]  # type: ignore[return-value]
        return ready[self.draw(len(ready))]


@dataclass(kw_only=True)
class Faults:
    """Faults that a run may meet: ``budget`` of ``kinds``, each call with a chance of 1 to
    ``rarity``."""

    kinds: Sequence[str] = ()
    budget: int = 0
    rarity: int = 50


@dataclass(eq=False)
class Machine:
    """A machine; ``absent`` holds the names that its client of a network file system takes for
    missing, with the time until which it does."""

    name: str
    boot: int = 0
    pids: int = 100
    absent: dict[tuple[Any, str], float] = field(default_factory=dict)


@dataclass(eq=False)
class Process:
    """A process; ``program`` runs in its first task, again after a power loss."""

    world: World
    machine: Machine
    name: str
    pid: int
    program: Callable[[], object]
    lingers: bool
    """Goes on until its background tasks end, as a training run does."""
    number: int = 0
    dead: bool = False
    is_zombie: bool = False
    was_hit: bool = False
    """Met a fault that it may report as an error."""
    frozen_until: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    """Values of the package's module variables."""
    tokens: int = 0
    """Random names given so far."""


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, function: Callable[[], object], *, first: bool) -> None:
        self.process = process
        self.began = self.ended = False
        self.until: float | None = None
        self.holds: Callable[[], bool] | None = None
        self._function = function
        self.is_first = first
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def is_ready(self, now: float) -> bool:
        if self.process.dead:
            return True  # to end
        if self.process.frozen_until > now:
            return False
        if self.holds is not None and self.holds():
            return True
        return (self.holds is None and self.until is None) or self.wakes(now)

    def wakes(self, now: float) -> bool:
        return self.until is not None and self.until <= now

    def wait_for_turn(self) -> None:
        self.baton.acquire()

    def _run(self) -> None:
        self.baton.acquire()
        self.began = True
        world = self.process.world
        world.local.task = self
        try:
            if not self.process.dead:
                self._function()
        except Killed:
            pass
        except BaseException as error:
            world.fail(error)
        world.end(self, first=self.is_first)

    def join(self) -> None:
        self.thread.join()


class World:
    """Machines that share a file system, their processes, and one clock."""

    def __init__(
        self,
        decisions: Decisions,
        local: Any,
        *,
        faults: Faults | None = None,
        shared: bool = False,
        restore: Callable[[Process | None, Process], object] = lambda old, new: None,
    ) -> None:
        self.decisions = decisions
        self.local = local
        self.shared = shared
        """True for a network file system of several machines; False for a disk of one."""
        self.faults = faults or Faults()
        self.now = _BEGIN
        self.wall_offset = 0.0
        self.files = FileSystem(decisions.draw, self._wall_clock)
        self.trace: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None
        self.processes: list[Process] = []
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.before_call: Callable[[Task], object] = lambda task: None
        self.restarts: Callable[[Process], bool] = lambda process: True
        self.happened: set[str] = set()
        """Kinds of the faults that were met."""
        self.calls: Any = None
        """System calls of this world."""
        self._restore = restore
        self._done = threading.Lock()
        self._done.acquire()

    def _wall_clock(self) -> int:
        self.now += 1e-6
        return int((self.now + self.wall_offset) * 1e9)

    # --- processes ---------------------------------------------------------------------------

    def start(self, machine: Machine, name: str, program: Callable[[], object]) -> Process:
        machine.pids += 1
        lingers = self.decisions.draw(2) == 1
        number = len(self.processes) + 1
        process = Process(self, machine, name, machine.pids, program, lingers, number)
        self.processes.append(process)
        self.spawn(process, program, first=True)
        return process

    def spawn(self, process: Process, function: Callable[[], object], *, first: bool) -> Task:
        task = Task(process, function, first=first)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        """Run until every process has ended; raise the first error of a program."""
        if self.tasks:
            self._hand_over(self._next(None))
            self._done.acquire()
        if self.error is not None:
            raise self.error

    def end(self, task: Task, *, first: bool) -> None:
        """Note the end of a task, as its last act."""
        task.ended = True
        self.tasks.remove(task)
        process = task.process
        rest = [other for other in self.tasks if other.process is process]
        if (first and not process.lingers) or not rest:
            self._log("exit", process)
            process.dead = True
        if not self.tasks:
            self._done.release()
            return
        self._hand_over(self._next(None))

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        self.error = self.error or error
        for process in self.processes:
            process.dead = True

    def kill(self, process: Process) -> None:
        """End a process without its cleanup."""
        self._log("killed", process)
        process.dead = True
        process.is_zombie = self.decisions.draw(4) == 0

    def lose_power(self, machine: Machine) -> None:
        """End all processes of a machine, and boot it: first processes run their programs again."""
        self._log("power lost", machine)
        if not self.shared:
            self.files.lose_power()
        machine.boot += 1
        machine.absent.clear()
        for process in list(self.processes):
            if process.machine is machine:
                ended, process.dead, process.is_zombie = process.dead, True, False
                if not ended and self.restarts(process):
                    self.start(machine, f"{process.name}'", process.program)

    # --- scheduling --------------------------------------------------------------------------

    def call(
        self,
        task: Task,
        name: str,
        path: str,
        act: Callable[[], Any],
        fail: Callable[[int], object] = lambda number: None,
    ) -> Any:
        """Perform a system call of a task, after others had their turn.

        ``fail`` does what the call does before it fails with an error number.
        """
        self.pass_turn(task)
        self.before_call(task)
        process = task.process
        self.now += CALL_SECONDS
        number, after = self._fault(task, name, path)
        try:
            if number:
                fail(number)
                raise failure(number, path)
            result = act()
        except OSError as error:
            self._record(process, name, path, errno.errorcode.get(error.errno or 0))
            raise
        self._record(process, name, path, result)
        if after is not None:
            after()
        return result

    def pass_turn(self, task: Task) -> None:
        """Let the task that is decided on run; return when it is this task's turn again."""
        if task.process.dead:
            raise Killed
        if len(self.trace) > _MOST_CALLS:
            self.fail(Stuck(f"no end after {_MOST_CALLS} calls"))
        chosen = self._next(task)
        if chosen is not task:
            self._hand_over(chosen)
            task.wait_for_turn()
        task.until = task.holds = None
        if task.process.dead:
            raise Killed

    def wait(self, until: float | None, holds: Callable[[], bool] | None = None) -> None:
        """Suspend the current task until a time, or until a condition holds."""
        task = self.current
        assert task is not None
        task.until, task.holds = until, holds
        self.pass_turn(task)

    def _next(self, current: Task | None) -> Task:
        while True:
            ready = [task for task in self.tasks if task.is_ready(self.now)]
            if ready:
                return self.decisions.next(ready, current)
            times = [
                max(task.until or 0.0, task.process.frozen_until)
                for task in self.tasks
                if task.until is not None or task.process.frozen_until > self.now
            ]
            if not times:
                self.fail(Stuck("every process waits for another"))
                continue
            self.now = max(self.now, min(times))

    def _hand_over(self, task: Task) -> None:
        old = None if self.current is None else self.current.process
        if old is not task.process:
            self._restore(old, task.process)
        self.current = task
        task.baton.release()

    # --- faults ------------------------------------------------------------------------------

    def _fault(self, task: Task, name: str, path: str) -> tuple[int, Callable[[], object] | None]:
        """Let a fault happen; return the error number of the call, or what happens after it."""
        faults, draw = self.faults, self.decisions.draw
        if not faults.kinds or faults.budget <= 0 or draw(faults.rarity):
            return 0, None
        kind = faults.kinds[draw(len(faults.kinds))]
        if kind == "reply" and name != "link":
            return 0, None
        faults.budget -= 1
        self.happened.add(kind)
        process, after = task.process, None
        if kind == "error":
            process.was_hit = True
            self._log("meets an error", process)
            return errno.ENOSPC if name in _FULL and draw(2) else errno.EIO, None
        if kind == "reply":

            def after() -> None:
                self._log("the reply is lost", process)
                raise failure(errno.EEXIST, path)

        elif kind == "freeze":
            process.frozen_until = self.now + (0.5, 20.0, 70.0, 200.0)[draw(4)]
            self._log(f"frozen for {process.frozen_until - self.now:.1f} s", process)
            self.pass_turn(task)
        elif kind == "clock":
            self.wall_offset += (-3600.0, -1e-3, 1.0, 1e6)[draw(4)]
            self.now += (0.0, 100.0)[draw(2)]
            self._log("clock jumps", process)
        else:

            def after() -> None:
                if kind == "kill":
                    self.kill(process)
                else:
                    self.lose_power(process.machine)
                raise Killed

            if draw(2):
                after()
        return 0, after

    # --- the trace ---------------------------------------------------------------------------

    def _log(self, event: str, subject: Process | Machine) -> None:
        self.trace.append((self.now, subject.name, event, "", ""))

    def _record(self, process: Process, name: str, path: str, result: Any) -> None:
        self.trace.append((self.now, process.name, name, path, result))

    def transcript(self) -> str:
        """Return the calls and events of the run, one a line."""
        return "\n".join(
            f"{number:5} {now - _BEGIN:11.4f} s  {who:9} {name} {path} {_brief(result)}".rstrip()
            for number, (now, who, name, path, result) in enumerate(self.trace, start=1)
        )


def _brief(result: Any) -> str:
    if result is None:
        return ""
    if isinstance(result, os.stat_result):
        return f"-> inode {result.st_ino}, {result.st_size} bytes, links {result.st_nlink}"
    return f"-> {result if isinstance(result, str) else repr(result)[:90]}"
