"""Comparison of a framework's datasets with the lock of a run: ``install(lock=…)``.

On rank 0 the .idx files of a dataset are hashed, and the receipts of the first, the middle and the
last block of steps that it serves are computed from its own arrays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from megaindex.adapters.reports import Reports, on_rank_0
from megaindex.builders.described import fill_uncounted
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.block_receipts import receipts_between
from megaindex.index.receipts import fingerprint_keys
from megaindex.index.spans import Index
from megaindex.lock.check import fault_error, source_fault
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.make import block_bounds, step_bounds_of

_REMEDY = "give the framework the settings of the lock, or lock the run again"


class LockedRun:
    """A lock that a framework's datasets must agree with.

    Args:
        lock: the lock, or its path.
        order: name of the framework's order.

    Raises:
        InvalidArgument: the lock is not of a run under this framework, or of one in phases.
        FormatError, StorageError: the lock is damaged, or cannot be read.
    """

    def __init__(self, lock: str | os.PathLike[str] | Lock, order: str) -> None:
        self._lock = lock if isinstance(lock, Lock) else read_lock(lock)
        settings = self._lock.content["settings"]
        theirs = settings["run"]["order"]["name"] if settings["kind"] == "run" else "a recipe"
        if theirs != order:
            raise InvalidArgument(
                f"{self._lock.path}: must be the lock of a run in order {order}, got {theirs}; "
                "open that run with megaindex.lock.open_run"
            )
        if self._lock.content["subsets"]["train"]["skip"] is not None:
            raise InvalidArgument(
                f"{self._lock.path}: is of a run with skips, whose datasets are not compared with "
                "a lock; verify it with `megaindex verify`, and install with skip, without lock"
            )
        if settings["run"]["phases"]:
            raise InvalidArgument(
                f"{self._lock.path}: is of a run with --phase-transition-iterations, whose "
                "datasets are built phase by phase; verify it with `megaindex verify`, and install "
                "without lock"
            )

    def __str__(self) -> str:
        return f"lock {self._lock.path}"

    def check(self, subset: str, index: Index, prefixes: Sequence[str], reports: Reports) -> None:
        """Compare a dataset with a subset of the lock, on rank 0.

        Args:
            subset: train, valid or test.
            index: the samples that the framework will serve.
            prefixes: prefix of the pair of each source.
            reports: log of the framework's adapter.

        Raises:
            FormatError: they differ; the message names the file or the setting.
        """
        if not on_rank_0():
            return
        if subset not in self._lock.content["subsets"]:
            reports.leave(
                "lock", subset, f"{self._lock.path} has no such subset, so it is unchecked"
            )
            return
        locked = self._lock.subset(subset)
        rows = locked["sources"]
        if len(rows) != len(prefixes):
            raise self._error(subset, "sources", str(len(rows)), str(len(prefixes)))
        for row, prefix in zip(rows, prefixes, strict=True):
            fault = source_fault(self._lock.sources[row], prefix)
            if fault is not None:
                raise fault_error(self._lock, *fault, f" (source {row})")
        self._check_samples(subset, index)

    def _check_samples(self, subset: str, index: Index) -> None:
        locked = self._lock.subset(subset)
        node, served = locked["index"], locked["samples"]
        starts_over = node["order"] == "sequence"
        if starts_over:  # GPT-NeoX's loader, after the first range
            node, served = node["parts"][0]["index"], node["parts"][0]["ranges"][0][1]
        if index.num_samples < served:
            raise self._error(subset, "samples", f"at least {served}", str(index.num_samples))
        keys = fingerprint_keys(self._lock.fingerprints(subset))
        receipts = locked["receipts"]
        bounds = block_bounds(step_bounds_of(locked), receipts["block_steps"])
        blocks = np.flatnonzero(np.array(bounds[1:]) <= served)
        for block in sorted({int(blocks[0]), int(blocks[blocks.size // 2]), int(blocks[-1])}
                            if blocks.size else ()):  # fmt: skip
            ours = fill_uncounted(index, node.get("uncounted", 0))
            (receipt,) = receipts_between(ours, bounds[block : block + 2], keys)
            if str(receipt) != receipts["blocks"][block]:
                first = block * receipts["block_steps"]
                where = f"the receipt of steps {first} to {first + receipts['block_steps'] - 1}"
                raise self._error(subset, where, receipts["blocks"][block], str(receipt))

    def _error(self, subset: str, what: str, expected: str, found: str) -> FormatError:
        return FormatError(
            f"{self._lock.path}: {subset}: {what} must be {expected}, got {found} from the "
            f"framework: its sources, split, seed, weights, batch sizes or length differ; {_REMEDY}"
        )
