"""Recipe files in YAML.

sequence_length: 2048
batch: {micro_batch_size: 4, data_parallel_size: 8, gradient_accumulation_steps: 2}
sources:
  web: data/web                       # prefix of .bin and .idx, relative to this file, or a URL
  code: {path: data/code, max_epochs: 4}
  chat: {path: data/chat, kind: finetuning, labels: data/chat_labels}
stages:
  stable:
    steps: 10000                      # or samples, tokens, or epochs of the mixture
    mix: {web: 0.7, code: 0.3}        # proportions
  long:
    steps: 1000
    sequence_length: 32768            # of this stage alone, like its batch
    batch: {micro_batch_size: 1, global_batch_size: 16}
    mix: {web: 0.7, code: 0.3}
  decay:
    steps: 500
    batching: random
    mix:
      web: {proportion: 0.5}
      chat: {proportion: 0.5}
  tune:
    steps: 500
    batching: per_stream              # each step draws from one source, here with its own batch
    mix:
      web: {proportion: 0.5}
      chat: {proportion: 0.5, batch_size: 32}
skip:                                 # see docs/record.md
  - {steps: "1200-1249 1300"}
  - {documents: bad.npy, source: web, from_step: 5000}
past:                                 # steps of another system, see docs/changing-runs.md
  steps: 160000
  read: {web: {tokens: 300B}, code: {epochs: 1.5}}
mix_changes: mix.npy                  # see docs/changing-runs.md
mix_bounds: {web: [0.2, 0.9]}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.skips import read_skips
from megaindex.io.paths import inside
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.past import Past, PastRead
from megaindex.settings.recipe import (
    BATCH_FACTORS,
    EXHAUSTIONS,
    LENGTH_KEYS,
    Recipe,
    RecipeEvaluation,
    RecipeSource,
    RecipeStage,
    Stream,
    Weighting,
    default_long_documents,
)
from megaindex.settings.run_builder import BatchSizes, batch_schedule, batch_sizes
from megaindex.settings.run_settings import TAILS, Target
from megaindex.settings.settings import Settings
from megaindex.settings.yaml_sections import Section, load_mapping
from megaindex.validation import DEFAULT_SEED, check_choice, check_fraction

_LENGTHS = {key: kind for kind, key in LENGTH_KEYS.items()}
_BATCH = (
    "micro_batch_size",
    "data_parallel_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "schedule",
    "rampup",
)
_SIZES = ("gradient_accumulation_steps", "global_batch_size", "schedule", "rampup")
"""Settings that determine each other: a stage that gives one of them inherits none."""
_TOP = ("sequence_length", "batch", "sources", "stages", "seed", "tail", "exhaustion", "evaluation",
        "skip", "past", "mix_changes", "mix_bounds")  # fmt: skip
_STAGE = (*_LENGTHS, "first_step", "planned_samples", "mix", "weights", "epoch_size", "batching",
          "rounding", "sequence_length", "batch")  # fmt: skip


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe in a YAML file.

    Args:
        path: the file; relative paths in it are relative to its directory.

    Raises:
        MissingFile, StorageError: the file cannot be read.
        InvalidArgument: a setting is unknown, missing or wrong; the message names file and setting.
    """
    return recipe_of(load_mapping(path, "--recipe"), os.fspath(path), Path(path).parent)


def recipe_of(content: Mapping[str, Any], name: str, folder: Path) -> Recipe:
    """Return the recipe that a mapping describes, as in a YAML file called ``name``.

    Relative paths of sources are relative to ``folder``.
    """
    top = Section(name, content)
    top.known(*_TOP)
    length = top.integer("sequence_length")
    if length is None:
        raise InvalidArgument(
            f"{name}: sequence_length is missing: tokens per sample, such as 2048"
        )
    sizes, schedule = _batch(top.section("batch"), length)
    sources, stages = top.section("sources"), top.section("stages")
    seed = top.integer("seed")
    more: dict[str, Any] = {
        key: check_choice(top.called(key), top.values[key], choices)
        for key, choices in (("tail", TAILS), ("exhaustion", EXHAUSTIONS))
        if key in top.values
    }
    return Recipe(
        sequence_length=length,
        batch=schedule,
        sources=tuple(_source(key, sources, folder) for key, _ in sources.items()),
        stages=tuple(
            _stage(key, stages.section(key), top, sizes, length) for key, _ in stages.items()
        ),
        seed=DEFAULT_SEED if seed is None else seed,
        evaluation=_evaluation(top, folder),
        micro_batch_size=sizes.micro_batch,
        data_parallel_size=sizes.data_parallel,
        gradient_accumulation_steps=sizes.accumulation,
        skip=read_skips(top.values["skip"], top.called("skip"), folder)
        if "skip" in top.values
        else (),
        past=_past(top.section("past"), folder) if "past" in top.values else None,
        mix_changes=_mix_changes(top, folder) if "mix_changes" in top.values else None,
        mix_bounds=_mix_bounds(top.section("mix_bounds")) if "mix_bounds" in top.values else (),
        **more,
    )


def _past(section: Section, folder: Path) -> Past:
    section.known(*_names(Past))
    given = section.given(Past, "read", "mix")
    if "steps" not in given:
        raise InvalidArgument(
            f"{section.where}: steps is missing: the steps made, which is the first step here"
        )
    read, mix = (section.section(key, default={}) for key in ("read", "mix"))
    shares = [(source, mix.fraction(source)) for source, _ in mix.items()]
    for source, share in shares:
        if share is None:
            raise mix.error(source, "a share such as 0.7")
    return Past(
        read=tuple(_read(source, read.section(source), folder) for source, _ in read.items()),
        mix=tuple((source, share) for source, share in shares if share is not None),
        **given,
    )


def _read(source: str, section: Section, folder: Path) -> PastRead:
    section.known(*_names(PastRead, "source"))
    return PastRead(source=source, **_inside(folder, section.given(PastRead), "documents"))


def _names(kind: type[Any], *left_out: str) -> list[str]:
    """Return the names of the fields of a dataclass."""
    return [field.name for field in fields(kind) if field.name not in left_out]


def _inside(folder: Path, given: dict[str, Any], *paths: str) -> dict[str, Any]:
    """Return settings with these paths, where they are given, relative to the folder."""
    return given | {name: inside(folder, given[name]) for name in paths if given.get(name)}


def _batch(section: Section, length: int) -> tuple[BatchSizes, BatchSchedule]:
    section.known(*_BATCH)
    ramp = section.values.get("rampup")
    if ramp is not None and not (isinstance(ramp, list) and all(type(n) is int for n in ramp)):
        raise section.error("rampup", "three whole numbers: start, increment, samples")
    settings = Settings(
        seq_length=length,
        **section.given(Settings),
        batch_schedule=section.text("schedule") or None,
        rampup_batch_size=None if ramp is None else tuple(ramp),
    )
    try:
        sizes = batch_sizes(settings)
        return sizes, batch_schedule(settings, sizes.global_batch)
    except InvalidArgument as error:
        raise InvalidArgument(f"{section.where}: {error}") from None


def _source(key: str, sources: Section, folder: Path, *, called: str = "") -> RecipeSource:
    name = called or key
    given = {"path": sources.values[key]}
    if not isinstance(given["path"], str):
        section = sources.section(key)
        section.known(*_names(RecipeSource, "name"))
        given = section.given(RecipeSource)
    return RecipeSource(name=name, **_inside(folder, given, "path", "labels", "loss_mask"))


def _stage_batch(stage: Section, top: Section, sizes: BatchSizes, length: int) -> dict[str, Any]:
    """Return the fields of a stage's own batch, with those of the top as defaults.

    Of the sizes that determine each other a stage that gives one inherits none. A stage without any
    goes on with the global batches of the top, unless those follow from micro batch and ranks.
    """
    if "batch" not in stage.values:
        return {}
    own = stage.section("batch")
    own.known(*_BATCH)
    given = own.values.keys() & {*_SIZES}
    if not given and top.section("batch").values.keys() & {*_SIZES[1:]}:
        return {key: own.integer(key) for key in BATCH_FACTORS if key in own.values}
    common: dict[str, Any] = {
        "micro_batch_size": sizes.micro_batch,
        "data_parallel_size": sizes.data_parallel,
    }
    if not given:
        common["gradient_accumulation_steps"] = sizes.accumulation
    common = {key: value for key, value in common.items() if value is not None}
    ours, schedule = _batch(Section(own.where, {**common, **own.values}), length)
    return {
        "batch": schedule,
        "micro_batch_size": _unless(ours.micro_batch, sizes.micro_batch),
        "data_parallel_size": _unless(ours.data_parallel, sizes.data_parallel),
        "gradient_accumulation_steps": ours.accumulation,
    }


def _unless(value: int | None, default: int | None) -> int | None:
    return None if value == default else value


def _stage(name: str, section: Section, top: Section, sizes: BatchSizes, width: int) -> RecipeStage:
    section.known(*_STAGE)
    given = [key for key in _LENGTHS if key in section.values]
    if len(given) > 1:
        raise InvalidArgument(
            f"{section.where}: {' and '.join(given)} exclude each other; give one"
        )
    mix = section.section("mix")
    length = section.integer("sequence_length") or width
    return RecipeStage(
        name=name,
        streams=tuple(_stream(source, mix) for source, _ in mix.items()),
        length=_length(section, given[0]) if given else None,
        weighting=_weighting(section.section("weights")) if "weights" in section.values else None,
        **section.given(RecipeStage, "batch"),
        **_stage_batch(section, top, sizes, length),
    )


def _mix_changes(top: Section, folder: Path) -> MixChanges:
    """Return the changes in a file; ``sources`` are by default those of the recipe."""
    names = [str(name) for name, _ in top.section("sources").items()]
    if isinstance(top.values["mix_changes"], str):
        return MixChanges.read(inside(folder, top.values["mix_changes"]), names)
    section = top.section("mix_changes")
    section.known("file", "sources")
    given = section.values.get("sources", names)
    if not isinstance(given, list) or not section.text("file"):
        raise section.error(
            "sources" if section.text("file") else "file",
            "a list of names" if section.text("file") else "the path of the file of changes",
        )
    return MixChanges.read(inside(folder, section.text("file")), [str(name) for name in given])


def _mix_bounds(section: Section) -> tuple[tuple[str, Fraction, Fraction], ...]:
    found = []
    for name, value in section.items():
        if not isinstance(value, list) or len(value) != 2:
            raise section.error(name, "two shares, such as [0.2, 0.9]")
        called = section.called(name)
        low, high = (check_fraction(called, each) for each in value)
        found.append((str(name), low, high))
    return tuple(found)


def _length(section: Section, name: str) -> Target:
    value = section.fraction(name) if name == "epochs" else section.integer(name)
    if value is None:
        raise section.error(name, "a number")
    return Target(kind=_LENGTHS[name], value=Fraction(value))


def _stream(source: str, mix: Section) -> Stream:
    if mix.values[source] is None:  # `web:` alone: one epoch of it
        return Stream(source=source)
    if not isinstance(mix.values[source], Mapping):
        return Stream(source=source, proportion=mix.fraction(source))
    section = mix.section(source)
    section.known(*_names(Stream, "source"))
    return Stream(source=source, **section.given(Stream))


def _weighting(section: Section) -> Weighting:
    section.known(*_names(Weighting))
    return Weighting(**section.given(Weighting))


def _evaluation(top: Section, folder: Path) -> RecipeEvaluation | None:
    if "evaluation" not in top.values:
        return None
    section = top.section("evaluation")
    section.known(*_names(RecipeEvaluation))
    if "source" not in section.values:
        raise InvalidArgument(
            f"{section.where}: source is missing: the prefix of the validation data, or a mapping "
            "as under sources"
        )
    everything = section.values.get("iterations", "all") == "all"
    return RecipeEvaluation(
        source=_source("source", section, folder, called="validation"),
        **section.given(RecipeEvaluation, "source", *(["iterations"] * everything)),
    )


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as a mapping that `recipe_of` reads, for YAML, JSON and checkpoints.

    Paths are written as they are.
    """
    mapping: dict[str, Any] = {
        "sequence_length": recipe.sequence_length,
        "batch": _plain_batch(recipe, recipe.sequence_length),
        "sources": {source.name: _plain_source(source) for source in recipe.sources},
        "stages": {
            stage.name: _plain_stage(stage, recipe.length_of(stage)) for stage in recipe.stages
        },
        "seed": recipe.seed,
        "tail": recipe.tail,
        "exhaustion": recipe.exhaustion,
    }
    if recipe.evaluation is not None:
        plain = _plain(recipe.evaluation, "source")
        source = _plain_source(recipe.evaluation.source)
        mapping["evaluation"] = {"source": source, **plain}
    if recipe.skip:
        mapping["skip"] = [skip.to_dict() for skip in recipe.skip]
    if recipe.past is not None:
        past = _plain(recipe.past, "read", "mix")
        if recipe.past.read:
            past["read"] = {read.source: _plain(read, "source") for read in recipe.past.read}
        else:
            past["mix"] = {source: str(share) for source, share in recipe.past.mix}
        mapping["past"] = past
    if recipe.mix_bounds:
        bounds = {name: [str(low), str(high)] for name, low, high in recipe.mix_bounds}
        mapping["mix_bounds"] = bounds
    changes = recipe.mix_changes
    if changes is not None and (changes.size or changes.path):
        if not changes.path:
            raise InvalidArgument(
                "mix_changes of a recipe file or a lock must be a file, got changes that none "
                "holds; write them with MixChanges.write"
            )
        mapping["mix_changes"] = {"file": changes.path, "sources": list(changes.sources)}
    return mapping


def _plain_batch(shape: Recipe | RecipeStage, length: int) -> dict[str, Any]:
    """Return the batch of a recipe or of a stage whose samples have ``length`` tokens."""
    factors = {name: getattr(shape, name) for name in BATCH_FACTORS}
    batch = {key: value for key, value in factors.items() if value is not None}
    if shape.batch is None:
        return batch
    if shape.batch.is_constant:
        return {**batch, "global_batch_size": shape.batch.final}
    batch.pop("gradient_accumulation_steps", None)
    stages = ((first * length, size) for first, size in shape.batch.plain_stages)
    return {**batch, "schedule": " ".join(f"{tokens}:{size}" for tokens, size in stages)}


def _plain_source(source: RecipeSource) -> dict[str, Any]:
    usual = source.long_documents == default_long_documents(source.order)
    return _plain(source, "name", *(["long_documents"] if usual else []))


def _plain_stage(stage: RecipeStage, sequence_length: int) -> dict[str, Any]:
    plain = _plain(stage, "name", "streams", "length", "weighting", "batch", *BATCH_FACTORS)
    if batch := _plain_batch(stage, sequence_length):
        plain["batch"] = batch
    if stage.length is not None:
        value = stage.length.value
        plain[LENGTH_KEYS[stage.length.kind]] = int(value) if value.denominator == 1 else str(value)
    if stage.weighting is not None:
        plain["weights"] = vars(stage.weighting)
    plain["mix"] = {stream.source: _plain(stream, "source") for stream in stage.streams}
    return plain


def _plain(part: Any, *left_out: str) -> dict[str, Any]:
    """Return the fields without defaults; fractions as text."""
    values = {
        field.name: getattr(part, field.name)
        for field in fields(part)
        if field.name not in left_out and getattr(part, field.name) != field.default
    }
    return {key: str(v) if isinstance(v, Fraction) else v for key, v in values.items()}
