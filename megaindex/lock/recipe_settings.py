"""Settings of a recipe in a lock, and its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megaindex._types import I64
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.description import describe_stage, described_stages
from megaindex.index.frameworks import Split
from megaindex.index.mixing import FixedMixing
from megaindex.io.paths import absolute
from megaindex.lock.lock_file import Lock
from megaindex.lock.pinned_files import Folder
from megaindex.lock.setting_values import placed, with_paths, with_rows
from megaindex.lock.shape import PATHS
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.run.from_recipe import evaluation_of_opened, run_of_opened
from megaindex.run.run import Run
from megaindex.run.subset import skip_settings, with_files
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage
from megaindex.settings.recipe_file import recipe_of, to_mapping
from megaindex.settings.run_settings import Data, Evaluation, RunSettings, Target
from megaindex.settings.sources import Source

_MANY = 16  # streams of a stage that are written in columns


class RecipeSettings:
    """A recipe whose run is locked.

    Args:
        recipe: the recipe; relative paths are those of the current directory.
        cache_dir: cache of the validation of its sources.
        amend: None.
    """

    kind: ClassVar[str] = "recipe"
    dialect: ClassVar[str] = "megatron"

    def __init__(
        self, recipe: Recipe, cache_dir: Folder | None = None, amend: AmendedBlend | None = None
    ) -> None:
        if amend is not None:
            raise InvalidArgument("amend: a recipe is changed by megaindex.recipe.amend")
        self.given, self.settings = recipe, _with_absolute_paths(recipe)
        self._cache_dir = cache_dir

    @classmethod
    def read(
        cls,
        values: Mapping[str, Any],
        lock: Lock,
        paths: Sequence[str],
        files: Sequence[str],
        cache_dir: Folder | None = None,
    ) -> RecipeSettings:
        """Return what `to_json` wrote, which may refer to shares in the description of the index;
        ``paths`` and ``files`` are those of the lock's rows."""
        mapping = with_paths(values, paths)
        if "skip" in mapping:
            mapping["skip"] = with_files(mapping["skip"], files)
        if "mix_changes" in mapping:
            changes = mapping["mix_changes"]
            mapping["mix_changes"] = {**changes, "file": files[changes["file"]]}
        for read in _documents_read(mapping):
            read["documents"] = files[read["documents"]]
        _write_out_mixes(mapping, lock.content["subsets"]["train"]["index"])
        return cls(recipe_of(mapping, lock.path, Path("/")), cache_dir)

    @cached_property
    def _opened(self) -> OpenRecipe:
        return open_recipe(self.settings, cache_dir=self._cache_dir)

    @property
    def paths(self) -> list[str]:
        """Prefixes of the pairs, each once."""
        named = (getattr(each, name) for name in PATHS for each in self.settings.all_sources)
        return list(dict.fromkeys(path for path in named if path))

    @property
    def pairs(self) -> dict[str, IndexedDataset]:
        """Pairs that are open, by their paths."""
        return self._opened.pairs

    @property
    def files(self) -> list[str]:
        """Paths of the files of documents and of mix changes, each once."""
        return self.settings.files

    def runs(
        self, most: Mapping[str, int] | None = None, *, evaluation: bool = True
    ) -> dict[Split, Run]:
        """Return the run of training, and those of the evaluation that the recipe has.

        Raises:
            InvalidArgument: the recipe cannot be laid out, or has more than ``most`` samples.
            FormatError, StorageError: a source cannot be read.
        """
        end = self._opened.layout.end_sample
        if most is not None and end > most.get("train", 0):
            raise InvalidArgument(
                f"train: the settings ask for {end} samples, and must for at most "
                f"{most.get('train', 0)}; restore the settings"
            )
        valid = evaluation_of_opened(self._opened) if evaluation else None
        train = run_of_opened(self._opened)
        return {"train": train} if valid is None else {"train": train, "valid": valid}

    @property
    def train_sources(self) -> Sequence[RecipeSource]:
        """The sources of training."""
        return self.given.sources

    def under_framework(self, order: str, train: Run, split: str | None) -> RunSettings:
        """Return the settings of a run in a framework's ``order`` that takes the same steps.

        It has no evaluation: a recipe evaluates by rules of its own.

        Raises:
            InvalidArgument: the arrays of one such run do not hold the samples of this one.
        """
        recipe = self.given
        if recipe.past is not None:
            raise InvalidArgument(
                "past: the arrays hold an order from its first sample on, and that of the past is "
                "not known; train with loader_of_recipe"
            )
        if any(stage.sequence_length or stage.batch for stage in recipe.stages):
            raise InvalidArgument(
                "stages with a sequence_length or a batch of their own: a run of the framework has "
                "one of each; leave them out"
            )
        return RunSettings(
            order=order,
            sequence_length=train.index.sequence_length,
            data=Data(train=(Source(path=recipe.sources[0].path),), split=split),
            batch=recipe.batch,
            target=Target(kind="iterations", value=Fraction(train.num_steps)),
            seed=recipe.seed,
            evaluation=Evaluation(iterations=0),
        )

    def step_bounds(self, name: str, subset: Mapping[str, Any]) -> I64:
        """Return int64[steps + 1], the bounds of the steps of a subset; no index is built."""
        if name != "train":
            return np.array([0, subset["samples"]], np.int64)
        whole = replace(self.settings, skip=())
        layout = open_recipe(whole, cache_dir=self._cache_dir).layout
        found = replace(layout, recipe=self.settings).steps_with_skips
        return (layout.steps() if found is None else found.steps).bounds

    def to_json(self, rows: Mapping[str, int], files: Mapping[str, int]) -> dict[str, Any]:
        """Return the settings with the rows of pairs and of other files by their paths."""
        recipe = self.settings
        values = _recipe_values(self._opened, rows)
        if recipe.skip:
            values["skip"] = skip_settings(recipe.skip, files)
        if recipe.mix_changes is not None:
            row = files[recipe.mix_changes.path]
            values["mix_changes"] = {**values["mix_changes"], "file": row}
        for read in _documents_read(values):
            read["documents"] = files[read["documents"]]
        return values


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with the absolute paths of its pairs and files; URLs stay."""
    evaluation, past = recipe.evaluation, recipe.past
    if evaluation is not None:
        evaluation = replace(evaluation, source=placed(evaluation.source))
    if past is not None:
        past = replace(past, read=tuple(placed(read, ("documents",)) for read in past.read))
    return replace(
        recipe,
        sources=tuple(map(placed, recipe.sources)),
        skip=tuple(placed(skip, ("documents",)) for skip in recipe.skip),
        mix_changes=_placed_changes(recipe.mix_changes),
        past=past,
        evaluation=evaluation,
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


def _documents_read(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a past that are known by documents."""
    read = recipe.get("past", {}).get("read", {})
    return [each for each in read.values() if "documents" in each]


def _recipe_values(opened: OpenRecipe, rows: Mapping[str, int]) -> dict[str, Any]:
    recipe = opened.layout.recipe
    mapping: dict[str, Any] = with_rows(to_mapping(recipe), rows)
    many = [stage for stage in recipe.stages if len(stage.streams) > _MANY and _is_plain(stage)]
    shares = _stage_shares(opened, [stage for stage in many if stage.weighting is None])
    for stage in many:
        numbers: list[int] | None = [recipe.number(stream.source) for stream in stage.streams]
        if numbers == list(range(len(recipe.sources))):
            numbers = None
        mix: dict[str, Any] = {"sources": numbers}
        if stage.name in shares:
            mix["proportions"] = {"shares_of_stage": shares[stage.name]}
        elif stage.weighting is None:
            mix["proportions"] = [str(stream.proportion) for stream in stage.streams]
        mapping["stages"][stage.name]["mix"] = mix
    return mapping


def _is_plain(stage: RecipeStage) -> bool:
    """Return True if streams have proportions, or all of them are weighted, and nothing else."""
    return stage.by_proportion and not any(stream.restart for stream in stage.streams)


def _stage_shares(opened: OpenRecipe, stages: Sequence[RecipeStage]) -> dict[str, int]:
    """Return for each stage the number of its first piece in the description of the index.

    Empty unless the run is the same with the shares of those pieces as proportions.
    """
    layout = opened.layout
    firsts = {piece.name: number for number, piece in reversed(list(enumerate(layout.stages)))}
    found, changed = {}, {stage.name: stage for stage in layout.recipe.stages}
    for stage in stages:
        first = layout.stages[firsts[stage.name]] if stage.name in firsts else None
        if (
            first is not None
            and isinstance(first.mixing, FixedMixing)
            and len(first.mixed.sources) == len(stage.streams)
        ):
            found[stage.name] = firsts[stage.name]
            changed[stage.name] = _by_shares(stage, first.mixing.shares)
    other = replace(layout.recipe, stages=tuple(changed.values()))
    return found if found and _same_run(opened, resolve_recipe(other, layout.sizes)) else {}


def _same_run(opened: OpenRecipe, other: RecipeLayout) -> bool:
    """Return True if a layout of the same sources has the same samples and steps."""
    layout = opened.layout
    described = []
    for planned in (layout, other):
        size = len(planned.sizes)
        described.append([describe_stage(each.mixed, size) for each in planned.stages])
    same = ("num_steps", "samples_masked", "ends", "stopped_by")
    return described[0] == described[1] and all(
        getattr(layout, name) == getattr(other, name) for name in same
    )


def _by_shares(stage: RecipeStage, shares: Sequence[int]) -> RecipeStage:
    pairs = zip(stage.streams, shares, strict=True)
    streams = (replace(stream, proportion=Fraction(share)) for stream, share in pairs)
    return replace(stage, streams=tuple(streams))


def _write_out_mixes(mapping: Mapping[str, Any], index: Any) -> None:
    """Replace the mixes that are written in columns."""
    names = list(mapping["sources"])
    for stage in mapping["stages"].values():
        mix = stage.get("mix", {})
        if not _is_columns(mix):
            continue
        numbers = range(len(names)) if mix["sources"] is None else mix["sources"]
        given = mix.get("proportions", [None] * len(numbers))
        if isinstance(given, dict):
            given = described_stages(index)[given["shares_of_stage"]]["shares"]
        stage["mix"] = {names[n]: value for n, value in zip(numbers, given, strict=True)}


def _is_columns(mix: Mapping[str, Any]) -> bool:
    """Return True if the sources are a list; of a mix by name, ``sources`` would be a stream."""
    return "sources" in mix and (mix["sources"] is None or isinstance(mix["sources"], list))
