"""Tasks that come to grief, for engines of every kind; workers import them from here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaindex.errors import FormatError, MissingFile


def square(number: int) -> int:
    return number * number


def process_id(_: int) -> int:
    """Takes so long that every worker gets some of a few tasks."""
    time.sleep(0.02)
    return os.getpid()


def note_and_sleep(folder: str) -> None:
    """Says which process runs it, then takes longer than any test."""
    path = Path(folder) / f"pid-{os.getpid()}"
    try:
        path.touch()
        for _ in range(6000):
            time.sleep(0.1)  # Ray interrupts Python code and kernels, no call that sleeps
    finally:
        path.rename(Path(folder) / f"tidied-{os.getpid()}")


@dataclass(frozen=True, kw_only=True)
class Deadly:
    """A task that kills its worker so many times, then returns its number."""

    number: int
    folder: str
    deaths: int = 0

    def __str__(self) -> str:
        return f"deadly task {self.number}"


def survive(task: Deadly) -> int:
    """Every run leaves a file, so that they can be counted."""
    runs = Path(task.folder) / f"task-{task.number}"
    runs.mkdir(exist_ok=True)
    earlier = len(list(runs.iterdir()))
    (runs / f"{earlier}").touch()
    if earlier < task.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number


def runs_of(folder: Path, number: int) -> int:
    return len(list((folder / f"task-{number}").iterdir()))


@dataclass(frozen=True, kw_only=True)
class Raising:
    """A task that raises; others leave a file when they begin."""

    number: int
    folder: str
    kind: str = ""


class Picky(Exception):
    """Cannot be pickled: its arguments are not those that it was made of."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Prefixed(Exception):
    """Pickled, it becomes one with another text."""

    def __init__(self, what: str) -> None:
        super().__init__(f"wrong: {what}")


def refuse(task: Raising) -> int:
    if task.kind == "prefixed":
        raise Prefixed("the file")
    if task.kind == "missing":
        raise MissingFile("/data/x.idx: does not exist; check the path")
    if task.kind == "format":
        raise FormatError("x.idx: byte 0; rewrite it")
    if task.kind == "picky":
        raise Picky(1, 2)
    if task.kind == "value":
        raise ValueError("no number")
    (Path(task.folder) / f"began-{task.number}").touch()
    time.sleep(0.1)
    return task.number


def where_and_what(_: None) -> tuple[str, str | None]:
    return os.getcwd(), os.environ.get("MEGAINDEX_NUM_THREADS")


def interrupted(call: Callable[[], Any], folder: Path) -> None:
    """Call, and press Ctrl-C once two tasks of `note_and_sleep` run."""
    watch = threading.Thread(target=_interrupt_when_two_run, args=(folder,))
    watch.start()
    try:
        call()
    finally:
        watch.join()


def _interrupt_when_two_run(folder: Path) -> None:
    until(lambda: len(list(folder.iterdir())) == 2, 30)
    os.kill(os.getpid(), signal.SIGINT)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def all_tidied(folder: Path) -> None:
    """Both tasks of `note_and_sleep` had time to tidy up, and nothing of them runs."""
    assert until(lambda: len(list(folder.glob("tidied-*"))) == 2, 5)
    pids = [int(path.name.rpartition("-")[2]) for path in folder.iterdir()]
    assert len(pids) == 2
    assert until(lambda: not any(map(runs_a_task, pids)), 5)


def runs_a_task(pid: int) -> bool:
    """Whether a process is alive, and not one that Ray keeps for later."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and not command.startswith("ray::IDLE")


def linger(task: Deadly) -> int:
    """As `survive`, and takes its time."""
    number = survive(task)
    time.sleep(0.2)
    return number
