"""Runs of locks, opened from their files: `run_of_lock`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.frameworks import Split
from megaindex.index.receipts import fingerprint_keys, receipts_between
from megaindex.index.skips import Skip, source_number
from megaindex.lock.framework_settings import FrameworkSettings
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.pinned_files import Folder, sound_files, sound_paths
from megaindex.lock.recipe_settings import RecipeSettings
from megaindex.lock.settings import checked_settings
from megaindex.run.from_recipe import identity_of_opened
from megaindex.run.run import Run
from megaindex.run.subset import run_of_subset
from megaindex.settings.mix_changes import MixChanges

if TYPE_CHECKING:
    from megaindex.settings.recipe import Recipe
    from megaindex.settings.run_settings import RunSettings


class LockedFiles:
    """The pairs and other files of a lock, found and compared with it.

    Raises:
        MissingFile, StorageError: one cannot be read.
        FormatError: one is not what it was; the message names it.
    """

    def __init__(self, lock: Lock, search: Folder | None = None) -> None:
        self.paths, self.files = sound_paths(lock, search), sound_files(lock, search)
        self._lock, self._opened = lock, dict[int, IndexedDataset]()

    def pair(self, row: int) -> IndexedDataset:
        """Return the dataset of a row, which is opened once."""
        if row not in self._opened:
            dialect = self._lock.content["dialect"]
            self._opened[row] = IndexedDataset(self.paths[row], dialect=dialect)
        return self._opened[row]

    def recipe(self) -> OpenRecipe:
        """Return the recipe in the settings of the lock, opened.

        Raises:
            FormatError: it gives another run than the lock.
        """
        settings = self._lock.content["settings"][RecipeSettings.kind]
        read = RecipeSettings.read(settings, self._lock, self.paths, self.files)
        opened = open_recipe(read.settings)
        if (identity := identity_of_opened(opened)) != self._lock.identity:
            raise FormatError(
                f"{self._lock.path}: its settings give the run of identity {identity}, and the "
                f"lock is that of {self._lock.identity}, whose mix cannot change; open the recipe "
                "that was locked, or use the release that wrote the lock, "
                f"{self._lock.content['written_by']}"
            )
        return opened

    def run(self, subset: str, cache_dir: Folder | None = None) -> Run:
        """Return a subset of the lock."""
        run = run_of_subset(self._lock.subset(subset), self.pair, self.files, cache_dir=cache_dir)
        run = replace(run, is_evaluation=subset != "train")
        _check_samples(self._lock, subset, run, cache_dir)
        return run


def run_of_lock(
    lock: Folder | Lock,
    *,
    subset: Split = "train",
    search: Folder | None = None,
    cache_dir: Folder | None = None,
) -> Run:
    """Return the samples of a subset of a locked run, after checking its sources, for an audit.

    Args:
        lock: the lock, or its path.
        subset: train, valid or test; of the evaluation of a recipe, one round.
        search: folder in which pairs are sought that are not at their paths.
        cache_dir: cache of built indices, whose samples are compared with the lock, all of them;
            None: build in memory.

    Raises:
        MissingFile, StorageError: the lock or a source cannot be read.
        FormatError: the lock is damaged, or a source is not what it was; the message names the
            file.
    """
    lock = read_lock(lock)
    lock.subset(subset)
    return LockedFiles(lock, search).run(subset, cache_dir)


def run_to_plan(lock: Folder | Lock) -> Recipe | RunSettings | Run:
    """Return the settings of a locked run; the run itself where its blend changed on the way.

    Raises:
        MissingFile, StorageError, FormatError: as `checked_settings`.
    """
    lock = read_lock(lock)
    is_changed = "amend" in lock.content["settings"].get(FrameworkSettings.kind, {})
    return run_of_lock(lock) if is_changed else checked_settings(lock).settings


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


def locked_skips(lock: Lock) -> tuple[Skip, ...]:
    """Return the skips of a lock, with files and sources as the lock names them, for display."""
    names, found = lock.names("train"), []
    for entry in lock.content["subsets"]["train"]["skip"] or ():
        values = dict(entry)
        if "documents" in values:
            values["documents"] = lock.content["files"][values["documents"]]["path"]
        if "source" in values:
            values["source"] = names[source_number(values["source"], names)]
        found.append(Skip.of(values, lock.path, ""))
    return tuple(found)


def locked_mix(lock: Lock, search: Folder | None = None) -> MixChanges | None:
    """Return the changes of the mix of a locked recipe; None without any."""
    given = lock.content["settings"].get("recipe", {}).get("mix_changes")
    if given is None:
        return None
    return MixChanges.read(sound_files(lock, search)[given["file"]], given["sources"])
