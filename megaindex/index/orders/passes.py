"""Passes over the documents: a sparse table each, made when needed and one ahead."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from megaindex.kernels import num_threads
from megaindex.kernels.types import I64

logger = logging.getLogger("megaindex")

_KEPT = 3  # the one before (samples may begin there), the current one, the next


class PassTables:
    """Tables of the last few passes asked for; ``make(block, num_threads)`` makes one.

    Safe to share between threads. A forked process starts without tables: one that its parent was
    making would never be done.
    """

    def __init__(self, make: Callable[[int, int], I64]) -> None:
        self._make = make
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[int, Future[I64]] = OrderedDict()
        # What was asked for last, mostly asked for again: process, block and table.
        self._latest: tuple[int, int, I64] | None = None
        self._prepared: tuple[int, int] | None = None
        self._process = os.getpid()  # last: who sees it finds the rest anew

    def get(self, block: int) -> I64:
        """The table of a block; waits for it if it is being made."""
        process, latest = os.getpid(), self._latest
        if latest is not None and latest[:2] == (process, block):
            return latest[2]
        entry, is_new = self._entry(block)
        if is_new:
            self._fill(block, entry, num_threads())
        table = entry.result()
        self._latest = process, block, table
        return table

    def prepare(self, block: int) -> None:
        """Begin to make the table of a block in the background, unless it is there."""
        if self._prepared == (os.getpid(), block):
            return
        table, is_new = self._entry(block)
        self._prepared = os.getpid(), block
        if is_new:
            # No daemon: the interpreter must not end while a kernel is about to return to it.
            name = f"megaindex-epoch-{block}"
            try:
                threading.Thread(target=self._fill, args=(block, table, 1), name=name).start()
            except RuntimeError as error:  # no more threads: made when it is needed
                logger.info("%s is not prepared ahead: %s", name, error)
                with self._lock:
                    self._tables.pop(block, None)

    def _entry(self, block: int) -> tuple[Future[I64], bool]:
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            is_new = block not in self._tables
            if is_new:
                self._tables[block] = Future()
            self._tables.move_to_end(block)
            table = self._tables[block]
            while len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        return table, is_new

    def _fill(self, block: int, table: Future[I64], threads: int) -> None:
        try:
            table.set_result(self._make(block, threads))
        except BaseException as error:
            with self._lock:
                self._tables.pop(block, None)  # the next call tries again
            table.set_exception(error)
