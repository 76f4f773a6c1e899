"""Check pairs, caches and recipes: every broken rule is a finding that says where, and what repairs
it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megaindex.corpus.discover import Subject, subjects
from megaindex.errors import InvalidArgument
from megaindex.format.header import get_dialect
from megaindex.progress import Bar, silent
from megaindex.validation import check_between
from megaindex.verify.arrays import (
    verify_arrays,
    verify_cache,
    verify_entry,
    verify_snapshot,
)
from megaindex.verify.pair import PairRules, verify_pair
from megaindex.verify.recipe import pairs_of_recipe, verify_recipe
from megaindex.verify.report import Finding, Report

__all__ = ["Check", "Finding", "Report", "checks", "verify", "verify_all"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to check and what it is held to: a task, wherever it runs."""

    subject: Subject
    full: bool
    dialect: str
    vocab_size: int | None
    eod: int | None

    def __str__(self) -> str:
        return self.subject.path

    def run(self, bar: Bar = silent) -> Report:
        """Raises StorageError: a file cannot be read."""
        path = self.subject.path
        if self.subject.kind == "pair":
            rules = PairRules(
                dialect=get_dialect(self.dialect), vocab_size=self.vocab_size, eod=self.eod
            )
            return verify_pair(path, rules, full=self.full, bar=bar)
        if self.subject.kind == "recipe":
            return verify_recipe(path)
        return _LOOKS[self.subject.kind](path, full=self.full, bar=bar)


_LOOKS = {
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
    bar: Bar = silent,
) -> Report:
    """Check the one thing at `path`, as `verify_all` does.

    Raises:
        InvalidArgument: a folder of several things; use `verify_all`.
    """
    reports = verify_all(path, full=full, dialect=dialect, vocab_size=vocab_size, eod=eod, bar=bar)
    if len(reports) != 1:
        raise InvalidArgument(f"{os.fspath(path)}: holds {len(reports)} things; use verify_all")
    return reports[0]


def verify_all(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    dialect: str = "megatron",
    vocab_size: int | None = None,
    eod: int | None = None,
    bar: Bar = silent,
) -> list[Report]:
    """Check a pair, a cache entry, a cache, a snapshot, arrays under a framework's names, a recipe
    and all pairs that it names, or all of those but recipes in a folder.

    Args:
        path: prefix, .idx, .bin, snapshot, sidecar, recipe, or directory.
        full: read every byte: token ids, checksums, where sequences overlap. Else only the .idx
            and the sizes of files are looked at.
        dialect: whose dtype codes a pair uses.
        vocab_size: token ids are from 0 to below it; needs `full`.
        eod: the token id that ends every document; needs `full`.
        bar: told of bytes that are read.

    Raises:
        MissingFile: nothing is at `path`.
        StorageError: a file cannot be read.
        InvalidArgument: `path` is nothing that can be checked, or the arguments contradict.
    """
    to_do = checks([path], full=full, dialect=dialect, vocab_size=vocab_size, eod=eod)
    return [check.run(bar) for check in to_do]


def checks(
    paths: Sequence[str | os.PathLike[str]],
    *,
    full: bool = False,
    dialect: str = "megatron",
    vocab_size: int | None = None,
    eod: int | None = None,
) -> list[Check]:
    """All that `verify_all` does for each of `paths`, in order and not done yet.

    Raises:
        MissingFile: nothing is at one of them.
        InvalidArgument: one is nothing that can be checked, or the arguments contradict.
    """
    if not full and (vocab_size is not None or eod is not None):
        raise InvalidArgument("vocab_size and eod are checked by reading every token; add --full")
    if vocab_size is not None:
        check_between("vocab_size", vocab_size, 1)
    if vocab_size is not None and eod is not None and not 0 <= eod < vocab_size:
        raise InvalidArgument(f"eod is a token id, from 0 to below {vocab_size}, got {eod}")
    get_dialect(dialect)
    make = partial(Check, full=full, dialect=dialect)
    of_tokens = partial(make, vocab_size=vocab_size, eod=eod)
    to_do = [of_tokens(subject=subject) for path in paths for subject in subjects(path)]
    named = {check.subject.path for check in to_do}
    for recipe in [check.subject.path for check in to_do if check.subject.kind == "recipe"]:
        tokens, companions = pairs_of_recipe(recipe)
        for prefix in [prefix for prefix in (*tokens, *companions) if prefix not in named]:
            subject = Subject(kind="pair", path=prefix)
            named.add(prefix)
            to_do.append(
                of_tokens(subject=subject)
                if prefix in tokens
                else make(subject=subject, vocab_size=None, eod=None)  # labels and masks are no ids
            )
    return to_do
