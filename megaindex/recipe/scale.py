"""Small runs with the repetition of a large one: each source a subset, lengths divided alike."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.skips import Skip
from megaindex.index.subset_rule import check_subset_share
from megaindex.io.atomic import write_file
from megaindex.io.paths import absolute, is_remote
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import (
    LENGTH_KEYS,
    Recipe,
    RecipeEvaluation,
    RecipeSource,
    RecipeStage,
    Stream,
    check_recipe,
)
from megaindex.settings.recipe_file import to_mapping

_LEFT = (
    "proportions and repeat, epochs (those of the subsets), max_epochs and max_fraction, batch "
    "sizes and sequence lengths, seed, evaluation iterations"
)


@dataclass(frozen=True, kw_only=True)
class ScaledRecipe:
    """A recipe of a share of the tokens of another, in which each source repeats as there.

    Attributes:
        recipe: the scaled recipe.
        share: share of the tokens.
        changes: setting, value before and after; the last is exact, or ``≈`` and the exact one.
        dropped: settings of the whole run that the scaled one does not have.
        left: settings that are not scaled, in words.
    """

    recipe: Recipe
    share: Fraction
    changes: tuple[tuple[str, str, str], ...]
    dropped: tuple[str, ...]
    left: str = _LEFT


def scale_recipe(recipe: Recipe, share: Fraction | float | str) -> ScaledRecipe:
    """Return a recipe of a share of a run's tokens, with the same batches, schedule and seed.

    Every source is read as a subset of that share, so that its exposure at each part of the run is
    that of the whole run, up to whole documents and samples. Scaled are steps, samples, tokens,
    ``choose`` and ``epoch_size`` of stages, first samples of a batch schedule, the interval of the
    evaluation and ``from_step``, each to the nearest integer and at least 1.

    Args:
        recipe: the whole run.
        share: such as ``"1/16"``, above 0 and up to 1.

    Raises:
        InvalidArgument: the share is out of range, or the recipe has a past, changes of its mix, or
            a source whose subset is a threshold.
    """
    check_recipe(recipe)
    part = check_subset_share("--scale", share)
    if isinstance(part, str):
        raise InvalidArgument(f"--scale must be a share such as 1/16, got {part}")
    for name, has in (("past", recipe.past), ("mix_changes", recipe.mix_changes)):
        if has is not None:
            raise InvalidArgument(
                f"--scale: the recipe has {name}, which belongs to the steps of the whole run; "
                "leave it out"
            )
    scaling = _Scaling(part)
    scaled = replace(
        recipe,
        batch=scaling.schedule("batch", recipe.batch),
        sources=tuple(map(scaling.source, recipe.sources)),
        stages=tuple(map(scaling.stage, recipe.stages)),
        evaluation=scaling.evaluation(recipe.evaluation),
        skip=tuple(each for skip in recipe.skip for each in scaling.skip(skip)),
    )
    return ScaledRecipe(
        recipe=scaled,
        share=part,
        changes=tuple(scaling.changes),
        dropped=tuple(scaling.dropped),
    )


@dataclass
class _Scaling:
    """Settings scaled so far."""

    share: Fraction
    changes: list[tuple[str, str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def whole(self, name: str, value: Any, least: int = 1) -> int:
        """Return a number of steps, samples or tokens, scaled to the nearest integer."""
        exact = Fraction(value) * self.share
        found = max(least, int(exact + Fraction(1, 2)))
        after = f"{found}" if found == exact else f"{found} ≈ {float(exact):.4f}"
        if found != value:
            self.changes.append((name, str(value), after))
        return found

    def schedule(self, name: str, batch: BatchSchedule) -> BatchSchedule:
        if batch.is_constant:
            return batch
        stages = tuple(
            (self.whole(f"{name}: sample of size {size}", first, 0), size)
            for first, size in batch.stages
        )
        return BatchSchedule(stages=stages)

    def source(self, source: RecipeSource) -> RecipeSource:
        before = source.subset or Fraction(1)
        if isinstance(before, str):
            raise InvalidArgument(
                f"--scale: source {source.name} has a threshold, {before}, as its subset; give the "
                "share, which is divided"
            )
        subset = before * self.share
        self.changes.append((f"source {source.name}: subset", str(before), str(subset)))
        return replace(source, subset=subset)

    def stage(self, stage: RecipeStage) -> RecipeStage:
        where, changes = f"stage {stage.name}", dict[str, Any]()
        if stage.length is not None and stage.length.kind != "epochs":
            word = f"{where}: {LENGTH_KEYS[stage.length.kind]}"
            value = Fraction(self.whole(word, int(stage.length.value)))
            changes["length"] = replace(stage.length, value=value)
        for name in ("epoch_size", "planned_samples"):
            if (size := getattr(stage, name)) is not None:
                changes[name] = self.whole(f"{where}: {name}", size)
        if stage.batch is not None:
            changes["batch"] = self.schedule(f"{where}: batch", stage.batch)
        if stage.first_step is not None:
            changes["first_step"] = None
            self.dropped.append(f"{where}: first_step {stage.first_step}")
        streams = tuple(self.stream(where, stream) for stream in stage.streams)
        return replace(stage, streams=streams, **changes)

    def stream(self, where: str, stream: Stream) -> Stream:
        if stream.choose is None:
            return stream
        return replace(stream, choose=self.whole(f"{where}: choose {stream.source}", stream.choose))

    def evaluation(self, evaluation: RecipeEvaluation | None) -> RecipeEvaluation | None:
        if evaluation is None:
            return None
        interval = self.whole("evaluation: interval", evaluation.interval)
        return replace(evaluation, interval=interval)

    def skip(self, skip: Skip) -> list[Skip]:
        if skip.ranges:
            self.dropped.append(f"skip: steps {skip.to_dict()['steps']}")
            return []
        if not skip.from_step:
            return [skip]
        return [replace(skip, from_step=self.whole("skip: from_step", skip.from_step, 0))]


def write_recipe(recipe: Recipe, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a recipe as YAML, with relative paths from the folder of the file.

    Raises:
        InvalidArgument: the recipe has something that no file says, such as ids of documents.
        StorageError: the file exists, or cannot be written.
    """
    import yaml

    check_recipe(recipe)
    name = os.fspath(path)
    mapping = to_mapping(_seen_from(recipe, os.path.dirname(os.path.abspath(name))))
    text = yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)
    write_file(name, lambda file: file.write(text.encode()), overwrite=overwrite)


def _seen_from(recipe: Recipe, folder: str) -> Recipe:
    """Return a recipe whose relative paths are relative to a folder."""

    def moved(path: Any) -> Any:
        if not isinstance(path, str) or not path or is_remote(path) or os.path.isabs(path):
            return path
        return os.path.relpath(absolute(path), folder)

    def source(each: RecipeSource) -> RecipeSource:
        paths = {name: moved(getattr(each, name)) for name in ("path", "labels", "loss_mask")}
        return replace(each, **paths)

    evaluation = recipe.evaluation
    return replace(
        recipe,
        sources=tuple(map(source, recipe.sources)),
        evaluation=evaluation and replace(evaluation, source=source(evaluation.source)),
        skip=tuple(replace(skip, documents=moved(skip.documents)) for skip in recipe.skip),
    )
