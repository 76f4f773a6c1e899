"""Locks of runs: `make_lock`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

import megaindex
from megaindex.arithmetic import ceil_div
from megaindex.builders.extend import ExtendedRun
from megaindex.builders.recipe import OpenRecipe, ValidationCache, open_recipe
from megaindex.configs.run import RunSettings
from megaindex.configs.run_builder import given_run
from megaindex.errors import InvalidArgument, MissingFile
from megaindex.index.frameworks import SPLITS, Split
from megaindex.index.receipts import Receipt, fingerprint_keys, receipts_between
from megaindex.index.skips import source_number
from megaindex.index.spans import datasets_of
from megaindex.io.paths import FileInfo, absolute, as_storage_error, is_remote, open_regular
from megaindex.lock.lock_file import Lock, compact
from megaindex.lock.settings import files_of, leaves, paths_of, settings_of
from megaindex.lock.shape import FORMAT, LEAST_CHUNK, PATHS, SOURCE_COLUMNS, VERSION
from megaindex.objects.files import each_of, read_ranges, stat_path
from megaindex.plan.plan import evaluation_of
from megaindex.plan.sizing import SplitPart
from megaindex.plan.sources import parts_of
from megaindex.progress import Bar, silent
from megaindex.recipe.mix_changes import MixChanges
from megaindex.recipe.recipe import Recipe
from megaindex.run.from_recipe import run_of_opened, source_of_opened
from megaindex.run.from_settings import run_of_settings
from megaindex.run.run import Run
from megaindex.run.subset import block_bounds, first_step, rows_of, subset_of

Folder = str | os.PathLike[str]
Progress = Callable[[int, int], None]

_MOST_BLOCKS = 1024  # with a receipt of their own
_LEAST_BLOCK = 1 << 12  # samples
_PIECE = 16 << 20  # bytes read at a time
_MOST_CHUNKS = 1024


def make_lock(
    run: Recipe | RunSettings | None = None,
    *,
    tokens: bool = False,
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
    bar: Bar = silent,
    **settings: Any,
) -> Lock:
    """Return the lock of a run: its data, its order, and the receipts of all of its samples.

    Args:
        run: a recipe, or a run under a framework.
        tokens: hash every chunk of the .bin files too; without them, a .bin is known by its size.
        cache_dir: cache of built indices; None: build in memory.
        progress: called with (done, total) samples of which the receipts are computed.
        bar: function of the total bytes of the .bin files that returns a function called with the
            bytes read.
        settings: a run by names in place of ``run``, as for `megaindex.make_plan`.

    Returns:
        The lock; `Lock.write` writes it.

    Raises:
        InvalidArgument: the run cannot be built, see `megaindex.audit.run_of_settings`, or is that
            of `megaindex.amend_run` or `megaindex.extend_run`.
        FormatError, StorageError: a source cannot be read.
    """
    if isinstance(run, Recipe):
        if settings:
            raise InvalidArgument(
                f"a recipe has all settings, also {next(iter(settings))}; change the recipe"
            )
        return _lock_of(run, tokens, cache_dir, progress, bar)
    if isinstance(run, ExtendedRun):
        raise InvalidArgument(
            "an amended or extended run cannot be locked, because the order of its samples behind "
            "the change could only be written out; lock the run as it began and keep the changes, "
            "or begin such runs as a recipe, in which changes are stages"
        )
    with given_run(run, settings) as given:
        return _lock_of(given, tokens, cache_dir, progress, bar)


def _lock_of(
    settings: Recipe | RunSettings,
    tokens: bool,
    cache_dir: Folder | None,
    progress: Progress | None,
    bar: Bar,
) -> Lock:
    settings = _with_absolute_paths(settings)
    opened = open_recipe(settings, cache_dir=cache_dir) if isinstance(settings, Recipe) else None
    runs = runs_of_subsets(settings, opened, cache_dir)
    paths, named = paths_of(settings), files_of(settings)
    rows, files = rows_of(paths), rows_of(named)
    dialect = "megatron" if isinstance(settings, Recipe) else settings.row.file_dialect
    cache = ValidationCache(paths, None if cache_dir is None else os.fspath(cache_dir))
    known = {} if opened is None else opened.pairs
    datasets = [
        known[path] if path in known else cache.open(path, dialect=dialect) for path in paths
    ]
    fingerprints = [cache.fingerprint(dataset) for dataset in datasets]
    cache.keep(datasets)
    root = _root([*paths, *named])
    table = [
        [
            _relative(path, root),
            fingerprint,
            idx,
            dataset.nbytes,
            len(dataset),
            dataset.document_indices.size - 1,
            dataset.num_tokens,
        ]
        for path, dataset, fingerprint, idx in zip(
            paths, datasets, fingerprints, each_of(idx_hash, paths), strict=True
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
        "settings": settings_of(settings, rows, opened, files),
        "root": root,
        "sources": {"columns": list(SOURCE_COLUMNS), "rows": table},
        "dialect": dialect,
        "tokens": _token_hashes(paths, bar) if tokens else None,
        "files": [{"path": _relative(path, root), **file_facts(path)} for path in named],
        "subsets": subsets,
    }
    return Lock(path="", content=content)


def _with_absolute_paths(settings: Recipe | RunSettings) -> Recipe | RunSettings:
    """Return the run with the absolute paths of its pairs and files; URLs stay."""
    if isinstance(settings, Recipe):
        evaluation, past = settings.evaluation, settings.past
        if evaluation is not None:
            evaluation = replace(evaluation, source=_placed(evaluation.source))
        if past is not None:
            past = replace(past, read=tuple(_placed(read, ("documents",)) for read in past.read))
        return replace(
            settings,
            sources=tuple(map(_placed, settings.sources)),
            skip=tuple(_placed(skip, ("documents",)) for skip in settings.skip),
            mix_changes=_placed_changes(settings.mix_changes),
            past=past,
            evaluation=evaluation,
        )
    each: dict[str, Any] = {
        name: tuple(map(_placed, getattr(settings.data, name))) for name in SPLITS
    }
    names = [source.path for source in settings.data.train]
    skips = []
    for skip in settings.skip:
        number = None if skip.source is None else str(source_number(skip.source, names))
        skips.append(replace(_placed(skip, ("documents",)), source=number))
    return replace(settings, data=replace(settings.data, **each), skip=tuple(skips))


def _placed(value: Any, names: Sequence[str] = PATHS) -> Any:
    """Return a dataclass with absolute paths in the fields of these names that hold one."""
    given = {name: getattr(value, name, None) for name in names}
    return replace(
        value, **{k: absolute(path) for k, path in given.items() if isinstance(path, str) and path}
    )


def _placed_changes(changes: MixChanges | None) -> MixChanges | None:
    """Return the changes with the absolute path of their file."""
    if changes is None or not (changes.size or changes.path):
        return None
    if not changes.path:
        raise InvalidArgument(
            "mix_changes of a recipe to lock must be a file, got changes that none holds; write "
            "them with MixChanges.write"
        )
    return replace(changes, path=absolute(changes.path))


def _root(paths: Sequence[str]) -> str:
    """Return the deepest folder that holds all local pairs; empty without any."""
    local = [os.path.dirname(path) for path in paths if not is_remote(path)]
    return os.path.commonpath(local) if local else ""


def _relative(path: str, root: str) -> str:
    return path if is_remote(path) else os.path.relpath(path, root).replace(os.sep, "/")


def runs_of_subsets(
    settings: Recipe | RunSettings,
    opened: OpenRecipe | None,
    cache_dir: Folder | None,
    wanted: Sequence[Split] = SPLITS,
    most: Mapping[str, int] | None = None,
) -> dict[Split, Run]:
    """Return the run of each wanted subset.

    ``most`` are the samples of each subset of a lock, see `most_samples`.

    Raises:
        InvalidArgument: the run cannot be built, or has more samples than the lock.
    """
    sizes = None if most is None else {name: most.get(name, 0) for name in SPLITS}
    if opened is not None:
        end = opened.layout.end_sample
        if sizes is not None and end > sizes["train"]:
            raise InvalidArgument(
                f"train: the settings ask for {end} samples, and must for at most "
                f"{sizes['train']}; restore the settings"
            )
        train = run_of_opened(opened)
        evaluated = {} if wanted == ("train",) else _evaluation_run(opened, train)
        return {"train": train, **evaluated}
    assert isinstance(settings, RunSettings), "only recipes are opened"

    def run(name: Split) -> Run:
        most_samples = None if sizes is None else sizes[name]
        return run_of_settings(
            settings, subset=name, cache_dir=cache_dir, most_samples=most_samples
        )

    runs: dict[Split, Run] = {"train": run("train")}
    if len(wanted) == 1:
        return runs
    parts = parts_of(settings.data, settings.row, sequence_length=settings.sequence_length)
    train = runs["train"]  # moved samples make steps behind the others
    steps = train.num_steps if train.skips is None else train.skips.num_steps
    evaluation = evaluation_of(settings, steps, parts)
    if evaluation is not None:
        counts = (evaluation.valid_samples, evaluation.test_samples)
        for name, samples in zip(SPLITS[1:], counts, strict=True):
            if samples and _has_samples(settings, parts[name]):
                runs[name] = run(name)
    return runs


def _has_samples(settings: RunSettings, parts: Sequence[SplitPart]) -> bool:
    """Return True if each source has a sample; a framework fails at one that has none."""
    short = settings.row.is_framework or settings.row.order == "packed"  # which has shorter samples
    least = 1 if short else settings.sequence_length + 1
    return bool(parts) and all(part.tokens >= least for part in parts)


def _evaluation_run(opened: OpenRecipe, train: Run) -> dict[Split, Run]:
    """Return the run of one round of a recipe's evaluation, a single step of all its rows.

    Every round is the same.
    """
    rounds, source = opened.layout.evaluation, opened.validation
    if rounds is None or source is None:
        return {}
    return {
        "valid": replace(
            train,
            index=source.index(rounds.samples),
            sources=(source_of_opened(source),),
            step_bounds=np.array([0, rounds.samples], np.int64),
            past_steps=0,
            masked_rows=rounds.masked,
        )
    }


def most_samples(lock: Lock) -> dict[str, int]:
    """Return for each subset of a lock the sum of the samples that it states.

    A run asks for no more: some of them may fill no batch, or are asked of the sources together.
    """
    return {
        name: sum(each for where, each in leaves(lock.subset(name)) if where.endswith("samples"))
        for name in lock.content["subsets"]
    }


def resolved_subsets(
    settings: Recipe | RunSettings,
    paths: Sequence[str],
    cache_dir: Folder | None,
    files: Sequence[str],
    most: Mapping[str, int],
) -> tuple[dict[Split, Run], dict[str, Any]]:
    """Return the runs of the subsets, and the subsets as a lock holds them, without their receipts;
    ``paths`` and ``files`` are those of the lock's rows, ``most`` its `most_samples`."""
    opened = open_recipe(settings, cache_dir=cache_dir) if isinstance(settings, Recipe) else None
    runs = runs_of_subsets(settings, opened, cache_dir, most=most)
    rows, named = rows_of(paths), rows_of(files)
    ours: dict[str, Any] = {name: resolved_subset(run, rows, named) for name, run in runs.items()}
    return runs, ours


def resolved_subset(run: Run, rows: Mapping[str, int], files: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a subset as a lock holds them, without its receipts."""
    subset = subset_of(run, rows, files)
    return {**subset, "index": compact(subset["index"])}


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


def file_facts(path: str) -> dict[str, Any]:
    """Return size and SHA-256 of a file that the run reads besides its pairs.

    Raises:
        MissingFile, StorageError: it cannot be read.
    """
    if not os.path.lexists(path):
        raise MissingFile(
            f"{path}: the file of skipped documents or mix changes is not there; restore it"
        )
    action = "cannot read"
    with as_storage_error(path, action), open(open_regular(path, action), "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def idx_hash(prefix: str) -> str:
    """Return XXH3-64 of all bytes of the .idx of a pair, 16 hex digits.

    Raises:
        MissingFile, StorageError: it cannot be read.
    """
    info = _file_info(f"{prefix}.idx")
    return next(_hashes(info, max(1, info.nbytes)), xxhash.xxh3_64_hexdigest(b""))


def _file_info(path: str) -> FileInfo:
    info = stat_path(path)
    if info is None:
        raise MissingFile(f"{path}: does not exist; restore it")
    return info


def _hashes(info: FileInfo, chunk: int, read: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield XXH3-64 of each chunk of a file."""
    buffer = memoryview(bytearray(min(_PIECE, max(1, info.nbytes))))
    for first in range(0, info.nbytes, chunk):
        digest = xxhash.xxh3_64()
        end = min(first + chunk, info.nbytes)
        for begin in range(first, end, _PIECE):
            piece = buffer[: min(_PIECE, end - begin)]
            read_ranges(info, [(begin, piece)])
            digest.update(piece)
            if read is not None:
                read(len(piece))
        yield digest.hexdigest()


def _token_hashes(paths: Sequence[str], bar: Bar) -> dict[str, Any]:
    infos = [_file_info(f"{path}.bin") for path in paths]
    total = sum(info.nbytes for info in infos)
    chunk = LEAST_CHUNK
    while total > _MOST_CHUNKS * chunk:
        chunk *= 2
    return {"chunk_bytes": chunk, "hashes": token_hashes(infos, chunk, bar)}


def token_hashes(infos: Sequence[FileInfo], chunk: int, bar: Bar = silent) -> list[str]:
    """Return the hashes of the chunks of each .bin, one text of 16 hex digits a chunk."""
    read = bar(sum(info.nbytes for info in infos))
    return ["".join(_hashes(info, chunk, read)) for info in infos]
