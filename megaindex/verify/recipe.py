"""The rules of a recipe, each broken one a finding; the pairs that it names have reports of their
own."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megaindex.builders.recipe import plan_recipe
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset
from megaindex.format.header import Fault
from megaindex.index.labels import check_in_step
from megaindex.recipe.recipe import Recipe, RecipeSource
from megaindex.recipe.recipe_file import read_recipe
from megaindex.verify.report import Collector, Report

_CORRECT = "correct the recipe"
_PLACES = ("source ", "stage ", "stream ")


def verify_recipe(path: str) -> Report:
    """Check that a recipe can be read and laid out, and that what it names is there and fits.

    The model refuses a recipe at the first rule that it breaks, so one such finding may hide more.

    Raises:
        MissingFile, StorageError: the recipe, or a file it names, cannot be read.
    """
    found = Collector()
    counted: dict[str, int] = {}
    try:
        recipe = read_recipe(path)
    except InvalidArgument as error:
        found.add(path, _broken("recipe", path, error))
    else:
        corpora = list(_corpora(recipe))
        counted = {
            "sources": len(corpora),
            "stages": len(recipe.stages),
            "pairs": len(_prefixes(recipe)),
        }
        for corpus in corpora:
            _check_source(path, corpus, found)
        if not found.has_errors():
            _check_layout(path, recipe, found)
    return found.report(path, "recipe", full=False, counted=counted)


def pairs_of_recipe(path: str) -> tuple[list[str], list[str]]:
    """Prefixes of the pairs that a recipe names and that are there: of tokens, and of labels and
    masks. Empty if the recipe cannot be read, which its report says."""
    try:
        recipe = read_recipe(path)
    except InvalidArgument:
        return [], []
    there = {path: setting for path, setting in _prefixes(recipe).items() if _is_there(path)}
    return (
        [path for path, setting in there.items() if setting == "path"],
        [path for path, setting in there.items() if setting != "path"],
    )


def _corpora(recipe: Recipe) -> Iterator[RecipeSource]:
    yield from recipe.sources
    if recipe.evaluation is not None:
        yield recipe.evaluation.source


def _prefixes(recipe: Recipe) -> dict[str, str]:
    """Every distinct prefix, and the setting that names it first; tokens before companions."""
    named: dict[str, tuple[str, str]] = {}
    for setting in ("path", "labels", "loss_mask"):
        for corpus in _corpora(recipe):
            prefix = getattr(corpus, setting)
            if prefix:
                named.setdefault(os.path.realpath(prefix), (prefix, setting))
    return dict(named.values())


def _is_there(prefix: str) -> bool:
    return os.path.exists(prefix + ".idx") or os.path.exists(prefix + ".bin")


def _check_source(recipe: str, corpus: RecipeSource, found: Collector) -> None:
    """Check that its files are there; of a text with labels or a mask also that they fit."""
    missing = False
    for setting in ("path", "labels", "loss_mask"):
        prefix = getattr(corpus, setting)
        if prefix and not _is_there(prefix):
            missing = True
            found.add(recipe, _missing(corpus, setting, prefix))
    companion = corpus.labels or corpus.loss_mask
    try:
        if missing or not corpus.path:
            return
        text = IndexedDataset(corpus.path)
        if text.dtype.kind == "f":
            found.add(text.path_prefix + ".idx", _no_ids(corpus, text))
        if companion:
            role = "labels" if corpus.labels else "loss mask"
            check_in_step(text, IndexedDataset(companion), role)
    except (FormatError, MissingFile) as error:  # of a pair alone: its own report has more
        found.add(recipe, _unfit(corpus, error))


def _check_layout(path: str, recipe: Recipe, found: Collector) -> None:
    """Check that its stages can be laid out over the sources as they are."""
    try:
        plan_recipe(recipe)
    except (InvalidArgument, FormatError) as error:
        found.add(path, _broken("layout", path, error))


def _broken(rule: str, path: str, error: Exception) -> Fault:
    """``run.yaml.stages.decay.steps: must be a number; …``: where, what, and what helps."""
    text = str(error).removeprefix("--recipe: ").removeprefix(path).lstrip(":. ")
    where, _, rest = text.partition(": ")
    is_place = bool(rest) and (" " not in where or where.startswith(_PLACES))
    what, remedy = _divided(rest if is_place else text)
    return Fault(
        rule=rule,
        where=where if is_place else "the file",
        found=what,
        expected="a recipe that can be " + ("read" if rule == "recipe" else "laid out"),
        remedy=remedy,
    )


def _divided(message: str) -> tuple[str, str]:
    """Return the fault and the remedy, with which messages end."""
    what, _, remedy = message.rpartition("; ")
    return (what, remedy) if what else (message, _CORRECT)


def _missing(corpus: RecipeSource, setting: str, prefix: str) -> Fault:
    return Fault(
        rule=f"missing-{setting.replace('_', '-')}",
        where=f"source {corpus.name}",
        found=f"neither {prefix}.idx nor .bin",
        expected="a pair",
        remedy="correct the path, which is relative to the recipe, or put the pair there",
    )


def _no_ids(corpus: RecipeSource, text: IndexedDataset) -> Fault:
    return Fault(
        rule="token-type",
        where=f"source {corpus.name}",
        found=str(text.dtype),
        expected="whole numbers",
        remedy="write it again with the type of its ids; GPT-NeoX's codes need --dialect neox",
    )


def _unfit(corpus: RecipeSource, error: Exception) -> Fault:
    what, remedy = _divided(str(error))
    return Fault(
        rule="source",
        where=f"source {corpus.name}",
        found=what,
        expected="a sound pair, and labels or a mask in step with it",
        remedy=remedy,
    )
