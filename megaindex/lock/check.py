"""Checks of a lock: its text, its sources, its settings, and receipts of its samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megaindex._types import U64
from megaindex.builders.described import build_described
from megaindex.builders.recipe import ValidationCache
from megaindex.cache.fingerprint import corpus_fingerprint, mark_fingerprint
from megaindex.errors import (
    FormatError,
    InvalidArgument,
    MegaIndexError,
    OutOfRange,
    StorageError,
)
from megaindex.format import IndexedDataset
from megaindex.format.findings import Collector, Report
from megaindex.format.header import Fault
from megaindex.index.receipts import Receipt, fingerprint_keys, receipts_between
from megaindex.index.spans import Index
from megaindex.io.paths import path_text
from megaindex.lock.lengths import pairs_of_lengths
from megaindex.lock.lock_file import Lock, parse_lock
from megaindex.lock.pinned_files import (
    RESTORE,
    SEARCH,
    Folder,
    differing_chunks,
    file_fault,
    located,
    located_files,
    pin_fault,
    provenance_fault,
    provenance_hash,
    source_fault,
    token_hashes,
)
from megaindex.lock.settings import most_samples, read_settings, unlike
from megaindex.objects.files import stat_path
from megaindex.progress import Bar, silent
from megaindex.run.subset import block_bounds, first_step, step_bounds_of
from megaindex.validation import error_text, shown

Progress = Callable[[int, int], None]

_MOST_DIFFERENCES = 8


def verify_lock(
    path: Folder,
    *,
    step: int | range | None = None,
    subset: str = "train",
    whole: bool = False,
    tokens: bool = False,
    search: Folder | None = None,
    lengths: Folder | None = None,
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
    bar: Bar = silent,
) -> Report:
    """Check that the data of a lock are what they were, and that they give the same samples.

    Every byte of the .idx files is read, the settings are resolved again, and the receipts of the
    first, the middle and the last block of steps are computed.

    Args:
        path: the lock.
        step: check the receipts of the blocks of steps that hold this step, from 0, or a range of
            steps, and the lengths of the sources, in place of all that.
        subset: of the step: train, valid or test.
        whole: compute the receipts of all samples.
        tokens: read the .bin files too; the lock must have been made with ``tokens``.
        search: folder in which pairs are sought that are not at their paths.
        lengths: file of the lengths of the sources, in place of the pairs.
        cache_dir: cache of built indices; None: build in memory.
        progress: called with (done, total) samples of which receipts are computed.
        bar: function of the total bytes of the .bin files that returns a function called with the
            bytes read.

    Returns:
        The findings; a report without any means that the run is what it was.

    Raises:
        MissingFile, StorageError: the lock or a file cannot be read.
        InvalidArgument: the lock has no hashes of tokens, or no such step.
    """
    name = path_text(path)
    try:
        lock, edited = parse_lock(path)
    except FormatError as error:
        found = Collector()
        reason = str(error).removeprefix(f"{name}: ")
        found.add(name, pin_fault("lock", "the file", reason, "a lock"))
        return found.report(name, "lock", full=False, counted={})
    check = _Check(lock=lock, lengths=lengths, cache_dir=cache_dir, progress=progress, bar=bar)
    if edited is not None:
        check.found.add(name, edited)
    _check_arguments(lock, tokens, lengths, None if step is None else subset)
    counted = {"pairs": 0}
    try:
        with check.places(search) as there:
            if there and check.files_of(search):
                counted["pairs"] = len(there)
                if step is None:
                    counted["samples"] = check.everything(there, whole=whole)
                else:
                    steps = step if isinstance(step, range) else range(step, step + 1)
                    if not len(steps) or steps.step != 1:
                        raise OutOfRange(f"step must be steps one after another, got {steps}")
                    counted["samples"] = check.steps(there, subset, steps)
                if tokens:
                    counted["bytes"] = check.tokens(there)
    except MegaIndexError as error:  # of values that were edited
        is_of_step = isinstance(error, OutOfRange) and step is not None and edited is None
        if isinstance(error, StorageError) or is_of_step:
            raise
        reason = error_text(error, 200)
        if cache_dir is not None and isinstance(error, InvalidArgument):
            remedy = "remove the entry of the cache, or verify without --cache-dir"
            check.add("cache", "the arrays", reason, "arrays of the run",
                      file=os.fspath(cache_dir), remedy=remedy)  # fmt: skip
        else:
            check.add("content", "the content", reason, "values of a lock")
    full = whole and tokens
    return check.found.report(
        name,
        "lock",
        full=full,
        counted=counted,
        compared=check.compared,
        identity=lock.identity,
        content=lock.content_identity,
    )


def _check_arguments(lock: Lock, tokens: bool, lengths: Folder | None, subset: str | None) -> None:
    """Refuse the comparison of what a lock does not have."""
    if tokens and lock.content["tokens"] is None:
        raise InvalidArgument(
            f"{lock.path}: has no hashes of tokens; lock the run with --tokens, or leave it out"
        )
    if tokens and lengths is not None:
        raise InvalidArgument(
            f"--tokens: {os.fspath(lengths)} has lengths alone; leave one of them out"
        )
    if subset is not None and subset not in lock.content["subsets"]:
        raise InvalidArgument(
            f"{lock.path}: has no subset {subset}, only {', '.join(lock.content['subsets'])}"
        )


@dataclass(kw_only=True)
class _Check:
    """A check in progress."""

    lock: Lock
    lengths: Folder | None
    cache_dir: Folder | None
    progress: Progress | None
    bar: Bar
    found: Collector = field(default_factory=Collector)
    files: Sequence[str] = ()
    """Files of skipped documents, by their row in the lock."""
    compared: list[str] = field(default_factory=list)
    """Description of what was compared."""
    receipts: int = 0
    """Receipts of blocks that were compared."""
    resolved: dict[str, Index] = field(default_factory=dict)
    """Indices that the settings gave, of subsets whose descriptions are those of the lock."""

    def add(
        self,
        rule: str,
        where: str,
        value: str,
        expected: str,
        *,
        file: str = "",
        remedy: str = RESTORE,
        count: int = 1,
    ) -> None:
        """Add a fault of a file, by default of the lock."""
        fault = pin_fault(rule, where, value, expected, remedy)
        self.found.add(file or self.lock.path, fault, count=count)

    @contextlib.contextmanager
    def places(self, search: Folder | None) -> Iterator[list[str]]:
        """Return `located`, or pairs of the lengths; empty if one is missing, with findings."""
        with contextlib.ExitStack() as opened:
            found: list[str | None] = []
            if self.lengths is None:
                found = located(self.lock, search)
                for source, place in zip(self.lock.sources, found, strict=True):
                    if place is None:
                        self.add("missing", "the pair", "no .idx or no .bin", "both files",
                                 file=source.path, remedy=SEARCH)  # fmt: skip
            else:
                try:
                    found += opened.enter_context(pairs_of_lengths(self.lengths, self.lock))
                except FormatError as error:
                    name = os.fspath(self.lengths)
                    reason = str(error).removeprefix(f"{name}: ")
                    self.add("lengths", "the file", reason, "the lengths of the lock", file=name)
            yield [place for place in found if place is not None and None not in found]

    def files_of(self, search: Folder | None) -> bool:
        """Find the files of skipped documents; return True if all are what they were."""
        self.files = located_files(self.lock, search)
        is_sound = self._are_sound(map(file_fault, self.lock.files, self.files))
        if is_sound and self.files:
            self.compared.append("every other file")
        return is_sound

    def _are_sound(self, faults: Iterable[tuple[str, Fault] | None]) -> bool:
        """Add the faults of files; return True without any."""
        broken = [fault for fault in faults if fault is not None]
        for fault in broken:
            self.found.add(*fault)
        return not broken

    def everything(self, paths: Sequence[str], *, whole: bool) -> int:
        """Check sources, settings and receipts; return the samples that were computed."""
        if not self._pinned(paths):
            return 0
        self._settings(paths)
        self.compared.append("the settings")
        dialect = self.lock.content["dialect"]
        datasets = [IndexedDataset(path, dialect=dialect) for path in paths]
        for number, dataset in enumerate(datasets):
            self._facts(number, dataset)
        subsets = self.lock.content["subsets"]
        samples = sum(self._receipts(name, datasets, whole=whole) for name in subsets)
        blocks = sum(len(each["receipts"]["blocks"]) for each in subsets.values())
        self.compared.append(f"{self.receipts:,} of {blocks:,} receipts")
        return samples

    def _pinned(self, paths: Sequence[str]) -> bool:
        """Compare the files of the pairs, or their lengths; return True if they can be read."""
        if self.lengths is not None:  # compared as the pairs were made of them
            self.compared.append("the lengths of the sources")
            return True
        if not self._are_sound(map(source_fault, self.lock.sources, paths)):
            return False
        self.compared.append("every .idx")
        pinned = [source.provenance is not None for source in self.lock.sources]
        pairs = zip(paths, pinned, strict=True)
        hashes = [provenance_hash(path) if is_pinned else None for path, is_pinned in pairs]
        self._are_sound(map(provenance_fault, self.lock.sources, paths, hashes))
        if any(pinned):
            compared = sum(found is not None for found in hashes)
            self.compared.append(f"{compared:,} of {sum(pinned):,} .provenance")
        return True

    def _facts(self, number: int, dataset: IndexedDataset) -> None:
        """Compare the facts about a pair whose files are those of the lock."""
        source = self.lock.sources[number]
        facts = {
            "fingerprint": corpus_fingerprint(dataset),
            "sequences": len(dataset),
            "documents": dataset.document_indices.size - 1,
            "tokens": dataset.num_tokens,
            "token_type": dataset.dtype.name,
        }
        for name, value in facts.items():
            locked = getattr(source, name)
            if locked != value:
                self.add(f"source {name}", f"sources: {name} of row {number}",
                         shown(locked), f"{value}, as in {source.path}.idx")  # fmt: skip

    def steps(self, paths: Sequence[str], name: str, steps: range) -> int:
        """Check the lengths of the sources and the blocks of steps; return their samples."""
        folder = None if self.cache_dir is None else os.fspath(self.cache_dir)
        cache = ValidationCache(paths, folder, "known_fingerprints")
        datasets = []
        for source, path in zip(self.lock.sources, paths, strict=True):
            dataset = IndexedDataset(path, dialect=self.lock.content["dialect"])
            dataset.mark_validated(source.tokens)  # when the run was locked, with these lengths
            datasets.append(dataset)
            fingerprint = cache.fingerprint(dataset)
            mark_fingerprint(dataset, fingerprint)
            if fingerprint != source.fingerprint:
                self.add("fingerprint", "lengths and document bounds", fingerprint,
                         source.fingerprint, file=f"{path}.idx")  # fmt: skip
                return 0
        cache.keep(datasets)
        subset = self.lock.subset(name)
        bounds = step_bounds_of(subset)
        first, last = first_step(bounds), bounds.size - 2
        for step in (steps.start, steps.stop - 1):
            if not first <= step <= last:
                raise OutOfRange(
                    f"{self.lock.path}: step must be from {first} to {last} of subset {name}, got "
                    f"{step}"
                )
        self.compared.append("the lengths of the sources")
        settings = read_settings(self.lock, paths, self.files, self.cache_dir)
        places = slice(steps.start, steps.stop + 1)
        ours = settings.step_bounds(name, subset)[places].tolist()
        theirs = bounds[places].tolist()
        which = f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {step}"
        if ours != theirs:
            is_whole = len(ours) == len(theirs)
            expected = f"{ours[0]} to {ours[-1] - 1}" if is_whole else "fewer steps"
            self.add("steps", f"subsets.{name}.steps: positions of {which}",
                     f"{theirs[0]} to {theirs[-1] - 1}",
                     f"{expected}, by the batches of the settings")  # fmt: skip
        self.compared.append(f"the positions of {which}")
        index, keys = self._index(name, datasets)
        size = subset["receipts"]["block_steps"]
        blocks = range((steps.start - first) // size, (step - first) // size + 1)
        begin, end = first + blocks.start * size, min(first + blocks.stop * size, last + 1)
        self.compared.append(f"the receipt of steps {begin} to {end - 1}")
        return self._blocks(name, index, keys, blocks)

    def tokens(self, paths: Sequence[str]) -> int:
        """Compare the chunks of the .bin files; return the bytes read."""
        chunk, algorithm = self.lock.content["tokens"]["chunk_bytes"], self.lock.content["hash"]
        infos = [info for info in (stat_path(f"{path}.bin") for path in paths) if info is not None]
        hashes = token_hashes(infos, chunk, algorithm, self.bar)
        for info, ours, theirs in zip(
            infos, hashes, self.lock.content["tokens"]["hashes"], strict=True
        ):
            differing = differing_chunks(ours, theirs, algorithm)
            for number, found, expected in differing[:1]:
                begin, end = number * (chunk or 0), info.nbytes
                end = end if chunk is None else min(begin + chunk, end)
                self.add("tokens", f"bytes {begin} to {end}", found or "nothing",
                         expected or "nothing", file=info.path, count=len(differing))  # fmt: skip
        self.compared.append("every .bin")
        return sum(info.nbytes for info in infos)

    def _settings(self, paths: Sequence[str]) -> None:
        """Resolve the settings again and compare the result with the subsets."""
        try:
            settings = read_settings(self.lock, paths, self.files, self.cache_dir)
            runs = settings.runs(most_samples(self.lock))
        except StorageError:
            raise
        except MegaIndexError as error:
            reason = error_text(error)
            self.add("settings", "settings", reason, "settings of a run")
            return
        differing = list(unlike(self.lock, runs, paths, self.files))
        others = [where.split(".")[1:3] for where, _, _ in differing]
        for name, run in runs.items():
            if not any([name, part] in others for part in ("index", "sources")):
                self.resolved[name] = run.index
        for where, locked, resolved in differing[:_MOST_DIFFERENCES]:
            self.add(f"resolved {where}", where, shown(locked),
                     f"{shown(resolved)}, as the settings give")  # fmt: skip

    def _index(self, name: str, datasets: Sequence[IndexedDataset]) -> tuple[Index, U64]:
        """Return the index of a subset, built from its description, and the keys of its sources."""
        subset = self.lock.subset(name)
        index = self.resolved.pop(name, None)
        if index is None:
            chosen = [datasets[row] for row in subset["sources"]]
            index = build_described(
                subset["index"], chosen, cache_dir=self.cache_dir, files=self.files
            )
        return index, fingerprint_keys(self.lock.fingerprints(name))

    def _receipts(self, name: str, datasets: Sequence[IndexedDataset], *, whole: bool) -> int:
        """Compare receipts of blocks of steps; return the samples that were computed."""
        receipts = self.lock.content["subsets"][name]["receipts"]
        count = len(receipts["blocks"])
        index, keys = self._index(name, datasets)
        chosen = [range(count)]
        if not whole:
            chosen = [range(k, k + 1) for k in sorted({0, count // 2, count - 1})]
        samples = sum(self._blocks(name, index, keys, blocks) for blocks in chosen)
        total = sum(map(_receipt, receipts["blocks"]), Receipt())
        if str(total) != receipts["total"]:
            self.add(f"total of {name}", f"subsets.{name}.receipts.total",
                     receipts["total"], f"{total}, the sum of its blocks")  # fmt: skip
        return samples

    def _blocks(self, name: str, index: Index, keys: U64, blocks: range) -> int:
        """Compare the receipts of consecutive blocks; return their samples."""
        subset = self.lock.content["subsets"][name]
        locked, block_steps = subset["receipts"]["blocks"], subset["receipts"]["block_steps"]
        steps = step_bounds_of(subset)
        past, bounds = first_step(steps), block_bounds(steps, block_steps)
        inside = bounds[blocks.start : blocks.stop + 1]
        receipts = receipts_between(index, inside, keys, progress=self.progress)
        self.receipts += len(receipts)
        for block, receipt in zip(blocks, receipts, strict=True):
            if str(receipt) != locked[block]:
                first = past + block * block_steps
                end = min(first + block_steps, steps.size - 1)
                samples = f"samples {bounds[block]} to {bounds[block + 1] - 1}"
                self.add(f"receipt of {name}", f"steps {first} to {end - 1} ({samples})",
                         str(receipt), locked[block])  # fmt: skip
        return sum(receipt.count for receipt in receipts)


def _receipt(text: str) -> Receipt:
    return Receipt.from_dict({"receipt": text, "samples": 0})
