"""Comparison of a framework's datasets with the lock of a run: ``install(lock=…)``.

On rank 0 the .idx files of a dataset are hashed, and the receipts of the first, the middle and the
last block of steps that it serves are computed from its own arrays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from megaindex.adapters.reports import Reports, on_rank_0
from megaindex.builders.described import fill_uncounted, skipped_index
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.receipts import fingerprint_keys, receipts_between
from megaindex.index.skips import Skips, read_skips
from megaindex.index.spans import Index
from megaindex.lock.check import refuse, sound_files, source_fault
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.make import block_bounds, step_bounds_of
from megaindex.lock.settings import with_files
from megaindex.validation import shown

_REMEDY = "give the framework the settings of the lock, or lock the run again"


class LockedRun:
    """A lock that a framework's datasets must agree with, of a run in the framework's ``order``.

    Raises:
        InvalidArgument: the lock is not of a run under this framework, or of one in phases.
        FormatError, StorageError: the lock is damaged, or cannot be read.
    """

    def __init__(self, lock: str | os.PathLike[str] | Lock, order: str) -> None:
        self._lock = read_lock(lock)
        settings = self._lock.content["settings"]
        theirs = settings["run"]["order"]["name"] if settings["kind"] == "run" else "a recipe"
        if theirs != order:
            raise InvalidArgument(
                f"{self._lock.path}: must be the lock of a run in order {order}, got {theirs}; "
                "open that run with megaindex.lock.open_run"
            )
        if settings["run"]["phases"]:
            raise InvalidArgument(
                f"{self._lock.path}: is of a run with --phase-transition-iterations, whose "
                "datasets are built phase by phase; verify it with `megaindex verify`, and install "
                "without lock"
            )
        self._files = sound_files(self._lock)
        entries = with_files(settings["run"].get("skip", ()), self._files)
        self.skip = read_skips(entries, self._lock.path, "/")
        """The skips of the run; those of --iterations-to-skip are Megatron-LM's own."""

    def __str__(self) -> str:
        return f"lock {self._lock.path}"

    def check(self, subset: str, index: Index, prefixes: Sequence[str], reports: Reports) -> None:
        """Compare the samples that a framework will serve of pairs with a subset of the lock, on
        rank 0.

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
            refuse(self._lock, source_fault(self._lock.sources[row], prefix), f" (source {row})")
        self._check_samples(subset, index)

    def _check_samples(self, subset: str, index: Index) -> None:
        locked = self._lock.subset(subset)
        node, served = locked["index"], locked["samples"]
        skipped = node if node["order"] == "skipped" else None
        if skipped is not None:
            node = skipped["index"]
        if node["order"] == "sequence":  # GPT-NeoX's loader starts over after the first range
            node, served = node["parts"][0]["index"], node["parts"][0]["ranges"][0][1]
        least = served if skipped is None else min(served, skipped["end"])
        if index.num_samples < least:
            raise self._error(subset, "samples", f"at least {least}", str(index.num_samples))
        ours = fill_uncounted(index, node.get("uncounted", 0))
        if skipped is not None:
            documents = [self._lock.sources[row].sequences for row in locked["sources"]]
            ours = skipped_index(skipped, ours, documents, self._files)
        keys = fingerprint_keys(self._lock.fingerprints(subset))
        receipts = locked["receipts"]
        bounds = block_bounds(step_bounds_of(locked), receipts["block_steps"])
        blocks = np.flatnonzero(np.array(bounds[1:]) <= served)
        for block in sorted({int(blocks[0]), int(blocks[blocks.size // 2]), int(blocks[-1])}
                            if blocks.size else ()):  # fmt: skip
            (receipt,) = receipts_between(ours, bounds[block : block + 2], keys)
            if str(receipt) != receipts["blocks"][block]:
                first = block * receipts["block_steps"]
                where = f"the receipt of steps {first} to {first + receipts['block_steps'] - 1}"
                raise self._error(subset, where, receipts["blocks"][block], str(receipt))

    def check_skips(self, skips: Skips) -> None:
        """Compare the positions that a framework's run skips with those of the lock.

        Raises:
            FormatError: they differ, as with another batch size or number of iterations.
        """
        node = self._lock.content["subsets"]["train"]["index"]
        theirs = {name: node[name] for name in ("end", "left_out", "moved")}
        theirs["masked from"] = [mask["from"] for mask in node["masks"]]
        ours = {
            "end": skips.end,
            "left_out": skips.holes.tolist(),
            "moved": skips.holes[skips.is_moved].tolist(),
            "masked from": [mask.first for mask in skips.masks],
        }
        for name, value in theirs.items():
            if ours[name] != value:
                raise self._error("train", f"skip: {name}", shown(value), shown(ours[name]))

    def _error(self, subset: str, what: str, expected: str, found: str) -> FormatError:
        return FormatError(
            f"{self._lock.path}: {subset}: {what} must be {expected}, got {found} from the "
            f"framework: its sources, split, seed, weights, batch sizes or length differ; {_REMEDY}"
        )
