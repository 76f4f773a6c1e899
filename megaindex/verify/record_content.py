"""Tokens, loss targets and evaluation of two records of a run, compared where both hold them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaindex.builders.recipe import OpenRecipe
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import FormatError
from megaindex.index.spans import Index, datasets_of
from megaindex.loader.checkpoint import Contents, contents, source_names, stored_contents
from megaindex.loader.targets import targets_of, targets_text
from megaindex.lock.lock_file import Lock
from megaindex.lock.opening import LockedFiles
from megaindex.lock.pinned_files import differing_chunks, token_hashes
from megaindex.objects.files import stat_path
from megaindex.progress import Bar, silent
from megaindex.run.from_recipe import evaluation_of_opened
from megaindex.run.same_until import apart
from megaindex.run.subset import differences, paths_of, rows_of, subset_of
from megaindex.validation import CheckpointReader

_RESOLVED = ("samples", "index", "steps", "every")  # of a subset for evaluation


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSource:
    """Content of one source that a record holds.

    Attributes:
        fingerprint: its `corpus_fingerprint`.
        targets: kind and fingerprint of its labels or loss mask as text; None: not held.
        content: content fingerprints; None: not held.
        hashes: hashes of the chunks of each .bin of it, by part; None: not held.
    """

    fingerprint: str
    targets: str | None = None
    content: Contents | None = None
    hashes: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldContent:
    """Content of the sources and the evaluation that a record holds.

    Attributes:
        sources: sources of training.
        evaluation: settings and subsets of the evaluation; None: not held.
        evaluated: sources of each subset of the evaluation.
        chunk_bytes: bytes that one of the hashes covers, None for whole files; 0 without any.
        without: description of a record that holds no hashes of tokens.
    """

    sources: Sequence[HeldSource]
    evaluation: Mapping[str, Any] | None = None
    evaluated: Mapping[str, Sequence[HeldSource]] = field(default_factory=dict)
    chunk_bytes: int | None = 0
    without: str

    @property
    def has_contents(self) -> bool:
        """True for content fingerprints of all sources."""
        return all(source.content is not None for source in self.sources)


def held_by_state(
    state: Mapping[str, Any],
    index: Index,
    fingerprints: Sequence[str],
    facts: Sequence[Mapping[str, Any]] | None,
    opened: OpenRecipe | None,
) -> HeldContent:
    """Return what a checkpoint holds; of its evaluation, what its recipe gives with the files.

    Args:
        state: the state of a loader.
        index: index of the run.
        fingerprints: those of its receipts.
        facts: sources of the recipe in the state; None without one.
        opened: the recipe of the state; None without one.
    """
    without = "a checkpoint without content fingerprints"
    stored = CheckpointReader("the state of a loader", state)
    names = source_names(datasets_of(index))
    found = list(stored_contents(stored, names).values())[: len(fingerprints)]
    sources = [
        HeldSource(fingerprint=name, content=content, targets=(each or {}).get("targets"))
        for name, content, each in itertools.zip_longest(fingerprints, found, facts or ())
    ]
    if opened is None:
        return HeldContent(sources=sources, without=without)
    valid = evaluation_of_opened(opened)
    if valid is None:
        return HeldContent(sources=sources, evaluation={}, without=without)
    (read,) = contents(datasets_of(valid.index), targets_of(valid), whole=False)
    (source,) = valid.sources
    held = HeldSource(
        fingerprint=corpus_fingerprint(datasets_of(valid.index)[0]),
        targets=targets_text(source),
        content=read,
    )
    rows = rows_of(paths_of(valid))
    return HeldContent(
        sources=sources,
        evaluation=_evaluation({"valid": subset_of(valid, rows, {})}, {"valid": [held]}),
        evaluated={"valid": [held]},
        without=without,
    )


def held_by_lock(lock: Lock) -> HeldContent:
    """Return what a lock holds, without reading any other file."""
    tokens, subsets = lock.content["tokens"], lock.content["subsets"]

    def held(name: str) -> list[HeldSource]:
        pairs = zip(subsets[name]["sources"], subsets[name]["targets"], strict=True)
        return [_held_source(lock, row, targets) for row, targets in pairs]

    evaluated = {name: held(name) for name in subsets if name != "train"}
    return HeldContent(
        sources=held("train"),
        evaluation=_evaluation({name: lock.subset(name) for name in evaluated}, evaluated),
        evaluated=evaluated,
        chunk_bytes=0 if tokens is None else tokens["chunk_bytes"],
        without="a lock without --tokens",
    )


def _held_source(lock: Lock, row: int, targets: Any) -> HeldSource:
    """Return a source of a lock: a pair, and kind and pair of its loss targets or None."""
    tokens, parts, text = lock.content["tokens"], {"tokens": row}, "all tokens"
    if targets is not None:
        kind, companion = targets
        parts[kind] = companion
        text = f"{kind.replace('_', ' ')} {lock.sources[companion].fingerprint}"
    return HeldSource(
        fingerprint=lock.sources[row].fingerprint,
        targets=text,
        hashes=tokens and {part: tokens["hashes"][at] for part, at in parts.items()},
    )


def _evaluation(
    subsets: Mapping[str, Mapping[str, Any]], sources: Mapping[str, Sequence[HeldSource]]
) -> dict[str, Any]:
    """Return the subsets of an evaluation as values that can be compared."""
    found: dict[str, Any] = {}
    for name, subset in subsets.items():
        kept = {key: subset[key] for key in _RESOLVED}
        kept["sources"] = [each.fingerprint for each in sources[name]]
        found[f"subset {name}"] = kept
    return found


def with_contents(
    held: HeldContent, lock: Lock, search: str | os.PathLike[str] | None, bar: Bar = silent
) -> HeldContent:
    """Return what a lock holds with content fingerprints, of files with the hashes of the lock.

    Raises:
        MissingFile, StorageError: a file cannot be read.
        FormatError: it is not what it was.
    """
    opened = LockedFiles(lock, search)
    infos = [
        info for info in (stat_path(f"{path}.bin") for path in opened.paths) if info is not None
    ]
    found = token_hashes(infos, held.chunk_bytes, lock.content["hash"], bar)
    for info, ours, theirs in zip(infos, found, lock.content["tokens"]["hashes"], strict=True):
        if ours != theirs:
            raise FormatError(
                f"{info.path}: its bytes must have the hashes in {lock.path}, got others; restore "
                "the file"
            )

    def filled(name: str, sources: Sequence[HeldSource]) -> list[HeldSource]:
        run = opened.run(name)
        read = contents(datasets_of(run.index), targets_of(run), whole=False)
        return [replace(each, content=content) for each, content in zip(sources, read, strict=True)]

    return replace(
        held,
        sources=filled("train", held.sources),
        evaluated={name: filled(name, sources) for name, sources in held.evaluated.items()},
    )


@dataclass(frozen=True, kw_only=True)
class ContentCheck:
    """Comparison of what two records hold of their sources and evaluation.

    Attributes:
        differences: descriptions of the differences.
        tokens: part of the tokens that was compared: "whole", "sampled" (256 KiB of each source)
            or "none".
        not_compared: what a record does not hold, and which.
    """

    differences: tuple[str, ...]
    tokens: str
    not_compared: tuple[str, ...]


def compare_content(first: HeldContent, second: HeldContent) -> ContentCheck:
    """Compare what two records hold; fingerprints of training sources are not compared."""
    lacking: list[str] = []
    if first.evaluation is None or second.evaluation is None:
        if first.evaluation or second.evaluation:
            which = "first" if first.evaluation is None else "second"
            lacking.append(f"evaluation not compared: the {which} holds none")
        evaluated: list[str] = []
    else:
        places = dict.fromkeys([*first.evaluation, *second.evaluation])
        evaluated = [
            line
            for name in places
            for place, a, b in differences(
                first.evaluation.get(name), second.evaluation.get(name), ""
            )
            for line in apart(f"{name}: {place}" if place else name, _size(a), _size(b))
        ]
    levels = {"whole"}
    found = list(
        _source_differences("source", first, second, first.sources, second.sources, levels)
    )
    if first.evaluation is not None and second.evaluation is not None:
        for name in first.evaluated.keys() & second.evaluated.keys():
            pair = first.evaluated[name], second.evaluated[name]
            found += _source_differences(f"subset {name}: source", first, second, *pair, set())
    if "none" in levels:
        reasons = [
            f"the {which} is {held.without}"
            for which, held in (("first", first), ("second", second))
            if held.chunk_bytes == 0 and not held.has_contents
        ]
        if not reasons and first.chunk_bytes != second.chunk_bytes:
            sizes = (held.chunk_bytes or "all" for held in (first, second))
            reasons = [f"chunks of {next(sizes)} and of {next(sizes)} bytes are hashed"]
        reason = ", ".join(reasons) or "those of sources of other lengths"
        lacking.insert(0, f"tokens not compared: {reason}")
    tokens = next(level for level in ("none", "sampled", "whole") if level in levels)
    return ContentCheck(
        differences=(*evaluated, *found), tokens=tokens, not_compared=tuple(lacking)
    )


def _size(value: Any) -> Any:
    """Return the samples of a subset or index as text; none for one that a run does not have."""
    if isinstance(value, Mapping) and "samples" in value:
        return f"{value['samples']} samples"
    return "none" if value is None else value


def _source_differences(
    what: str,
    first: HeldContent,
    second: HeldContent,
    ours: Sequence[HeldSource],
    theirs: Sequence[HeldSource],
    levels: set[str],
) -> Iterator[str]:
    """Yield the differences of sources; add to ``levels`` the parts of tokens compared."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        name = f"{what} {number}"
        if a.fingerprint != b.fingerprint:
            levels.add("none")
            continue
        same_targets = None in (a.targets, b.targets) or a.targets == b.targets
        if not same_targets:
            yield from apart(f"{name}: targets", a.targets, b.targets)
        if a.content is not None and b.content is not None:
            in_both = a.content.tokens.keys() & b.content.tokens.keys()
            levels.add("whole" if "whole" in in_both else "sampled")
            for part in ("content", "targets") if same_targets else ("content",):
                if difference := a.content.difference(b.content, part):
                    yield f"{name}: {difference}"
        elif a.hashes and b.hashes and first.chunk_bytes == second.chunk_bytes:
            for part in a.hashes.keys() & b.hashes.keys():
                algorithm = "sha256" if first.chunk_bytes is None else "xxh3-64"
                found = differing_chunks(a.hashes[part], b.hashes[part], algorithm)
                for chunk, *pair in found[:1]:
                    yield from apart(f"{name}: {part}: chunk {chunk}", *pair)
        else:
            levels.add("none")
