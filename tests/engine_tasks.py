"""Tasks that come to grief, for engines of every kind; workers import them from here."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from megaindex.errors import MissingFile


def square(number: int) -> int:
    return number * number


def note_and_sleep(folder: str) -> None:
    """Says which process runs it, then takes longer than any test."""
    path = Path(folder) / f"pid-{os.getpid()}"
    path.touch()
    try:
        time.sleep(600)
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


def refuse(task: Raising) -> int:
    if task.kind == "missing":
        raise MissingFile("/data/x.idx: does not exist; check the path")
    if task.kind == "picky":
        raise Picky(1, 2)
    if task.kind == "value":
        raise ValueError("no number")
    (Path(task.folder) / f"began-{task.number}").touch()
    time.sleep(0.1)
    return task.number
