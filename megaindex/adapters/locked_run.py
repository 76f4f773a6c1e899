"""Comparison of a framework's datasets with the lock of a run: ``install(lock=…)``.

On rank 0 the .idx files of a dataset are hashed, and the receipts of all its blocks of steps are
computed from its own arrays, in the passes of the framework's loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from megaindex.adapters.reports import Reports, on_rank_0
from megaindex.builders.described import skipped_index
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.blended_index import fill_uncounted
from megaindex.index.receipts import fingerprint_keys
from megaindex.index.skips import Skips, read_skips
from megaindex.index.spans import Index
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.pinned_files import refuse, sound_files, source_fault
from megaindex.run.same_until import compare_receipts
from megaindex.run.subset import first_part, step_bounds_of, with_files
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
        if "amend" in settings["run"]:
            raise InvalidArgument(
                f"{self._lock.path}: is of a run whose blend changed on the way; install with "
                "amend, without lock, and verify the lock with `megaindex verify`"
            )
        if settings["run"]["phases"]:
            raise InvalidArgument(
                f"{self._lock.path}: is of a run with --phase-transition-iterations, whose "
                "datasets are built phase by phase; verify it with `megaindex verify`, and install "
                "without lock"
            )
        if settings["run"].get("exact"):
            raise InvalidArgument(
                f"{self._lock.path}: is of train_epochs under install(exact=True), which shuffles "
                "each pass anew; verify it with `megaindex verify`, and install without lock"
            )
        self._files = sound_files(self._lock)
        entries = with_files(settings["run"].get("skip", ()), self._files)
        self.skip = read_skips(entries, self._lock.path, "/")
        """The skips of the run; those of --iterations-to-skip are Megatron-LM's own."""
        self.identity = self._lock.identity
        """The identity of the run, 32 hex digits."""

    def __str__(self) -> str:
        return f"lock {self._lock.path or '(not written)'}"

    def check(
        self,
        subset: str,
        index: Index,
        prefixes: Sequence[str],
        reports: Reports,
        *,
        limit: int | None = None,
    ) -> None:
        """Compare the samples that a framework will serve of pairs with a subset of the lock: their
        number on every rank, files and content on rank 0.

        Args:
            limit: samples that the framework's loader serves before it starts over; None: it does
                not.

        Raises:
            FormatError: they differ; the message names the file or the setting.
        """
        if not self.has(subset):
            reason = f"the {self} has no such subset, so it is unchecked"
            reports.leave("lock", subset, reason)
            return
        *others, last = (end for _, end in self.passes(subset))
        if index.num_samples < (least := max([*others, last])):
            raise self._error(subset, "samples", f"at least {least}", str(index.num_samples))
        if limit is not None and (limit < last or any(end != limit for end in others)):
            what = "samples of a pass of the loader"
            expected = str(others[0]) if others else f"at least {last}"
            raise self._error(subset, what, expected, str(limit))
        if not on_rank_0():
            return
        rows = self._lock.content["subsets"][subset]["sources"]
        if len(rows) != len(prefixes):
            raise self._error(subset, "sources", str(len(rows)), str(len(prefixes)))
        for row, prefix in zip(rows, prefixes, strict=True):
            refuse(self._lock, source_fault(self._lock.sources[row], prefix), f" (source {row})")
        self._check_samples(subset, index)

    def _check_samples(self, subset: str, index: Index) -> None:
        """Compare the receipts of all blocks of steps."""
        locked = self._lock.subset(subset)
        node, passes = locked["index"], self.passes(subset)
        ours = fill_uncounted(index, first_part(node).get("uncounted", 0))
        if node["order"] == "skipped":
            documents = [self._lock.sources[row].sequences for row in locked["sources"]]
            ours = skipped_index(node, ours, documents, self._files)
        elif len(passes) > 1:
            ours = StretchedIndex(
                stretches=tuple(Stretch(index=ours, samples=range(*each)) for each in passes)
            )
        keys = fingerprint_keys(self._lock.fingerprints(subset))
        _, other = compare_receipts(locked, ours, keys)
        if other is not None:
            where = f"the receipt of steps {other.first_step} to {other.last_step}"
            raise self._error(subset, where, shown(other.theirs), shown(other.ours))

    def has(self, subset: str) -> bool:
        """Return True if the lock has a subset."""
        return subset in self._lock.content["subsets"]

    def end(self, subset: str) -> int:
        """Return the positions of a subset, without those of samples moved behind the end."""
        locked = self._lock.content["subsets"][subset]
        number: int = locked["index"].get("end", locked["samples"])
        return number

    def passes(self, subset: str) -> list[tuple[int, int]]:
        """Return the samples [begin, end) of the data that the loader serves in each pass."""
        locked = self._lock.content["subsets"][subset]
        node: Any = locked["index"]
        if node["order"] != "sequence":
            return [(0, self.end(subset))]
        found: list[tuple[int, int]] = []
        for begin, end, times in node["parts"][0]["ranges"]:
            for _ in range(times):
                before = found.pop()[0] if found and found[-1][1] == begin else begin
                found.append((before, end))
        return found

    def starts(self, subset: str, position: int) -> list[int]:
        """Return the first sample of each pass from a position of the run on."""
        found = []
        for begin, end in self.passes(subset):
            if position < end - begin:
                found.append(begin + max(0, position))
            position -= end - begin
        return found

    def check_steps(self, iterations: int | None, batch_size: Callable[[int], int]) -> None:
        """Compare the steps of training with those of the lock.

        Args:
            iterations: number of steps, without skips; None: unknown.
            batch_size: function of the samples consumed that returns the global batch size.

        Raises:
            FormatError: they differ.
        """
        bounds = self.bounds
        if iterations is not None and iterations != len(bounds) - 1:
            raise self._error("train", "iterations", str(len(bounds) - 1), str(iterations))
        for step, (begin, end) in enumerate(pairwise(bounds)):
            if batch_size(begin) != end - begin:
                what = f"the global batch size of step {step}"
                raise self._error("train", what, str(end - begin), str(batch_size(begin)))

    @property
    def bounds(self) -> list[int]:
        """The first position of each step of training without skips, and the end of the last."""
        bounds = step_bounds_of(self._lock.content["subsets"]["train"])
        before_moved: list[int] = bounds[bounds <= self.end("train")].tolist()
        return before_moved

    def check_resumed(self, consumed_samples: int, iteration: int | None) -> None:
        """Compare the place from which training goes on with the steps of the lock.

        Args:
            consumed_samples: samples served before, without those skipped.
            iteration: iterations made before; None: unknown.

        Raises:
            FormatError: they are other samples than those of the first steps.
        """
        bounds = self.bounds
        expected = bounds if iteration is None else bounds[iteration : iteration + 1]
        if consumed_samples not in expected:
            steps = "whole steps" if iteration is None else f"{iteration} iterations"
            wanted = shown(expected[0]) if len(expected) == 1 else "those of whole steps"
            what = f"samples consumed by {steps}"
            raise self._error("train", what, wanted, str(consumed_samples))

    def check_samples(self, subset: str, samples: int | None) -> None:
        """Compare the number of samples that a framework requests of a subset; None: all.

        Raises:
            FormatError: they make fewer or more steps than the lock has.
        """
        run = self._lock.content["settings"]["run"]
        late = run["evaluation"]["start"] or run.get("iterations_to_skip")
        if not self.has(subset) or (subset == "valid" and late):  # of which others are read
            return
        end, last = self.end(subset), self._lock.content["subsets"][subset]["steps"][-1][1]
        if samples is None or not 0 <= samples - end < last:
            found = "those of whole epochs" if samples is None else str(samples)
            raise self._error(subset, "samples requested", str(end), found)

    def check_skips(self, skips: Skips) -> None:
        """Compare the positions that a framework's run skips with those of the lock.

        Raises:
            FormatError: they differ, as with another batch size or number of iterations.
        """
        node = self._lock.content["subsets"]["train"]["index"]
        theirs = {name: node[name] for name in ("end", "left_out", "moved")}
        for name, removes in (("masked from", False), ("removed from", True)):
            theirs[name] = [
                mask["from"] for mask in node["masks"] if mask.get("remove", False) == removes
            ]
        ours = {
            "end": skips.end,
            "left_out": skips.holes.tolist(),
            "moved": skips.holes[skips.is_moved].tolist(),
            "masked from": [mask.first for mask in skips.masks if not mask.remove],
            "removed from": [mask.first for mask in skips.masks if mask.remove],
        }
        for name, value in theirs.items():
            if ours[name] != value:
                raise self._error("train", f"skip: {name}", shown(value), shown(ours[name]))

    def _error(self, subset: str, what: str, expected: str, found: str) -> FormatError:
        where = self._lock.path or "the lock"
        return FormatError(
            f"{where}: {subset}: {what} must be {expected}, got {found} from the "
            f"framework: its sources, split, seed, weights, batch sizes or length differ; {_REMEDY}"
        )
