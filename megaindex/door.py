"""Runs that users open, whatever they are named by, and the questions that are asked of them.

>>> run = megaindex.open_run("run.yaml")
>>> run.plan().train_iters
40
>>> loader = run.loader(data_parallel_rank=rank, data_parallel_size=ranks)
"""

from __future__ import annotations

import inspect
import logging
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar, overload

from megaindex._lazy import torch_needed
from megaindex.errors import InvalidArgument
from megaindex.index.draws import Progress
from megaindex.index.frameworks import Split
from megaindex.index.spans import Index
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.plan.model import Plan, SettingsPlan
from megaindex.recipe.layout import RecipeLayout
from megaindex.run.run import Run
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.arguments import (
    ARGUMENTS,
    given_run,
    in_keys_of_files,
    run_by_name,
)
from megaindex.settings.recipe import Recipe
from megaindex.settings.run_settings import RunSettings
from megaindex.settings.run_words import KINDS, NamedRun, named_run
from megaindex.validation import shown

if TYPE_CHECKING:
    from megaindex.audit.report import Audit
    from megaindex.builders.recipe import OpenRecipe
    from megaindex.loader.batch import SampleOptions
    from megaindex.loader.loader import Loader
    from megaindex.plan.model import RecipePlan

Folder = str | os.PathLike[str]

logger = logging.getLogger("megaindex")


class OpenedRun(ABC):
    """A run that was opened by whatever names it.

    Attributes:
        name: what the run was named by, for display.
        cache_dir: cache of built indices; None: build in memory.
    """

    def __init__(self, name: str, cache_dir: Folder | None) -> None:
        self.name, self.cache_dir = name, cache_dir

    def __repr__(self) -> str:
        """Return what was opened."""
        return f"OpenedRun({self.name})"

    def _repr_html_(self) -> str:
        """Return what was opened and, once the run was built, its facts."""
        run = vars(self).get("run")
        return f"<p>{escape(repr(self))}</p>" + ("" if run is None else run._repr_html_())

    @cached_property
    @abstractmethod
    def run(self) -> Run:
        """The decided run: its index, sources and steps."""

    @abstractmethod
    def plan(self) -> Any:
        """Return the plan, which prints as `megaindex plan` does."""

    @abstractmethod
    def loader(
        self,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int | None = None,
        micro_batch_size: int | None = None,
        options: SampleOptions | None = None,
        **loading: Any,
    ) -> Loader:
        """Return the loader of one rank.

        Args:
            data_parallel_rank: rank of this process, from 0.
            data_parallel_size: number of ranks. Default: that of the run, or 1.
            micro_batch_size: rows of a micro batch. Default: that of the run, or 1.
            options: options of the samples, see `megaindex.loader.SampleOptions`.
            loading: other arguments of `megaindex.loader.Loader`.
        """

    @abstractmethod
    def make_lock(self, *, tokens: bool = False) -> Lock:
        """Return the lock of the run, which is not written.

        Args:
            tokens: hash every byte of the .bin files too.
        """

    def lock(self, path: Folder, *, tokens: bool = False, overwrite: bool = False) -> Lock:
        """Write the lock of the run, and return it.

        Args:
            path: the file, which ends in .lock.
            tokens: hash every byte of the .bin files too.
            overwrite: replace an existing file.
        """
        if not os.fspath(path).endswith(".lock"):
            raise InvalidArgument(f"a lock's name ends in .lock, got {shown(os.fspath(path))}")
        return self.make_lock(tokens=tokens).write(path, overwrite=overwrite)

    def index(self) -> Index:
        """Return the samples in order of training."""
        return self.run.index

    def audit(self, **how: Any) -> Audit:
        """Return how often, and when, each document and token is seen, see `megaindex.audit`."""
        from megaindex.audit.report import audit

        return audit(self.run, **how)


class _OpenedLock(OpenedRun):
    def __init__(self, name: str, cache_dir: Folder | None, lock: Lock) -> None:
        super().__init__(name, cache_dir)
        self._lock = lock

    @cached_property
    def run(self) -> Run:
        from megaindex.lock.opening import run_of_lock

        return run_of_lock(self._lock, cache_dir=self.cache_dir)

    def plan(self) -> Any:
        from megaindex.lock.opening import run_to_plan

        return make_plan(run_to_plan(self._lock))

    def loader(self, **given: Any) -> Loader:
        from megaindex.loader.lock_loader import open_run as loader_of_lock

        return loader_of_lock(self._lock, cache_dir=self.cache_dir, **_given(given))

    def make_lock(self, *, tokens: bool = False) -> Lock:
        if tokens and self._lock.content["tokens"] is None:
            raise InvalidArgument(
                f"{self.name}, without hashes of tokens; lock the run again with tokens"
            )
        return self._lock


class _OpenedDescription(OpenedRun):
    """A recipe, or the settings of a framework."""

    def __init__(self, name: str, cache_dir: Folder | None, described: Any) -> None:
        super().__init__(name, cache_dir)
        self._described = described

    def plan(self) -> Any:
        return make_plan(self._described)

    def make_lock(self, *, tokens: bool = False) -> Lock:
        from megaindex.lock.make import make_lock

        return make_lock(self._described, tokens=tokens, cache_dir=self.cache_dir)


class _OpenedRecipe(_OpenedDescription):
    @cached_property
    def _opened(self) -> OpenRecipe:
        from megaindex.builders.recipe import open_recipe

        return open_recipe(self._described, cache_dir=self.cache_dir)

    @cached_property
    def run(self) -> Run:
        from megaindex.run.from_recipe import run_of_opened

        return run_of_opened(self._opened)

    def loader(self, **given: Any) -> Loader:
        with torch_needed("the loader"):
            from megaindex.loader.recipe_loader import loader_of_recipe

        return loader_of_recipe(self._opened, **_given(given))


class _OpenedSettings(_OpenedDescription):
    @cached_property
    def run(self) -> Run:
        return run_of_settings(self._described, cache_dir=self.cache_dir)

    def loader(self, **given: Any) -> Loader:
        with torch_needed("the loader"):
            from megaindex.loader.loader import loader_of

        return loader_of(
            self.run,
            fingerprints=self._fingerprints(),
            identity=cache(self._identity),
            evaluation=lambda: None,
            **_given(given),
        )

    def _identity(self) -> str | None:
        """Return the identity; None, with a warning, if an evaluation cannot be built."""
        from megaindex.lock.make import identity_of

        try:
            return identity_of(self._described, self.run, self.cache_dir)
        except InvalidArgument as error:
            logger.warning("the states of this loader name no identity of the run: %s", error)
            return None

    def _fingerprints(self) -> list[str]:
        from megaindex.builders.recipe import ValidationCache

        paths = [source.path_prefix for source in self.run.sources]
        known = ValidationCache(
            paths, None if self.cache_dir is None else os.fspath(self.cache_dir)
        )
        dialect = self._described.row.file_dialect
        return [known.fingerprint(known.open(path, dialect=dialect)) for path in paths]


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def open_run(
    *run: Folder | float,
    kind: str | None = None,
    cache_dir: Folder | None = None,
    **settings: Any,
) -> OpenedRun:
    """Return a run by whatever names it: a lock, a recipe, the configuration of a framework or its
    launch script, or pairs with or without weights.

    >>> open_run("run.yaml").plan()
    >>> open_run(0.7, "web", 0.3, "code", sequence_length=2048, global_batch_size=128, epochs=1)

    Args:
        run: the words, as in first place of `megaindex plan`. What a file is follows from its
            content.
        kind: what it is, if that is not clear: lock, recipe, nanotron, llm-foundry, maxtext, neox,
            script or pairs.
        cache_dir: cache of built indices; None: build in memory.
        settings: settings of the run by name, as for `megaindex.make_plan`; they override those of
            a framework's file, and are refused beside a lock or a recipe.

    Raises:
        InvalidArgument: the words are of no kind, of several, or a setting is wrong.
        MissingFile, StorageError, FormatError: a file cannot be read, or is not what it was.
    """
    if not run:
        raise InvalidArgument("open_run needs what names the run: a file, or prefixes of pairs")
    named = named_run([_word(word) for word in run], kind)
    return _of_description(str(named), description_of(named, settings), cache_dir)


def _word(word: Any) -> Folder:
    """Return a path, or a weight as text.

    Raises:
        InvalidArgument: it is neither.
    """
    if isinstance(word, (str, os.PathLike)):
        return word
    if isinstance(word, numbers.Integral):
        return str(int(word))
    if isinstance(word, numbers.Real):
        return repr(float(word))
    raise InvalidArgument(f"open_run takes files, prefixes and weights, got {shown(word)}")


def _of_description(
    name: str, described: Lock | Recipe | RunSettings, cache_dir: Folder | None
) -> OpenedRun:
    made: dict[type, Any] = {
        Lock: _OpenedLock,
        Recipe: _OpenedRecipe,
        RunSettings: _OpenedSettings,
    }
    opened: OpenedRun = made[type(described)](name, cache_dir, described)
    return opened


def description_of(
    named: NamedRun, settings: Mapping[str, Any] | None = None
) -> Lock | Recipe | RunSettings:
    """Return the lock, recipe or settings that words name.

    Raises:
        InvalidArgument, MissingFile, StorageError, FormatError: as `open_run`.
    """
    given = dict(settings or {})
    setting = KINDS[named.kind].setting
    described: Lock | Recipe | None
    if named.kind == "lock":
        described = read_lock(named.words[0])
    else:
        described = recipe_in(setting, named.settings[setting], given.get("world_size"))
    if described is None:
        if again := sorted(given.keys() & named.settings.keys()):
            raise InvalidArgument(f"{named} has {again[0]} too; give one of them")
        return run_by_name({**named.settings, **given})
    of_devices = {"world_size"} if named.kind in ("llm-foundry", "maxtext") else set()
    if others := sorted(given.keys() - of_devices):
        raise InvalidArgument(f"{named}, which describes the whole run, also {others[0]}")
    return described


def pairs_of(described: Any) -> list[str]:
    """Return the prefixes of the pairs that a recipe or settings read, each once."""
    return list(dict.fromkeys(each.path for each in described.all_sources if each.path))


def recipe_in(setting: str, file: Any, devices: int | None) -> Recipe | None:
    """Return the recipe in the file of a setting; None if it is settings of a framework.

    Args:
        setting: recipe, nanotron_config, llm_foundry_config, or one of a framework.
        file: its value: a path, or those of a MaxText configuration and its words.
        devices: number of devices, which some configurations do not hold.

    Raises:
        InvalidArgument, MissingFile, StorageError: the file cannot be read.
    """
    if setting == "recipe":
        from megaindex.settings.recipe_file import read_recipe

        return read_recipe(file)
    if setting == "nanotron_config":
        from megaindex.settings.nanotron_yaml import read_nanotron

        return read_nanotron(file)
    if setting == "llm_foundry_config":
        from megaindex.settings.llm_foundry_yaml import read_llm_foundry

        return read_llm_foundry(file, devices=devices)
    if setting == "maxtext_config":
        from megaindex.settings.maxtext_recipe import read_maxtext

        return read_maxtext(file, devices)
    return None


@overload
def make_plan(
    run: RunSettings | None = None, *, progress: Progress | None = None, **settings: Any
) -> SettingsPlan: ...
@overload
def make_plan(
    run: Recipe | RecipeLayout, *, progress: Progress | None = None, **settings: Any
) -> RecipePlan: ...
@overload
def make_plan(run: Run, *, progress: Progress | None = None, **settings: Any) -> Plan: ...
def make_plan(run: Any = None, *, progress: Progress | None = None, **settings: Any) -> Plan:
    """Return the exact plan of a run, by the rules of its framework and version.

    >>> make_plan(data_path="web", sequence_length=2048, global_batch_size=128, epochs=1)
    >>> make_plan(megaindex.recipe.read_recipe("run.yaml"))

    The settings are those of ``megaindex plan --help``, with underscores, and ``sequence_length``
    for ``--seq-length``. Numbers are given as numbers; several values, as of ``data_path=[0.7,
    "web", 0.3, "code"]``, are a list. ``neox_config``, ``maxtext_config``, or ``megatron_args`` and
    ``script_args``, read a framework's settings, which the others replace. ``order`` may be an
    order object, see `megaindex.build_index`.

    Only the lengths in the ``.idx`` files are read. Where coverage has no closed form, the index of
    a source is built in memory and counted, as far as `RunSettings.coverage` allows.

    Args:
        run: in place of settings, `RunSettings`, such as `resolve` returns; a recipe, or its
            layout; or a decided run, such as that of an opened lock.
        progress: called with (done, total) while draws of a greedy blend, or coverage, are counted.
        settings: the run by names, as above; None is not given. Beside a run, ``coverage``: auto,
            exact, expected or none. Beside a recipe, ``consumed_samples`` of a run in progress,
            whose rest is planned too, and ``mix_bounds``, True for the earliest repeat of each
            source under any mix from there on.

    Returns:
        The plan: of settings a `SettingsPlan`, of a recipe a `RecipePlan`, of a decided run a
        `Plan`, in which figures that ask about other runs are None. It prints as the command prints
        it; its `Plan.warnings` name what the run would do besides training on the target.

    Raises:
        InvalidArgument: the run cannot be planned, or a setting is unknown; the message names the
            setting.
        FormatError, StorageError: a dataset cannot be read.
    """
    if type(run) not in _BESIDE:
        return _plan_of_settings(run, progress, settings)
    what, known = _BESIDE[type(run)]
    if others := sorted(settings.keys() - {*known}):
        raise InvalidArgument(
            f"{what} has all settings, also {others[0]}; beside it, give {' or '.join(known)}"
        )
    from megaindex.builders.recipe import plan_recipe
    from megaindex.plan.plan import make_plan as plan_of

    layout_or_run = plan_recipe(run) if type(run) is Recipe else run
    plan: Plan = plan_of(layout_or_run, progress=progress, **settings)
    return plan


_OF_RECIPES = ("a recipe", ("coverage", "consumed_samples", "mix_bounds"))
_BESIDE: dict[type, tuple[str, Sequence[str]]] = {
    Recipe: _OF_RECIPES,
    RecipeLayout: _OF_RECIPES,
    Run: ("a decided run", ("coverage",)),
}
"""What may be asked beside a run that has all settings."""


def _plan_of_settings(
    run: RunSettings | None, progress: Progress | None, settings: Mapping[str, Any]
) -> SettingsPlan:
    from megaindex.plan.plan import plan_of_settings

    if "mix_bounds" in settings:
        raise InvalidArgument(
            "--mix-bounds is for recipes, whose mix can change in mid-run; give --recipe or --state"
        )
    rest = dict(settings)
    coverage = None if run is None else rest.pop("coverage", None)
    with given_run(run, rest) as given:
        return in_words_of_files(
            plan_of_settings(given, coverage=coverage, progress=progress), rest
        )


def _signature() -> inspect.Signature:
    """Return the signature of `make_plan` with the names of all settings."""
    run, progress, _ = inspect.signature(make_plan).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    named = [inspect.Parameter(name, kind, default=None) for name in ARGUMENTS]
    return inspect.Signature([run, *named, progress], return_annotation=Plan)


make_plan.__signature__ = _signature()  # type: ignore[attr-defined]

AnyPlan = TypeVar("AnyPlan", bound=Plan)


def in_words_of_files(plan: AnyPlan, given: Mapping[str, Any]) -> AnyPlan:
    """Return a plan whose warnings name the keys of the file that describes its run."""
    caution, *warnings = (in_keys_of_files(one, given) for one in (plan.caution, *plan.warnings))
    return replace(plan, caution=caution, warnings=tuple(warnings))


def run_of_settings(
    run: RunSettings | None = None,
    *,
    subset: Split = "train",
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
    amend: AmendedBlend | None = None,
    **settings: Any,
) -> Run:
    """Return the run of a framework's settings, by the rules of its version.

    Args:
        run: the run, such as `megaindex.plan.resolve` returns; its consumed samples are the past.
        subset: train, or valid or test with the samples of all evaluations.
        cache_dir: cache of built indices; None: build in memory.
        progress: called with (done, total) while draws are counted.
        amend: how the run began, and the changes of its blend since, as under ``install(amend=…)``.
        settings: the run by names in place of ``run``, as for `make_plan`.

    Raises:
        InvalidArgument: the run cannot be built: it has no files, or more samples of a source are
            drawn than built.
        FormatError, StorageError: a dataset cannot be read.
    """
    from megaindex.run.from_settings import run_of_settings as run_of

    with given_run(run, settings) as given:
        return run_of(given, subset=subset, cache_dir=cache_dir, progress=progress, amend=amend)
