"""The functions `verify` and `verify_all`: checks of pairs, caches, recipes and locks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaindex.corpus.subjects import Subject, pairs_of_recipe, subjects
from megaindex.errors import InvalidArgument
from megaindex.format.findings import Finding, Report
from megaindex.format.header import get_dialect
from megaindex.progress import Bar, silent
from megaindex.validation import check_between
from megaindex.verify.arrays import (
    verify_arrays,
    verify_cache,
    verify_entry,
    verify_recipe,
    verify_snapshot,
)
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


_VERIFY = {
    "cache entry": verify_entry,
    "cache": verify_cache,
    "snapshot": verify_snapshot,
    "framework arrays": verify_arrays,
}


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
        inputs: compare the rows that a provenance names with the input files that still exist.
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
    named = {subject.path for subject, _ in found}
    for recipe in [subject.path for subject, _ in found if subject.kind == "recipe"]:
        tokens, companions = pairs_of_recipe(recipe)
        for prefix in [prefix for prefix in (*tokens, *companions) if prefix not in named]:
            named.add(prefix)
            chosen = rules if prefix in tokens else of_companions
            found.append((Subject(kind="pair", path=prefix), chosen))
    return [Check(subject=subject, full=full, rules=chosen) for subject, chosen in found]
