"""Alternating timing of two sides after a warm-up of each, reported as medians."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measured seconds of both sides for the same work."""

    what: str
    ours: list[float]
    peer: list[float]
    items: int
    """Documents, samples or draws: what ns figures are per."""
    unit: str
    asked: float | None = None
    output_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Return the speed-up of ours: the ratio of medians."""
        return statistics.median(self.peer) / statistics.median(self.ours)

    @property
    def ratio_of_least(self) -> float:
        """Return the ratio of the shortest runs, which other programs disturb least."""
        return min(self.peer) / min(self.ours)

    def nanoseconds(self, side: list[float]) -> float:
        return statistics.median(side) / self.items * 1e9


def processor_seconds() -> float:
    """Return the processor time of all threads, and of the child processes waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Clock:
    """Clock of all measurements of a run: wall time, or the processor time of both sides."""

    _VARIABLE = "MEGAINDEX_BENCH_PROCESSOR_TIME"  # for child processes
    is_of_processor = bool(os.environ.get(_VARIABLE))
    now: Callable[[], float] = staticmethod(
        processor_seconds if is_of_processor else time.perf_counter
    )

    @classmethod
    def use_processor_time(cls) -> None:
        """Measure processor time, also in child processes that are started from now on."""
        os.environ[cls._VARIABLE] = "1"
        cls.is_of_processor = True
        cls.now = staticmethod(processor_seconds)


def alternate(
    ours: Callable[[], object],
    peer: Callable[[], object],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Time ``rounds`` alternating runs of each side, after a warm-up of each.

    ``prepare`` is called before each run and not timed.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, run in zip(seconds, (ours, peer), strict=True):
            prepare()
            if number == 0:
                run()
            else:
                side.append(timed(run))
    return seconds


def timed(run: Callable[[], object]) -> float:
    if not Clock.is_of_processor:
        os.sync()  # write-back of the previous run
    gc.collect()  # else each side would pay for the other's objects
    start = Clock.now()
    result = run()
    seconds = Clock.now() - start
    del result  # freeing is not timed
    return seconds


def remove_cache(cache: Path) -> None:
    """Remove a cache, also while entries are marked as synced in the background."""
    while cache.exists():
        shutil.rmtree(cache, ignore_errors=True)


def timed_after(batches: Iterator[Any], warm_up: int) -> float:
    """Return the seconds for all but the first ``warm_up`` batches."""
    for _ in itertools.islice(batches, warm_up):
        pass
    start = Clock.now()
    for _ in batches:
        pass
    return Clock.now() - start


@contextmanager
def installed_or_not(adapter: Any, wanted: bool) -> Iterator[None]:
    """Run one side of a comparison, with or without the adapter module installed."""
    if wanted:
        adapter.install()
    try:
        yield
    finally:
        adapter.uninstall()


def allow_many_files() -> None:
    """Raise the limit of open files: the frameworks keep each file of thousands of sources open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class PeakMemory:
    """Peak of this process's anonymous memory inside ``with``, in bytes above its start.

    Pages of mapped files, the inputs and outputs, do not count.
    """

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = _anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, _anonymous())

    @property
    def bytes(self) -> int:
        return self._peak - self._start

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._peak = max(self._peak, _anonymous())


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon line")
