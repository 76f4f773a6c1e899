"""One trial: a child process does something, a fault strikes at its n-th call, it says what came.

for outcome in trials(scenario, folder, kill):
    ...  # as many as the scenario has calls
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from robustness.faults.injection import Act, Injector

from megaindex.errors import MegaIndexError


class Scenario(Protocol):
    """Something that changes files, from a known state to another."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Make the state before."""
        ...

    def act(self, folder: Path) -> None:
        """What is interrupted."""
        ...

    def state(self, folder: Path) -> str:
        """ "old", "none" or "new"; raises AssertionError for anything else."""
        ...

    def strays(self, folder: Path) -> list[str]:
        """Names that are neither of the state before nor of the one after."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What became of one trial."""

    number: int
    """Of the call that was struck; 0 where the act has fewer calls."""
    call: str
    """That call and its path, as far as the child could still tell."""
    said: str
    """``done``, ``killed``, or the type and the message of what was raised."""


def kill(name: str, path: str) -> None:
    """The process ends here, with nothing flushed and nothing cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> Act:
    """The call fails with that errno."""

    def act(name: str, path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    return act


def interrupt(name: str, path: str) -> None:
    """Ctrl-C: Python raises between any two steps, so also when a call is over."""
    raise KeyboardInterrupt


def trials(
    scenario: Scenario, folder: Path, act: Act, *, first: int = 1, step: int = 1, **how: bool
) -> Iterator[tuple[Outcome, Path]]:
    """A trial for every ``step``-th call of the scenario, each in a new folder of its own.

    Args:
        first: number of the first call that is struck.
        how: which calls count, and when they are struck, as the options of `Injector`.
    """
    number = first
    while True:
        place = folder / f"{scenario.name}-{number}"
        place.mkdir(parents=True)
        scenario.prepare(place)
        outcome = _trial(scenario, place, number, act, how)
        if not outcome.number:
            assert outcome.said == "done", outcome
            shutil.rmtree(place)
            return
        yield outcome, place
        shutil.rmtree(place)
        number += step


def _trial(scenario: Scenario, place: Path, number: int, act: Act, how: dict[str, bool]) -> Outcome:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _in_child(scenario, place, Injector(str(place), number, act, **how), send)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        said = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return Outcome(number, said, "killed")
    assert status == 0, f"{scenario.name}, call {number}: exit status {status}: {said}"
    call, _, said = said.partition("\n")
    return Outcome(number if call else 0, call, said)


def _in_child(scenario: Scenario, place: Path, injector: Injector, send: int) -> None:
    status = 1
    try:
        injector.install()
        try:
            scenario.act(place)
            said = "done"
        except MegaIndexError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"untyped {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(send, f"{injector.fired or ''}\n{said}".encode())
        status = 0
    finally:
        os._exit(status)


ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EROFS", "EACCES")}
