"""Recipe in the state of a loader: its text, its sources, and the changes of its mix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaindex.builders.recipe import OpenRecipe, OpenSource
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.documents import WordRange
from megaindex.index.orders.keyed import shuffle_names
from megaindex.loader.checkpoint import STATE, STATE_VERSION
from megaindex.loader.sampler_state import decided_samples
from megaindex.loader.targets import targets_text
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.recipe import Recipe
from megaindex.settings.recipe_file import recipe_of, to_mapping
from megaindex.validation import CheckpointReader, error_text, shown

_SIZES = ("tokens", "documents", "samples")
_UNREAD = "unread_samples"
"""Size of a source of which documents were read before the run joined."""
_MEMBERS = "members"
"""Words of the documents of a source, of a subset."""
# errors that a damaged recipe, or wrong sizes of sources, may raise
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class StoredRecipe:
    """Recipe in a state, of which every field was checked."""

    recipe: Recipe
    text: str
    """The recipe as YAML, without changes of the mix."""
    changes: MixChanges | None
    """Changes of the mix; None without any."""
    sources: dict[str, dict[str, Any]]
    """Fingerprint, targets and sizes of each source."""
    consumed_samples: int
    decided_samples: int
    """The end of the step begun if it is balanced, else ``consumed_samples``."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> StoredRecipe:
        """Read the recipe in the state of a loader, or raise FormatError."""
        stored = CheckpointReader(STATE, state)
        stored.check_version(STATE_VERSION)
        part = stored.part("recipe", "the recipe of a loader's state")
        text = part.text("text")
        recipe, changes = _recipe_of(text, Path("/")), None
        if part.field("mix_changes", "must be a mapping or null") is not None:
            changes = MixChanges.from_dict(part.part("mix_changes", "the changes of the mix"))
            recipe = _with_changes(recipe, changes)
        rule = "must be a list of mappings"
        given = part.checked("sources", rule, lambda value: isinstance(value, list))
        sources = dict(map(_source_of, given))
        names = [source.name for source in recipe.sources]
        if list(sources) != names or len(given) != len(names):
            raise part.error(f"sources must equal those of its recipe, {shown(names)}", given)
        content = stored.field("content", "must be a list of mappings, or null")
        if isinstance(content, list) and len(content) != len(names):
            raise stored.error(f"content must be that of the {len(names)} sources", len(content))
        return cls(
            recipe=recipe,
            text=text,
            changes=changes,
            sources=sources,
            consumed_samples=stored.integer("consumed_samples"),
            decided_samples=decided_samples(
                stored.part("sampler", "the state of a sampler").values
            ),
        )

    @property
    def recipe_here(self) -> Recipe:
        """The recipe with the paths that it has, relative ones to the current directory."""
        recipe = _recipe_of(self.text, Path())
        return recipe if self.changes is None else _with_changes(recipe, self.changes)

    @property
    def shuffle_names(self) -> list[str]:
        """Name by which each source is shuffled."""
        fingerprints = [facts["fingerprint"] for facts in self.sources.values()]
        return shuffle_names(fingerprints, [source.shuffle_name for source in self.recipe.sources])

    def layout(self, here: Mapping[str, OpenSource]) -> RecipeLayout:
        """Return the layout of the run, or raise FormatError if recipe and sizes do not fit.

        Args:
            here: opened source that goes on with each source, by its name in the state. Its lengths
                decide the blocks of order blocks.
        """
        with _as_damage("its recipe does not fit the sizes of its sources"):
            sizes = []
            each = zip(self.recipe.sources, self.sources.values(), self.shuffle_names, strict=True)
            for source, facts, name in each:
                size = SourceSize(**{key: facts[key] for key in (*_SIZES, _UNREAD) if key in facts})
                if _MEMBERS in facts:
                    size = replace(size, words=WordRange.of_json(facts[_MEMBERS]))
                if self.recipe.order_of(source) == "blocks":
                    size = here[source.name].as_in(self.recipe, source).size
                elif source.name in here:  # of other content, if that was accepted
                    name = here[source.name].shuffle_name
                sizes.append(replace(size, shuffle_name=name))
            return resolve_recipe(self.recipe, sizes)


def recipe_part(opened: OpenRecipe, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a state that `StoredRecipe.read` reads, as JSON values."""
    import yaml

    recipe = opened.layout.recipe
    changes = recipe.mix_changes
    plain = to_mapping(replace(recipe, mix_changes=None))
    return {
        # text, since the order of stages and sources matters, and JSON may reorder keys
        "text": yaml.safe_dump(plain, sort_keys=False),
        "sources": [{"name": name, **each} for name, each in facts.items()],
        "mix_changes": None if changes is None else changes.to_dict(),
    }


def source_facts(opened: OpenRecipe) -> dict[str, dict[str, Any]]:
    """Return fingerprint, targets and sizes of each source, by its name."""
    return {
        source.corpus.name: _facts_of(source, fingerprint)
        for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True)
    }


def _facts_of(source: OpenSource, fingerprint: str) -> dict[str, Any]:
    size = source.size
    facts: dict[str, Any] = {"fingerprint": fingerprint, "targets": targets_text(source)}
    facts |= {name: getattr(size, name) for name in _SIZES}
    if source.past is not None:
        facts[_UNREAD] = size.unread_samples
    if size.words is not None:
        facts[_MEMBERS] = size.words.to_json()
    return facts


def _recipe_of(text: str, folder: Path) -> Recipe:
    import yaml

    more = ", or use the release that wrote it"
    with _as_damage("its recipe cannot be read", more, (*_ERRORS, yaml.YAMLError)):
        return recipe_of(yaml.safe_load(text), "the checkpoint's recipe", folder)


def _with_changes(recipe: Recipe, changes: MixChanges) -> Recipe:
    with _as_damage("its changes of the mix do not fit its recipe", errors=(InvalidArgument,)):
        return replace(recipe, mix_changes=changes)


def _source_of(each: Any) -> tuple[str, dict[str, Any]]:
    """Return name and facts of a source in a state."""
    stored = CheckpointReader(f"{STATE}: a source of it", each)
    name = stored.text("name")
    facts: dict[str, Any] = {
        "fingerprint": stored.hashed("fingerprint"),
        "targets": stored.text("targets"),
    }
    for size in _SIZES:
        facts[size] = stored.integer(size, least=0 if size == "documents" else 1, most=2**62)
    if _UNREAD in stored.values:
        facts[_UNREAD] = stored.integer(_UNREAD, most=facts["samples"])
    if _MEMBERS in stored.values:
        with _as_damage(f"{_MEMBERS} of source {shown(name)} are no range of words"):
            facts[_MEMBERS] = WordRange.of_json(stored.values[_MEMBERS]).to_json()
    return name, facts


def check_sizes(name: str, facts: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise FormatError if a source has the stored fingerprint, but another size.

    Those of another subset are compared with the samples that were read.
    """
    if facts.get(_MEMBERS) != ours.get(_MEMBERS):
        return
    for size in ("tokens", "documents"):
        if facts["fingerprint"] == ours["fingerprint"] and facts[size] != ours[size]:
            raise FormatError(
                f"not {STATE}: source {name} must have {ours[size]} {size}, the size of its "
                f"content, got {facts[size]}; take it from an intact checkpoint"
            )


@contextlib.contextmanager
def _as_damage(
    fault: str, more: str = "", errors: tuple[type[Exception], ...] = _ERRORS
) -> Iterator[None]:
    """Raise FormatError for these errors, with their text on one line, cut to 400 characters."""
    try:
        yield
    except errors as error:
        reason = error_text(error)
        raise FormatError(
            f"not {STATE}: {fault} ({reason}); take it from an intact checkpoint{more}"
        ) from None
