"""Loaders of locked runs: `open_run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megaindex._lazy import torch_needed
from megaindex.audit.diff_inputs import Side
from megaindex.builders.described import build_described
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.configs.run import RunSettings
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.balance import CostModel
from megaindex.index.frameworks import SPLITS, Split
from megaindex.index.receipts import fingerprint_keys, receipts_between
from megaindex.index.skips import Skip, Skips, skips_of, without_holes
from megaindex.index.spans import Index
from megaindex.lock.check import sound_files, sound_paths
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.make import Folder, most_samples, resolved_subset, runs_of_subsets
from megaindex.lock.settings import differences, leaves, read_run
from megaindex.recipe.mix_changes import MixChanges
from megaindex.recipe.recipe import Recipe
from megaindex.run.run import Run
from megaindex.run.subset import rows_of, run_of_subset, source_nodes, step_bounds_of
from megaindex.validation import shown

if TYPE_CHECKING:
    from megaindex.loader.loader import Loader
    from megaindex.loader.recipe_loader import RecipeLoader


def open_run(
    lock: Folder | Lock,
    *,
    data_parallel_rank: int = 0,
    data_parallel_size: int | None = None,
    micro_batch_size: int | None = None,
    search: Folder | None = None,
    cache_dir: Folder | None = None,
    balance: CostModel | None = None,
    **loading: Any,
) -> RecipeLoader | Loader:
    """Return the loader of one rank of a locked run, after checking its sources.

    Args:
        lock: the lock, or its path.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks. Default: that of the lock, or 1.
        micro_batch_size: rows of one micro batch of a rank. Default: that of the lock, or 1.
        search: folder in which pairs are sought that are not at their paths.
        cache_dir: cache of built indices, whose samples are compared with the lock, all of them;
            None: build in memory.
        balance: cost model by which each step's samples are assigned to the ranks.
        loading: other arguments of `megaindex.loader.RecipeLoader` for a recipe, of
            `megaindex.loader.Loader` for others.

    Returns:
        For a recipe a `megaindex.loader.RecipeLoader`, else a `megaindex.loader.Loader` with the
        run's sampler, after the steps made before the lock, and a recorder of receipts.

    Raises:
        MissingFile, StorageError: the lock or a source cannot be read.
        FormatError: the lock is damaged, a source is not what it was, or the settings give another
            order than the lock; the message names the file.
    """
    lock = read_lock(lock)
    train = lock.content["subsets"]["train"]
    settings, recipe, run = _open(lock, search, cache_dir)
    if recipe is not None:
        with torch_needed("megaindex.lock.open_run"):
            from megaindex.loader.recipe_loader import RecipeLoader

        return RecipeLoader(
            recipe,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            micro_batch_size=micro_batch_size,
            balance=balance,
            **loading,
        )
    ranks: dict[str, Any] = {
        "data_parallel_rank": data_parallel_rank,
        "data_parallel_size": _given(data_parallel_size, train["data_parallel_size"]),
        "micro_batch_size": _given(micro_batch_size, train["micro_batch_size"]),
    }
    with torch_needed("megaindex.lock.open_run"):
        from megaindex.loader.loader import Loader
    from megaindex.loader.receipts import Recorder
    from megaindex.loader.samplers import MicroBatchSampler

    tail: Literal["drop", "pad"] = "pad" if run.masked_rows else "drop"
    sampler = MicroBatchSampler(
        num_samples=run.index.num_samples,
        train_samples=run.num_samples if run.skips is None else run.skips.end,
        consumed_samples=int(run.step_bounds[run.past_steps]),
        global_batch_size=settings.batch,
        tail=tail,
        index=run.index,
        balance=balance,
        **ranks,
    )
    recorder = Recorder(lock.fingerprints("train"))
    return Loader(run.index, sampler, **{"recorder": recorder, **loading})


def _given(size: int | None, locked: int | None) -> int:
    """Return a size of the call, else that of the lock, else 1."""
    return (1 if locked is None else locked) if size is None else size


def run_of_lock(
    lock: Folder | Lock,
    *,
    subset: Split = "train",
    search: Folder | None = None,
    cache_dir: Folder | None = None,
) -> Run:
    """Return the samples of a subset of a locked run, after checking its sources, for an audit.

    Args:
        lock, search, cache_dir: as for `open_run`.
        subset: train, valid or test; of the evaluation of a recipe, one round.

    Raises:
        MissingFile, StorageError, FormatError: as `open_run`.
    """
    lock = read_lock(lock)
    locked, files = lock.subset(subset), sound_files(lock, search)
    datasets = _datasets(lock, locked, search)
    run = run_of_subset(locked, datasets, files, cache_dir=cache_dir)
    _check_samples(lock, subset, run, cache_dir)
    return run


def locked_run(lock: Folder | Lock) -> Recipe | RunSettings:
    """Return the settings of a locked run, after checking its sources and all its subsets.

    Raises:
        MissingFile, StorageError, FormatError: as `open_run`.
    """
    return _open(read_lock(lock), None, None, SPLITS)[0]


def _open(
    lock: Lock,
    search: Folder | None,
    cache_dir: Folder | None,
    wanted: Sequence[Split] = ("train",),
) -> tuple[Recipe | RunSettings, OpenRecipe | None, Run]:
    """Return the settings of a lock, the recipe opened, and the training run; check subsets."""
    paths, files = sound_paths(lock, search), sound_files(lock, search)
    index = lock.content["subsets"]["train"]["index"]
    settings = read_run(lock.content["settings"], index, paths, lock.path, files)
    opened = open_recipe(settings, cache_dir=cache_dir) if isinstance(settings, Recipe) else None
    runs = runs_of_subsets(settings, opened, cache_dir, wanted, most_samples(lock))
    rows, named = rows_of(paths), rows_of(files)
    for name in wanted:
        run = runs.get(name)
        _check_same(lock, name, None if run is None else resolved_subset(run, rows, named))
    _check_samples(lock, "train", runs["train"], cache_dir)
    return settings, opened, runs["train"]


def _check_same(lock: Lock, name: Split, ours: dict[str, Any] | None) -> None:
    """Refuse a lock whose settings this release resolves to other samples of a subset."""
    theirs = lock.content["subsets"].get(name)
    if theirs is not None:
        theirs = {key: value for key, value in theirs.items() if key != "receipts"}
    for where, locked, resolved in differences(theirs, ours, f"subsets.{name}"):
        raise FormatError(
            f"{lock.path}: {where} is {shown(locked)}, and this release resolves the settings to "
            f"{shown(resolved)}; use the release that wrote the lock, "
            f"{lock.content['written_by']}"
        )


def _check_samples(lock: Lock, subset: str, run: Run, cache_dir: Folder | None) -> None:
    """Refuse cached arrays with other samples than the lock, by the receipt of all samples.

    Arrays that are built in memory follow from the description of the index.
    """
    if cache_dir is None:
        return
    total = lock.content["subsets"][subset]["receipts"]["total"]
    keys = fingerprint_keys(lock.fingerprints(subset))
    bounds = run.step_bounds[[0, -1]].tolist()
    (receipt,) = receipts_between(run.index, bounds, keys)
    if str(receipt) != total:
        raise FormatError(
            f"{cache_dir}: its arrays give samples of receipt {receipt}, and {lock.path} states "
            f"{total}; remove the entry, or open the run without cache_dir"
        )


def locked_index(lock: Lock, search: Folder | None = None) -> Index:
    """Return the training samples of a lock, built from its description of the index.

    Raises:
        MissingFile, StorageError, FormatError: as `open_run`.
    """
    train, files = lock.subset("train"), sound_files(lock, search)
    return build_described(train["index"], _datasets(lock, train, search), files=files)


def _datasets(lock: Lock, subset: Mapping[str, Any], search: Folder | None) -> list[IndexedDataset]:
    """Return the sound dataset of each source of a subset."""
    paths, dialect = sound_paths(lock, search), lock.content["dialect"]
    return [IndexedDataset(paths[row], dialect=dialect) for row in subset["sources"]]


def locked_skips(lock: Lock) -> tuple[Skip, ...]:
    """Return the skips of a lock, with files and sources as the lock names them, for display."""
    train, sources = lock.content["subsets"]["train"], lock.content["sources"]["rows"]
    found = []
    for entry in train["skip"] or ():
        values = dict(entry)
        if "documents" in values:
            values["documents"] = lock.content["files"][values["documents"]]["path"]
        if "source" in values and lock.content["settings"]["kind"] == "run":
            values["source"] = sources[train["sources"][int(values["source"])]][0]
        found.append(Skip.of(values, lock.path, ""))
    return tuple(found)


def locked_mix(lock: Lock, search: Folder | None = None) -> MixChanges | None:
    """Return the changes of the mix of a locked recipe; None without any."""
    given = lock.content["settings"].get("recipe", {}).get("mix_changes")
    if given is None:
        return None
    return MixChanges.read(sound_files(lock, search)[given["file"]], given["sources"])


def side_from_lock(lock: Folder | Lock) -> Side:
    """Return the training samples of a lock as a side of `megaindex.audit.compare`.

    Those of a run that joined another system's are numbered from its own first sample on.

    Raises:
        MissingFile, StorageError, FormatError: as `open_run`.
    """
    lock = read_lock(lock)
    train, index = lock.subset("train"), locked_index(lock)
    skips = skips_of(index)
    first = getattr(index, "first_position", 0)
    if skips is not None or first or index.num_samples > train["samples"]:
        index = without_holes(index, first, train["samples"])
    settings = dict(leaves(lock.content["settings"]))
    of_skips = f"{settings.get('kind')}.skip."
    nodes = list(source_nodes(train["index"]))
    common = {
        "corpus": _one_or_all(lock.fingerprints("train")),
        "source_name": _one_or_all([node.get("name") for node in nodes]),
        **_skipped_and_masked(lock, skips),
    }
    resolved = {
        name: _one_or_all([node.get(key) for node in nodes])
        for key, name in _RESOLVED.items()
        if any(key in node for node in nodes)
    }
    if "run.order.name" in settings:
        resolved["order"] = settings["run.order.name"]
    own = {key: each for key, each in settings.items() if not key.startswith(of_skips)}
    return Side(
        name=lock.path,
        index=index,
        settings={**common, **own},
        resolved={**resolved, **common},
        identity=lock.identity,
    )


_RESOLVED = {
    "order": "order",
    "documents": "documents",
    "sequence_length": "sequence_length",
    "seed": "seed",
    "extra": "add_extra_token",
    "final_epoch_apart": "final_epoch_apart",
    "epochs_mixed": "epochs_mixed",
    "left_over": "left_over",
    "max_documents": "max_documents",
    "long_documents": "long_documents",
}
"""Settings of one source in the description of an index, and their names in a manifest."""


def _one_or_all(values: list[Any]) -> Any:
    """Return the values of all sources, or their only one."""
    return values[0] if all(each == values[0] for each in values) else values


def _skipped_and_masked(lock: Lock, skips: Skips | None) -> dict[str, str | None]:
    """Return what a lock skips and masks as text, in one form for all entries; None: nothing."""
    if skips is None:
        return {"skip": None, "mask": None}
    train, masks = lock.content["subsets"]["train"], []
    for skip, entry in zip(locked_skips(lock), train["skip"], strict=True):
        if not skip.ranges:
            what = "all documents"
            if "documents" in entry:
                digest = lock.content["files"][entry["documents"]]["sha256"]
                what = f"documents of {shown(skip.documents)} (SHA-256 {digest[:8]}…)"
            source = "" if skip.source is None else f" of {shown(skip.source)}"
            masks.append(f"{what}{source} from step {skip.from_step}")
    bounds = step_bounds_of(train)
    steps = [
        f"{first}-{end - 1}" + (" (moved)" if move else "")
        for (first, end), move in zip(
            np.searchsorted(bounds, skips.holes).tolist(), skips.is_moved.tolist(), strict=True
        )
    ]
    return {
        "skip": f"steps {', '.join(steps)}" if steps else None,
        "mask": ", ".join(sorted(masks)) or None,
    }
