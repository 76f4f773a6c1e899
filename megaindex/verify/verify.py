"""The functions `verify` and `verify_all`: checks of pairs, caches, recipes and locks."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.builders.recipe import plan_recipe
from megaindex.cache.array_files import ArrayFiles, Arrays, Sidecar, state_of
from megaindex.cache.cache import array_fault, checksum_fault, key_fault, stray_files
from megaindex.cache.entry import MANIFEST, Manifest, read_manifest
from megaindex.cache.fingerprint import array_checksum, load_records
from megaindex.cache.npy import map_npy
from megaindex.cache.sidecar import UNREADABLE, OtherFormat, load_sidecar
from megaindex.corpus.subjects import (
    Subject,
    entries,
    pair_exists,
    pairs_of_recipe,
    prefixes_of,
    subjects,
)
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset
from megaindex.format.findings import Collector, Finding, Report, Severity
from megaindex.format.header import Fault, get_dialect
from megaindex.index.array_index import rising_rows
from megaindex.index.spans import check_same_lengths
from megaindex.io.atomic import Damaged
from megaindex.io.paths import as_storage_error
from megaindex.progress import Bar, silent
from megaindex.settings.recipe import RecipeSource
from megaindex.settings.recipe_file import read_recipe
from megaindex.validation import check_between
from megaindex.verify.pair import PairRules, verify_pair

__all__ = ["Check", "Finding", "Report", "checks", "verify", "verify_all"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A task of an engine: one subject and the rules to check."""

    subject: Subject
    full: bool
    rules: PairRules

    def __str__(self) -> str:
        return self.subject.path

    def run(self, bar: Bar = silent) -> Report:
        path = self.subject.path
        if self.subject.kind == "pair":
            return verify_pair(path, self.rules, full=self.full, bar=bar)
        if self.subject.kind == "recipe":
            return verify_recipe(path)
        if self.subject.kind == "lock":
            from megaindex.lock.check import verify_lock

            return verify_lock(path, whole=self.full)
        return _VERIFY[self.subject.kind](path, full=self.full, bar=bar)


def verify(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    dialect: str = "megatron",
    vocab_size: int | None = None,
    eod: int | None = None,
    inputs: bool = False,
    bar: Bar = silent,
) -> Report:
    """Check the single subject at `path`; parameters and errors are those of `verify_all`.

    Raises:
        InvalidArgument: `path` has several subjects; use `verify_all`.
    """
    reports = verify_all(
        path, full=full, dialect=dialect, vocab_size=vocab_size, eod=eod, inputs=inputs, bar=bar
    )
    if len(reports) != 1:
        raise InvalidArgument(
            f"{os.fspath(path)}: must have one subject, got {len(reports)}; use verify_all"
        )
    return reports[0]


def verify_all(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    dialect: str = "megatron",
    vocab_size: int | None = None,
    eod: int | None = None,
    inputs: bool = False,
    bar: Bar = silent,
) -> list[Report]:
    """Check every subject at a path: pairs, caches and their entries, sets of arrays, recipes.

    Args:
        path: prefix, .idx or .bin of a pair; cache entry, cache, snapshot or sidecar; a recipe,
            whose pairs are checked too; a lock, see `megaindex.lock.verify_lock`; or a folder of
            pairs, caches and sidecars.
        full: read every byte to check token ids, checksums and overlaps. By default only the .idx
            and the sizes of files are checked.
        dialect: framework that defines the dtype codes of pairs: "megatron", "neox" or "paddlenlp".
        vocab_size: token ids must be from 0 to `vocab_size` - 1; needs `full`.
        eod: token id that ends every document; needs `full`.
        inputs: compare the places of the rows that a provenance names with those in the input
            files that still exist; their text is not compared.
        bar: function of the total bytes that returns a function called with bytes read.

    Returns:
        A report of each subject; broken rules are findings, not errors.

    Raises:
        MissingFile: nothing exists at `path`.
        StorageError: a file cannot be read.
        InvalidArgument: `path` has no subject, or the arguments contradict each other.
    """
    to_do = checks(
        [path], full=full, dialect=dialect, vocab_size=vocab_size, eod=eod, inputs=inputs
    )
    return [check.run(bar) for check in to_do]


def checks(
    paths: Sequence[str | os.PathLike[str]],
    *,
    full: bool = False,
    dialect: str = "megatron",
    vocab_size: int | None = None,
    eod: int | None = None,
    inputs: bool = False,
) -> list[Check]:
    """Return the checks that `verify_all` runs for each of `paths`, in order."""
    if not full and (vocab_size is not None or eod is not None):
        raise InvalidArgument("vocab_size and eod need every token to be read; add --full")
    if vocab_size is not None:
        check_between("vocab_size", vocab_size, 1)
    if vocab_size is not None and eod is not None and not 0 <= eod < vocab_size:
        raise InvalidArgument(f"eod must be a token id from 0 to {vocab_size - 1}, got {eod}")
    get_dialect(dialect)  # refuses an unknown one
    rules = PairRules(dialect=dialect, vocab_size=vocab_size, eod=eod, inputs=inputs)
    of_companions = replace(rules, vocab_size=None, eod=None)  # labels and masks
    found = [(subject, rules) for path in paths for subject in subjects(path)]
    given = {"vocab_size": vocab_size is not None, "eod": eod is not None, "inputs": inputs}
    of_pairs = [name for name, is_given in given.items() if is_given]
    locks = [subject.path for subject, _ in found if subject.kind == "lock"]
    if locks and of_pairs:
        raise InvalidArgument(
            f"{locks[0]}: {of_pairs[0]} is no check of a lock; leave it out, or check the pairs of "
            "the lock, or its recipe"
        )
    named = {subject.path for subject, _ in found}
    for recipe in [subject.path for subject, _ in found if subject.kind == "recipe"]:
        tokens, companions = pairs_of_recipe(recipe)
        for prefix in [prefix for prefix in (*tokens, *companions) if prefix not in named]:
            named.add(prefix)
            chosen = rules if prefix in tokens else of_companions
            found.append((Subject(kind="pair", path=prefix), chosen))
    return [Check(subject=subject, full=full, rules=chosen) for subject, chosen in found]


Located = tuple[str, Fault, int]
"""Name of an array, its first fault under a rule, and the number of such faults."""

_BUILT = "the next run that needs it builds it again"
_FOUND = "remove all files of that name, they will be built again"
_READ = "the next run that uses its arrays checks them and writes a new one"
_REBUILT = "remove the directory, it will be rebuilt"
_STRAY = Fault(
    rule="stray-file",
    found="a file that the manifest does not list",
    expected="listed files only",
    remedy="it is never read; remove it",
)


def verify_arrays(sidecar: str, *, full: bool, bar: Bar) -> Report:
    """Check the sets that a sidecar describes; with `full` read their arrays."""
    found = Collector()
    sets: list[_Set] = []
    try:
        file = load_sidecar(sidecar)
        sets = [_Set(own, file.sets[name], full, found) for name, own in file.own_sets(sidecar)]
    except OtherFormat as error:
        found.add(sidecar, _unreadable("sidecar-format", error), severity="warning")
    except UNREADABLE as error:
        found.add(sidecar, _unreadable("sidecar", error))
    sizes = [state[0] for one in sets for state in one.sidecar.files.values()]
    progress = bar(sum(sizes) if full else 0)
    for one in sets:
        one.check(progress)
    counted = {"sets": len(sets), "arrays": len(sizes), "bytes": sum(sizes)}
    return found.report(sidecar, "framework arrays", full=full, counted=counted)


def verify_cache(cache: str, *, full: bool, bar: Bar) -> Report:
    """Check every entry of a cache, and report the remains of interrupted builds."""
    found = Collector()
    counted = _check_entries(entries(cache), full, found, bar)
    return found.report(cache, "cache", full=full, counted=counted)


def verify_entry(entry: str, *, full: bool, bar: Bar) -> Report:
    """Check one entry; with `full` read its arrays and compare checksums."""
    found = Collector()
    counted = _check_entries([Path(entry)], full, found, bar)
    return found.report(entry, "cache entry", full=full, counted=counted)


def verify_snapshot(path: str, *, full: bool, bar: Bar) -> Report:
    """Check the records of sources that a blend or a recipe wrote to a cache.

    Sources that changed since are not a fault, since every reader of a snapshot compares them.
    """
    del bar  # a snapshot is small
    found = Collector()
    records = []
    try:
        with as_storage_error(path, "cannot read"):
            records = load_records(path)
    except Damaged as error:
        fault = Fault(
            rule="snapshot",
            found=str(error),
            expected="a snapshot as megaindex writes it",
            remedy="remove it; the next run opens every source and writes a new one",
        )
        found.add(path, fault)
    return found.report(path, "snapshot", full=full, counted={"sources": len(records)})


@dataclass
class _Set:
    """One set while it is checked."""

    files: ArrayFiles
    sidecar: Sidecar
    full: bool
    found: Collector
    differs: bool = False
    """True if the checksum of an array that was read differs from the recorded one."""

    def check(self, progress: Callable[[int], None]) -> None:
        remedy = _BUILT if self.sidecar.origin == "built" else _FOUND
        arrays: Arrays = {}
        for name, path in self.files.arrays.items():
            size = self.sidecar.files[name][0]
            severity: Severity = "error"
            fault = _file_fault(path, size)
            if fault is None:
                fault, severity = self._content_fault(name, path, arrays)
            if fault is not None:
                self.found.add(path, replace(fault, remedy=remedy), severity=severity)
            progress(size if self.full else 0)
        marker = self.files.marker
        if marker is not None and not os.path.isfile(marker):
            self.found.add(marker, replace(_MISSING, remedy=remedy))
        if self.differs:  # name the wrong elements
            for name, fault, count in order_faults(arrays, self.sidecar.settings):
                self.found.add(self.files.arrays[name], replace(fault, remedy=remedy), count=count)

    def _content_fault(self, name: str, path: str, arrays: Arrays) -> tuple[Fault | None, Severity]:
        """Return the fault of an array; add the array to ``arrays`` if it can be read."""
        try:
            array, offset = map_npy(path)
        except FormatError as error:
            text = str(error).partition(": ")[2].partition(";")[0]
            return _fault("array-header", text, "an array that NumPy saved"), "error"
        header = (array.dtype.name, array.shape, offset)
        if header != self.sidecar.arrays[name]:
            return _fault("array-header", str(header), str(self.sidecar.arrays[name])), "error"
        arrays[name] = array
        checksum = array_checksum(array) if self.full else ""
        expected = self.sidecar.checksums[name] if self.full and self.sidecar.checksums else ""
        self.differs |= checksum != expected
        if state_of(os.stat(path)) != self.sidecar.files[name]:
            is_harmless = self.sidecar.origin == "found" or (self.full and checksum == expected)
            changed = "another file, or another time of change"
            severity: Severity = "warning" if is_harmless else "error"
            return _fault("changed", changed, "the recorded file"), severity
        if checksum != expected:
            return _fault("checksum", f"checksum {checksum}", f"checksum {expected}"), "error"
        return None, "error"


def order_faults(arrays: Arrays, settings: Mapping[str, Any]) -> Iterator[Located]:
    """Yield the broken rules of document_index, sample_index and shuffle_index.

    ``settings["documents"]``, if present, is the range [begin, end) of document_index.
    """
    documents, samples = arrays.get("document_index"), arrays.get("sample_index")
    shuffle = arrays.get("shuffle_index")
    if documents is not None:
        begin, end = _bounds(settings.get("documents"))
        outside = (documents < begin) | (documents >= end)
        yield from _located("document_index", "document-range", documents, outside,
                            f"documents from {begin} to below {end}")  # fmt: skip
    if samples is not None and samples.ndim == 2 and samples.shape[1] == 2 and len(samples):
        if documents is not None:
            beyond = (samples.min(axis=1) < 0) | (samples[:, 0] > documents.size)
            yield from _located("sample_index", "sample-range", samples, beyond,
                                f"rows within {documents.size} documents")  # fmt: skip
        behind = np.append(True, rising_rows(samples))
        yield from _located("sample_index", "sample-order", samples, ~behind,
                            "a row after the row before it")  # fmt: skip
    if shuffle is not None:
        outside = (shuffle < 0) | (shuffle >= shuffle.size)
        yield from _located("shuffle_index", "shuffle-range", shuffle, outside,
                            f"samples below {shuffle.size}")  # fmt: skip
    # packings of whole documents, whose arrays are int64, may repeat a sample
    if shuffle is not None and not (documents is not None and documents.dtype == np.int64):
        yield from _located("shuffle_index", "shuffle-repeat", shuffle, _repeated(shuffle),
                            "each sample once")  # fmt: skip


def _bounds(documents: object) -> tuple[int, int]:
    if isinstance(documents, list) and [type(each) for each in documents] == [int, int]:
        return documents[0], documents[1]
    return 0, 2**31


def _repeated(shuffle: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return bool[n]: True for entries that occur earlier too."""
    again = np.ones(shuffle.size, bool)
    again[np.unique(shuffle, return_index=True)[1]] = False
    return again


def _located(
    name: str, rule: str, array: npt.NDArray[Any], broken: npt.NDArray[np.bool_], expected: str
) -> Iterator[Located]:
    if broken.any():
        first = int(broken.argmax())
        found = str(array[first].tolist())
        fault = Fault(rule=rule, where=f"entry {first}", found=found, expected=expected)
        yield name, fault, int(broken.sum())


def _file_fault(path: str, size: int) -> Fault | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return _MISSING
    if not stat.S_ISREG(status.st_mode):
        return _fault("file-kind", "not a regular file", "a regular file")
    if status.st_size != size:
        return _fault("file-size", f"{status.st_size} bytes", f"{size} bytes")
    return None


def _fault(rule: str, found: str, expected: str) -> Fault:
    return Fault(rule=rule, found=found, expected=expected)


_MISSING = _fault("missing-file", "no file", "a file")


def _unreadable(rule: str, error: Exception) -> Fault:
    expected = "a sidecar as this release writes it"
    return Fault(rule=rule, found=str(error), expected=expected, remedy=_READ)


def _check_entries(
    directories: Sequence[Path], full: bool, found: Collector, bar: Bar
) -> dict[str, int]:
    """Check entries and return the numbers of entries, arrays and bytes."""
    manifests = {entry: _checked_manifest(entry, found) for entry in directories}
    records = [
        (entry, record)
        for entry, manifest in manifests.items()
        if manifest is not None
        for record in manifest.arrays.values()
    ]
    nbytes = sum(record.nbytes for _, record in records)
    progress = bar(nbytes if full else 0)
    for entry, record in records:
        fault = array_fault(entry, record)
        if fault is None and full:
            fault = checksum_fault(entry, record)
            progress(record.nbytes)
        if fault is not None:
            found.add(os.fspath(entry / record.file), fault)
    return {"entries": len(manifests), "arrays": len(records), "bytes": nbytes}


def _checked_manifest(entry: Path, found: Collector) -> Manifest | None:
    path = str(entry / MANIFEST)
    try:
        manifest = read_manifest(entry)
    except FormatError as error:
        reason = str(error).partition(" but ")[2].rpartition(";")[0]
        expected = "a manifest as megaindex writes it"
        found.add(path, Fault(rule="manifest", found=reason, expected=expected, remedy=_REBUILT))
        return None
    fault = key_fault(entry, manifest)
    if fault is not None:
        found.add(path, fault)
    for name in stray_files(entry, manifest):
        found.add(str(entry / name), _STRAY, severity="warning")
    return manifest


_CORRECT = "correct the recipe"
_PATH = "correct the path, which is relative to the recipe, or restore the pair"
_DTYPE = "write it again with the type of its ids; GPT-NeoX's codes need --dialect neox"
_PLACES = ("source ", "stage ", "stream ")


def verify_recipe(path: str) -> Report:
    """Check that a recipe can be read and laid out, and that its sources exist and fit.

    Reading stops at the first broken rule, so such a finding may hide others.

    Raises:
        MissingFile, StorageError: the recipe, or a file that it names, cannot be read.
    """
    found = Collector()
    counted: dict[str, int] = {}
    try:
        recipe = read_recipe(path)
    except InvalidArgument as error:
        found.add(path, _broken("recipe", path, error))
    else:
        corpora = recipe.all_sources
        counted = {
            "sources": len(corpora),
            "stages": len(recipe.stages),
            "pairs": len(prefixes_of(recipe)),
        }
        for corpus in corpora:
            _check_source(path, corpus, found)
        if not found.has_errors():
            try:
                plan_recipe(recipe)
            except (InvalidArgument, FormatError) as error:
                found.add(path, _broken("layout", path, error))
    return found.report(path, "recipe", full=False, counted=counted)


def _check_source(recipe: str, corpus: RecipeSource, found: Collector) -> None:
    """Check that the pairs of a source exist, and that labels or a mask fit its tokens."""
    missing = False
    for setting in ("path", "labels", "loss_mask"):
        prefix = getattr(corpus, setting)
        if prefix and not pair_exists(prefix):
            missing = True
            rule, there = f"missing-{setting.replace('_', '-')}", f"neither {prefix}.idx nor .bin"
            found.add(recipe, _source_fault(corpus, rule, there, "a pair", _PATH))
    companion = corpus.labels or corpus.loss_mask
    try:
        if missing or not corpus.path:
            return
        text = IndexedDataset(corpus.path)
        if text.dtype.kind == "f":
            fault = _source_fault(corpus, "token-type", str(text.dtype), "integers", _DTYPE)
            found.add(text.path_prefix + ".idx", fault)
        if companion:
            role = "labels" if corpus.labels else "loss mask"
            check_same_lengths(text, IndexedDataset(companion), role)
    except (FormatError, MissingFile) as error:  # the pair's own report has the details
        expected = "a valid pair, with labels or a mask of the same lengths"
        what, remedy = _divided(str(error))
        found.add(recipe, _source_fault(corpus, "source", what, expected, remedy))


def _source_fault(corpus: RecipeSource, rule: str, found: str, expected: str, remedy: str) -> Fault:
    where = f"source {corpus.name}"
    return Fault(rule=rule, where=where, found=found, expected=expected, remedy=remedy)


def _broken(rule: str, path: str, error: Exception) -> Fault:
    """Divide a message, ``run.yaml.stages.decay.steps: must be a number; …``, into a fault."""
    text = str(error).removeprefix("--recipe: ").removeprefix(path).lstrip(":. ")
    where, _, rest = text.partition(": ")
    is_place = bool(rest) and (" " not in where or where.startswith(_PLACES))
    what, remedy = _divided(rest if is_place else text)
    return Fault(
        rule=rule,
        where=where if is_place else "the file",
        found=what,
        expected="a recipe that can be " + ("read" if rule == "recipe" else "laid out"),
        remedy=remedy,
    )


def _divided(message: str) -> tuple[str, str]:
    """Divide a message into the fault and the remedy at its end."""
    what, _, remedy = message.rpartition("; ")
    return (what, remedy) if what else (message, _CORRECT)


_VERIFY = {
    "cache entry": verify_entry,
    "cache": verify_cache,
    "snapshot": verify_snapshot,
    "framework arrays": verify_arrays,
}
