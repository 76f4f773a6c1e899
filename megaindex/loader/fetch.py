"""The reads of one batch, shared by a few threads, and who waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megaindex.errors import StorageError

Piece = tuple[int, memoryview]
"""Offset in a file or object, and where the bytes go."""
ReadEach = Callable[[Sequence[Piece]], Iterable[None]]
"""Fills the pieces of one file or object in turn, yielding after each."""


@dataclass(eq=False)
class Errand:
    """What one thread reads in turn."""

    path: str
    read_each: ReadEach
    pieces: list[Piece]
    done: int = 0
    """Pieces that were read."""

    @property
    def offset(self) -> int:
        """Where the read under way begins."""
        return self.pieces[min(self.done, len(self.pieces) - 1)][0]


class Fetch:
    """All errands of a batch; `run` is called by each thread that helps, `wait` by the reader."""

    def __init__(self, errands: list[Errand]) -> None:
        self.errands = errands
        self._changed = threading.Condition()
        self._next = 0
        self._finished = 0
        self._running: list[Errand] = []
        self._error: BaseException | None = None
        self.hanging: list[Errand] = []

    def run(self) -> bool:
        """Errands until none is left; False if the batch was given up during one of them."""
        while (errand := self._begin()) is not None:
            error: BaseException | None = None
            try:
                for _ in errand.read_each(errand.pieces):
                    errand.done += 1
            except BaseException as caught:  # raised where the batch is waited for
                error = caught
            with self._changed:
                if self.hanging:
                    return False
                self._running.remove(errand)
                self._finished += 1
                self._error = self._error or error
                self._changed.notify()
        return True

    def wait(self, timeout: float) -> None:
        """Until everything is read; nothing further is begun if that fails.

        Raises:
            StorageError: what the first failing read raised, or that none was finished for
                ``timeout`` seconds; `hanging` then has the errands whose threads do not return.
        """
        with self._changed:
            try:
                while self._finished < len(self.errands) and self._error is None:
                    if not self._progresses(timeout):
                        self.hanging = self._running
                        raise self._stalled(timeout)
            finally:  # also after an interrupt
                self._next = len(self.errands)
            if self._error is not None:
                raise self._error

    def _stalled(self, timeout: float) -> StorageError:
        # with none under way, the threads hang in other batches
        errand = (self._running or self.errands)[0]
        return StorageError(
            f"{errand.path}: a read at byte {errand.offset} has not returned for {timeout:g} s "
            f"({len(self._running)} such reads); check the device or the file server, then go on "
            "from the last checkpoint"
        )

    def _begin(self) -> Errand | None:
        with self._changed:
            if self._next >= len(self.errands):
                return None
            errand = self.errands[self._next]
            self._next += 1
            self._running.append(errand)
            return errand

    def _progresses(self, timeout: float) -> bool:
        """Wait for an errand to finish; whether that, or at least a read, was done in time."""
        finished, read = self._finished, sum(errand.done for errand in self._running)
        deadline = time.monotonic() + timeout
        while self._finished == finished and self._error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return sum(errand.done for errand in self._running) > read
            self._changed.wait(left)
        return True
