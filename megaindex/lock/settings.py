"""The settings of a run in a lock, from which it is planned again; they decide no sample of it.

Fields: ``kind``, "recipe" or "run"; ``recipe``, the recipe file's mapping; ``run``, fields of
`RunSettings`. Paths of pairs are replaced by their rows in the lock's ``sources``, those of other
files by their rows in ``files``. Floats and fractions are text: "0.3" and "1/3".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaindex.errors import FormatError, InvalidArgument
from megaindex.lock.framework_settings import FrameworkSettings
from megaindex.lock.lock_file import Lock, compact
from megaindex.lock.pinned_files import Folder, sound_files, sound_paths
from megaindex.lock.recipe_settings import RecipeSettings
from megaindex.lock.setting_values import leaves
from megaindex.run.run import Run
from megaindex.run.subset import differences, rows_of, subset_of
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.recipe import Recipe
from megaindex.settings.run_settings import RunSettings
from megaindex.validation import error_text, shown

LockedSettings = RecipeSettings | FrameworkSettings
_OF_TYPE: dict[type, Any] = {Recipe: RecipeSettings, RunSettings: FrameworkSettings}
_OF_KIND: dict[str, Any] = {each.kind: each for each in _OF_TYPE.values()}


def settings_of(
    run: Recipe | RunSettings,
    cache_dir: Folder | None = None,
    amend: AmendedBlend | None = None,
) -> LockedSettings:
    """Return the settings of a run as a lock has them.

    Raises:
        InvalidArgument: it is neither a recipe nor the settings of a framework, or a recipe that
            is to be changed as a framework's run.
    """
    if type(run) not in _OF_TYPE:
        raise InvalidArgument(
            f"run must be a recipe or settings of a framework, got {shown(run)}; give the result "
            "of megaindex.recipe.read_recipe or megaindex.plan.resolve"
        )
    found: LockedSettings = _OF_TYPE[type(run)](run, cache_dir, amend)
    return found


def read_settings(
    lock: Lock, paths: Sequence[str], files: Sequence[str], cache_dir: Folder | None = None
) -> LockedSettings:
    """Return the settings of a lock, or raise FormatError that names it.

    ``paths`` and ``files`` are those of its rows.
    """
    settings = lock.content["settings"]
    try:
        kind = settings["kind"]
        found: LockedSettings = _OF_KIND[kind].read(settings[kind], lock, paths, files, cache_dir)
        return found
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = error_text(error)
        raise FormatError(
            f"{lock.path}: its settings cannot be read ({reason}); restore the file, or lock the "
            "run again"
        ) from None


def checked_settings(lock: Lock) -> LockedSettings:
    """Return the settings of a lock, with the changes of a run that changed on the way.

    Raises:
        MissingFile, StorageError: a source cannot be read.
        FormatError: the lock is damaged, a source is not what it was, or the settings give other
            samples than the lock; the message names the file.
    """
    paths, files = sound_paths(lock), sound_files(lock)
    settings = read_settings(lock, paths, files)
    runs = settings.runs(most_samples(lock))
    for where, locked, resolved in unlike(lock, runs, paths, files):
        raise FormatError(
            f"{lock.path}: {where} is {shown(locked)}, and this release resolves the settings to "
            f"{shown(resolved)}; use the release that wrote the lock, "
            f"{lock.content['written_by']}"
        )
    return settings


def unlike(
    lock: Lock, runs: Mapping[Any, Run], paths: Sequence[str], files: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places in which the subsets of a lock differ from runs, with both values."""
    rows, named = rows_of(paths), rows_of(files)
    theirs = {
        name: {key: value for key, value in subset.items() if key != "receipts"}
        for name, subset in lock.content["subsets"].items()
    }
    ours = {name: resolved_subset(run, rows, named) for name, run in runs.items()}
    return differences(theirs, ours, "subsets")


def resolved_subset(run: Run, rows: Mapping[str, int], files: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a subset as a lock holds them, without its receipts."""
    subset = subset_of(run, rows, files)
    return {**subset, "index": compact(subset["index"])}


def most_samples(lock: Lock) -> dict[str, int]:
    """Return for each subset of a lock the sum of the samples that it states.

    A run asks for no more: some of them may fill no batch, or are asked of the sources together.
    """
    return {
        name: sum(each for where, each in leaves(lock.subset(name)) if where.endswith("samples"))
        for name in lock.content["subsets"]
    }
