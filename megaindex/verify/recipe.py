"""Checks of a recipe; the pairs that it names have reports of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megaindex.builders.recipe import plan_recipe
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset
from megaindex.format.header import Fault
from megaindex.index.labels import check_same_lengths
from megaindex.recipe.recipe import Recipe, RecipeSource
from megaindex.recipe.recipe_file import read_recipe
from megaindex.verify.report import Collector, Report

_CORRECT = "correct the recipe"
_PLACES = ("source ", "stage ", "stream ")


def verify_recipe(path: str) -> Report:
    """Check that a recipe can be read and laid out, and that its sources exist and fit.

    Reading stops at the first broken rule, so such a finding may hide others.

    Raises:
        MissingFile, StorageError: the recipe, or a file that it names, cannot be read.
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
    """Return the prefixes of a recipe's existing pairs of tokens, and of labels and masks.

    Both are empty if the recipe cannot be read.
    """
    try:
        recipe = read_recipe(path)
    except InvalidArgument:
        return [], []
    found = {path: setting for path, setting in _prefixes(recipe).items() if _is_there(path)}
    return (
        [path for path, setting in found.items() if setting == "path"],
        [path for path, setting in found.items() if setting != "path"],
    )


def _corpora(recipe: Recipe) -> Iterator[RecipeSource]:
    yield from recipe.sources
    if recipe.evaluation is not None:
        yield recipe.evaluation.source


def _prefixes(recipe: Recipe) -> dict[str, str]:
    """Map each distinct prefix to the first setting that names it, tokens before labels."""
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
    """Check that the pairs of a source exist, and that labels or a mask fit its tokens."""
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
            found.add(text.path_prefix + ".idx", _not_integers(corpus, text))
        if companion:
            role = "labels" if corpus.labels else "loss mask"
            check_same_lengths(text, IndexedDataset(companion), role)
    except (FormatError, MissingFile) as error:  # the pair's own report has the details
        found.add(recipe, _unfit(corpus, error))


def _check_layout(path: str, recipe: Recipe, found: Collector) -> None:
    try:
        plan_recipe(recipe)
    except (InvalidArgument, FormatError) as error:
        found.add(path, _broken("layout", path, error))


def _broken(rule: str, path: str, error: Exception) -> Fault:
    """Divide a message, ``run.yaml.stages.decay.steps: must be a number; …``, into a fault."""
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
    """Divide a message into the fault and the remedy at its end."""
    what, _, remedy = message.rpartition("; ")
    return (what, remedy) if what else (message, _CORRECT)


def _missing(corpus: RecipeSource, setting: str, prefix: str) -> Fault:
    return Fault(
        rule=f"missing-{setting.replace('_', '-')}",
        where=f"source {corpus.name}",
        found=f"neither {prefix}.idx nor .bin",
        expected="a pair",
        remedy="correct the path, which is relative to the recipe, or restore the pair",
    )


def _not_integers(corpus: RecipeSource, text: IndexedDataset) -> Fault:
    return Fault(
        rule="token-type",
        where=f"source {corpus.name}",
        found=str(text.dtype),
        expected="integers",
        remedy="write it again with the type of its ids; GPT-NeoX's codes need --dialect neox",
    )


def _unfit(corpus: RecipeSource, error: Exception) -> Fault:
    what, remedy = _divided(str(error))
    return Fault(
        rule="source",
        where=f"source {corpus.name}",
        found=what,
        expected="a valid pair, with labels or a mask of the same lengths",
        remedy=remedy,
    )
