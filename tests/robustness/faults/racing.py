"""Processes that want the same cache entry at the same time, and what they report of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import megaindex
from megaindex.cache import claim
from megaindex.index.orders import framework as shuffled

Hook = Callable[["Race", int], None]


def nothing(race: Race, number: int) -> None:
    """The default of both hooks."""


@dataclass(frozen=True)
class Race:
    """``count`` processes that start together and each build, wait or find."""

    folder: Path
    """Holds the corpus, and takes the reports."""
    cache: Path
    count: int
    stale_after: float = 60.0
    before: Hook = nothing
    """What a process does before it starts, such as changing how it sees the file system."""
    during: Hook = nothing
    """What a process does in the middle of its build."""

    def run(self) -> list[int]:
        """Exit statuses in the order of the processes, signals negative."""
        receive, send = os.pipe()  # its closing is the starting signal
        children = [self._start(number, receive, send) for number in range(self.count)]
        os.close(send)
        os.close(receive)
        stopped = [child for child in children if not self._ends(child)]
        for child in stopped:  # only now, when all others are done
            os.kill(child, signal.SIGCONT)
        statuses = {child: os.waitpid(child, 0)[1] for child in stopped}
        return [os.waitstatus_to_exitcode({**self._statuses, **statuses}[c]) for c in children]

    def reports(self, kind: str) -> list[str]:
        """What processes wrote into ``kind-<number>``."""
        return [path.read_text() for path in sorted(self.folder.glob(f"{kind}-*"))]

    def report(self, kind: str, number: int, text: str) -> None:
        (self.folder / f"{kind}-{number}").write_text(text)

    def is_first(self) -> bool:
        """Whether no other process has asked this."""
        try:
            (self.folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @property
    def _statuses(self) -> dict[int, int]:
        return self.__dict__.setdefault("_found", {})

    def _ends(self, child: int) -> bool:
        """False if it stopped instead."""
        _, status = os.waitpid(child, os.WUNTRACED)
        self._statuses[child] = status
        return not os.WIFSTOPPED(status)

    def _start(self, number: int, receive: int, send: int) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.close(send)
            os.read(receive, 1)
            self._take_part(number)
            status = 0
        except BaseException as error:
            self.report("failed", number, repr(error))
        finally:
            os._exit(status)

    def _take_part(self, number: int) -> None:
        claim.build_once.__kwdefaults__["stale_after"] = self.stale_after
        real = shuffled.build

        def build(*args: Any) -> None:
            self.report("began", number, "")
            self.during(self, number)
            real(*args)
            self.report("built", number, "")

        shuffled.build = build
        self.before(self, number)
        index = megaindex.build_index(
            self.folder / "corpus", sequence_length=16, seed=1, epochs=3, cache_dir=self.cache
        )
        self.report("got", number, digest(index))


def digest(index: Any) -> str:
    """Of the bytes of its arrays."""
    names = ("document_index", "sample_index", "shuffle_index")
    return " ".join(xxhash.xxh3_64_hexdigest(getattr(index, name).tobytes()) for name in names)


def lasting(race: Race, number: int) -> None:
    """A build during which all others come."""
    time.sleep(0.5)


def killed(race: Race, number: int) -> None:
    if race.is_first():
        os.kill(os.getpid(), signal.SIGKILL)


def frozen(race: Race, number: int) -> None:
    if race.is_first():
        os.kill(os.getpid(), signal.SIGSTOP)
