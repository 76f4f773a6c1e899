"""Locks of runs: `make_lock`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megaindex
from megaindex.arithmetic import ceil_div
from megaindex.builders.extend import ExtendedRun
from megaindex.builders.recipe import ValidationCache
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.format.provenance import RecordedTokenizer, open_provenance
from megaindex.index.receipts import Receipt, fingerprint_keys, receipts_between
from megaindex.index.spans import datasets_of
from megaindex.io.paths import absolute, is_remote, sha256_of
from megaindex.lock.framework_settings import FrameworkSettings
from megaindex.lock.lock_file import Lock
from megaindex.lock.pinned_files import (
    Folder,
    all_token_hashes,
    file_facts,
    file_hash,
    provenance_hash,
)
from megaindex.lock.settings import LockedSettings, resolved_subset, settings_of
from megaindex.lock.shape import FORMAT, SOURCE_COLUMNS, VERSION
from megaindex.objects.files import each_of
from megaindex.progress import Bar, silent
from megaindex.run.identity import canonical_forms, short_hash
from megaindex.run.run import Run
from megaindex.run.subset import block_bounds, first_step, rows_of, subset_of
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.arguments import given_run
from megaindex.settings.recipe import Recipe
from megaindex.settings.run_settings import RunSettings

Progress = Callable[[int, int], None]

_MOST_BLOCKS = 1024  # with a receipt of their own
_LEAST_BLOCK = 1 << 12  # samples


def make_lock(
    run: Recipe | RunSettings | None = None,
    *,
    tokens: bool = False,
    sha256: bool = False,
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
    bar: Bar = silent,
    amend: AmendedBlend | Folder | None = None,
    **settings: Any,
) -> Lock:
    """Return the lock of a run: its data, its order, and the receipts of all of its samples.

    Args:
        run: a recipe, or a run under a framework.
        tokens: hash every chunk of the .bin files too; without them, a .bin is known by its size.
        sha256: hash the whole .idx and .bin files by SHA-256, in place of XXH3-64.
        cache_dir: cache of built indices; None: build in memory.
        progress: called with (done, total) samples of which the receipts are computed.
        bar: function of the total bytes of the .bin files that returns a function called with the
            bytes read.
        amend: how a framework's run began, and its changes or extension since, or the path of the
            file of ``install(amend=…)``; the settings are those of today.
        settings: a run by names in place of ``run``, as for `megaindex.make_plan`.

    Returns:
        The lock; `Lock.write` writes it.

    Raises:
        InvalidArgument: the run cannot be built, see `megaindex.audit.run_of_settings`, or the
            changes do not fit it.
        FormatError, StorageError: a source cannot be read.
    """
    if isinstance(run, ExtendedRun):
        raise InvalidArgument(
            "an amended or extended run has no steps; give the settings of today's run, and the "
            "changes as amend=AmendedBlend(data_path=…, num_samples=…, changes=…), or "
            "consumed_samples in place of changes"
        )
    if amend is not None and not isinstance(amend, AmendedBlend):
        amend = AmendedBlend.read(amend)
    hashed = ("sha256" if sha256 else "xxh3-64", tokens or sha256)
    if run is not None:
        if settings:
            raise InvalidArgument(
                f"a recipe has all settings, also {next(iter(settings))}; change the recipe"
            )
        return _lock_of(settings_of(run, cache_dir, amend), hashed, cache_dir, progress, bar)
    with given_run(None, settings) as given:
        return _lock_of(settings_of(given, cache_dir, amend), hashed, cache_dir, progress, bar)


def identity_of(settings: RunSettings, run: Run, cache_dir: Folder | None = None) -> str:
    """Return the identity that the lock of settings has, whose receipts are not computed.

    ``run`` is their run of training, which is not built again unless skips have files.

    Raises:
        InvalidArgument, FormatError, StorageError: as `make_lock`.
    """
    locked = FrameworkSettings(settings, cache_dir)
    rows, files = rows_of(locked.paths), rows_of(locked.files)
    _, fingerprints = _pairs(locked, cache_dir)
    runs = locked.runs(train=None if files else run)
    forms = canonical_forms(
        {name: subset_of(each, rows, files) for name, each in runs.items()},
        fingerprints,
        [sha256_of(path)[1] for path in locked.files],
    )
    return short_hash(forms)


def _pairs(
    settings: LockedSettings, cache_dir: Folder | None
) -> tuple[list[IndexedDataset], list[str]]:
    """Return the pairs of a run, and their fingerprints."""
    paths, known = settings.paths, settings.pairs
    cache = ValidationCache(paths, None if cache_dir is None else os.fspath(cache_dir))
    datasets = [
        known[path] if path in known else cache.open(path, dialect=settings.dialect)
        for path in paths
    ]
    fingerprints = [cache.fingerprint(dataset) for dataset in datasets]
    cache.keep(datasets)
    return datasets, fingerprints


def _lock_of(
    settings: LockedSettings,
    hashed: tuple[str, bool],
    cache_dir: Folder | None,
    progress: Progress | None,
    bar: Bar,
) -> Lock:
    runs, paths, named = settings.runs(), settings.paths, settings.files
    rows, files, dialect = rows_of(paths), rows_of(named), settings.dialect
    datasets, fingerprints = _pairs(settings, cache_dir)
    root = _root([*paths, *named])
    algorithm, with_tokens = hashed
    pins = each_of(lambda path: file_hash(f"{path}.idx", algorithm), paths)
    tokenizers, named_by = _tokenizers(paths)
    table = [
        [
            _relative(path, root),
            fingerprint,
            idx,
            dataset.nbytes,
            len(dataset),
            dataset.document_indices.size - 1,
            dataset.num_tokens,
            dataset.dtype.name,
            rows_of_pair,
            provenance_hash(path),
            None,
        ]
        for path, dataset, fingerprint, idx, rows_of_pair in zip(
            paths, datasets, fingerprints, pins, named_by, strict=True
        )
    ]
    subsets = {
        name: {
            **resolved_subset(run, rows, files),
            "receipts": _receipts(run, rows, fingerprints, progress),
        }
        for name, run in runs.items()
    }
    content = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": f"megaindex {megaindex.__version__}",
        "settings": {"kind": settings.kind, settings.kind: settings.to_json(rows, files)},
        "root": root,
        "hash": algorithm,
        "sources": {"columns": list(SOURCE_COLUMNS), "rows": table},
        "tokenizers": tokenizers,
        "about": None,
        "dialect": dialect,
        "tokens": all_token_hashes(paths, algorithm, bar) if with_tokens else None,
        "files": [{"path": _relative(path, root), **file_facts(path)} for path in named],
        "subsets": subsets,
    }
    return Lock(path="", content=content)


def _tokenizers(paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the tokenizers that provenances name, and their rows for each pair.

    Raises:
        FormatError: a provenance is damaged, or of another pair.
    """
    rows: dict[RecordedTokenizer, int] = {}
    named = []
    for path in paths:
        found = open_provenance(path)
        files = () if found is None else found.files
        own = dict.fromkeys(file.tokenizer for file in files if file.tokenizer is not None)
        named.append([rows.setdefault(tokenizer, len(rows)) for tokenizer in own])
    tokenizers = [
        {
            "name": each.path,
            "fingerprint": each.fingerprint,
            "special_tokens": each.add_special_tokens,
            "eod": each.eod,
        }
        for each in rows
    ]
    return tokenizers, named


def _root(paths: Sequence[str]) -> str:
    """Return the deepest folder that holds all local pairs; empty without any."""
    local = [os.path.dirname(path) for path in paths if not is_remote(path)]
    return os.path.commonpath(local) if local else ""


def _relative(path: str, root: str) -> str:
    return path if is_remote(path) else os.path.relpath(path, root).replace(os.sep, "/")


def _receipts(
    run: Run,
    rows: Mapping[str, int],
    fingerprints: Sequence[str],
    progress: Progress | None,
) -> dict[str, Any]:
    keys = fingerprint_keys(
        [fingerprints[rows[absolute(d.path_prefix)]] for d in datasets_of(run.index)]
    )
    steps, samples = run.num_steps - first_step(run.step_bounds), run.samples_served
    least = max(ceil_div(steps, _MOST_BLOCKS), ceil_div(_LEAST_BLOCK * steps, samples))
    block_steps = min(steps, least)
    bounds = block_bounds(run.step_bounds, block_steps)
    found = receipts_between(run.index, bounds, keys, progress=progress)
    return {
        "block_steps": block_steps,
        "blocks": [str(receipt) for receipt in found],
        "total": str(sum(found, Receipt())),
    }
