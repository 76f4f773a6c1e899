"""Loaders of locked runs: `open_run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaindex._lazy import torch_needed
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.opening import LockedFiles
from megaindex.lock.pinned_files import Folder
from megaindex.lock.recipe_settings import RecipeSettings
from megaindex.run.run import Run

if TYPE_CHECKING:
    from megaindex.loader.loader import Loader


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
) -> Loader:
    """Return the loader of one rank of a locked run, after checking its sources.

    The samples are those of the lock's subset ``train``. Its settings are read when the mix of a
    recipe changes, and must give the run of its identity.

    Args:
        lock: the lock, or its path.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks. Default: that of the lock, or 1.
        micro_batch_size: rows of one micro batch of a rank. Default: that of the lock, or 1.
        search: folder in which pairs are sought that are not at their paths.
        cache_dir: cache of built indices, whose samples are compared with the lock, all of them;
            None: build in memory.
        balance: cost model by which each step's samples are assigned to the ranks.
        loading: other arguments of `megaindex.loader.Loader`.

    Returns:
        A `megaindex.loader.Loader` with the sampler of the run, after the steps made before the
        lock, its loss targets, its evaluation if every round of it is the same, and a recorder of
        receipts.

    Raises:
        MissingFile, StorageError: the lock or a source cannot be read.
        FormatError: the lock is damaged, or a source is not what it was; the message names the
            file.
    """
    if decided := {"targets", "evaluation", "identity", "sampler"} & loading.keys():
        raise InvalidArgument(f"{min(decided)}: the lock decides it; leave it out")
    lock = read_lock(lock)
    opened = LockedFiles(lock, search)
    run = opened.run("train", cache_dir)
    with torch_needed("megaindex.lock.open_run"):
        from megaindex.loader.loader import loader_of
    from megaindex.loader.run_recipe import RunRecipe

    def evaluation() -> Run | None:
        valid = lock.content["subsets"].get("valid")
        is_round = valid is not None and len(valid["steps"]) == valid["steps"][0][2] == 1
        return opened.run("valid") if is_round else None

    is_recipe = lock.content["settings"]["kind"] == RecipeSettings.kind
    return loader_of(
        run,
        fingerprints=lock.fingerprints("train"),
        identity=lambda: lock.identity,
        evaluation=evaluation,
        recipe=RunRecipe(opened.recipe, is_given=False) if is_recipe else None,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_size=micro_batch_size,
        balance=balance,
        **loading,
    )
