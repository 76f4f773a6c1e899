"""What the checkpoint of a recipe's run holds: the recipe, its sources, the state of its loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaindex.errors import FormatError
from megaindex.index.plain import shown
from megaindex.index.stored import Stored
from megaindex.loader.fit import Contents
from megaindex.recipe.itinerary import Itinerary
from megaindex.recipe.model import Recipe
from megaindex.recipe.recipe_file import recipe_of
from megaindex.recipe.resolve import resolve_recipe
from megaindex.recipe.streams import SourceSize

VERSION = 1
_WHAT = "the state of a recipe's loader"
SIZES = ("tokens", "documents", "samples")
_WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a recipe that nobody wrote, or sizes that are no source's, may end in."""


@dataclass(frozen=True, kw_only=True)
class StoredRecipe:
    """A checkpoint, every field of which was looked at."""

    recipe: Recipe
    sizes: list[SourceSize]
    sources: dict[str, dict[str, Any]]
    loader: dict[str, Any]
    consumed_samples: int

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> StoredRecipe:
        """
        Raises:
            FormatError: not what `RecipeLoader.state_dict` gives.
        """
        stored = Stored(_WHAT, state)
        stored.check_version(VERSION)
        recipe = _recipe_of(stored.text("recipe"))
        rule = "must be a list of mappings"
        given = stored.checked("sources", rule, lambda value: isinstance(value, list))
        sources = {}
        for each in given:
            name, facts = _source_of(each)
            sources[name] = facts
        names = [source.name for source in recipe.sources]
        if list(sources) != names or len(given) != len(names):
            raise stored.wrong(f"sources must be those of its recipe, {shown(names)}", given)
        loader = stored.part("loader", "the state of a loader")
        return cls(
            recipe=recipe,
            sizes=[
                SourceSize(**{size: facts[size] for size in SIZES}) for facts in sources.values()
            ],
            sources=sources,
            loader=dict(loader.values),
            consumed_samples=loader.whole("consumed_samples"),
        )

    def itinerary(self) -> Itinerary:
        """The run as it was laid out.

        Raises:
            FormatError: the sizes of its sources are not those it was laid out with.
        """
        try:
            return resolve_recipe(self.recipe, self.sizes)
        except _WRONG as error:
            raise FormatError(
                f"not {_WHAT}: its recipe and the sizes of its sources make no run "
                f"({_reason(error)}); take it from an intact checkpoint"
            ) from None


def _recipe_of(text: str) -> Recipe:
    import yaml

    try:
        content = yaml.safe_load(text)
        return recipe_of(content, "the checkpoint's recipe", Path("/"))
    except (*_WRONG, yaml.YAMLError) as error:
        raise FormatError(
            f"not {_WHAT}: its recipe cannot be read ({_reason(error)}); take it from an intact "
            "checkpoint, or use the release that wrote it"
        ) from None


def _source_of(each: Any) -> tuple[str, dict[str, Any]]:
    """Name and facts of a source."""
    stored = Stored(f"{_WHAT}: a source of it", each)
    name = stored.text("name")
    facts: dict[str, Any] = {
        "fingerprint": stored.hashed("fingerprint"),
        "targets": stored.text("targets"),
    }
    for size in SIZES:
        facts[size] = stored.whole(size, least=0 if size == "documents" else 1, most=2**62)
    facts["content"] = None  # in states of earlier versions
    if stored.values.get("content") is not None:
        facts["content"] = Contents.read(stored.part("content", "the content of a source"))
    return name, facts


def check_sizes(name: str, facts: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Equal content has equal sizes; how many samples it makes is for the recipe to say."""
    for size in ("tokens", "documents"):
        if facts["fingerprint"] == ours["fingerprint"] and facts[size] != ours[size]:
            raise FormatError(
                f"not {_WHAT}: source {name} must have {ours[size]} {size}, as its content has, "
                f"got {facts[size]}; take it from an intact checkpoint"
            )


def _reason(error: BaseException) -> str:
    """What an error says, on one line and not without end."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
