"""Nanotron configuration files as recipes, with a stage for each entry of data_stages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaindex.arithmetic import global_batch_size
from megaindex.errors import InvalidArgument
from megaindex.io.paths import inside
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target
from megaindex.settings.yaml_sections import TOKENIZE, Section, load_mapping
from megaindex.validation import check_between

_SEED = 42  # Nanotron's own, where its file has none
# The settings of Nanotron (2026-04), which refuses all others, in the sections that are read here.
_TOP = (
    "general", "parallelism", "model", "tokenizer", "checkpoints", "logging", "metrics_logging",
    "tokens", "optimizer", "data_stages", "profiler", "lighteval", "s3_upload",
)  # fmt: skip
_TOKENS = (
    "sequence_length", "train_steps", "micro_batch_size", "batch_accumulation_per_replica",
    "val_check_interval", "limit_val_batches", "limit_test_batches",
)  # fmt: skip
_PARALLELISM = (
    "dp", "pp", "tp", "pp_engine", "tp_mode", "tp_linear_async_communication", "recompute_layer",
    "tp_recompute_allgather", "expert_parallel_size", "context_parallel_size",
    "moe_layer_recompute",  # until June 2025
)  # fmt: skip
_STAGE = ("name", "start_training_step", "data", "sequence_length")
_DATA = ("dataset", "seed", "num_loading_workers")
_DATASET = (
    "dataset_folder", "dataset_weights", "dataset_read_path", "tokenizer_name", "vocab_size",
    "token_size_in_bytes", "return_positions", "skip_in_stream",
    "pad_samples_to_global_batch_size", "dataset_max_tokens", "shuffle_files",
    "use_old_brrr_dataloader",
)  # fmt: skip


def read_nanotron(path: str | os.PathLike[str]) -> Recipe:
    """Return the run that a Nanotron configuration describes.

    A dataset folder is the prefix of a .bin/.idx pair; ``megaindex import nanotron`` writes the
    .idx of a token file. The pair is read at ``dataset_read_path`` where it is there, as Nanotron
    reads a copy. Nanotron counts steps from 1, a recipe from 0. Each stage reads its datasets on
    from where the stage before ended. Stages may have a sequence_length of their own.

    Args:
        path: the YAML file; relative folders in it are relative to its directory.

    Raises:
        MissingFile, StorageError: the file cannot be read.
        InvalidArgument: a setting is missing, wrong or unknown to Nanotron, or a dataset has no
            token files.
    """
    top = Section(os.fspath(path), load_mapping(path, "--nanotron-config", last_wins=True))
    top.known(*_TOP)
    tokens, folder = top.section("tokens"), Path(path).parent
    tokens.known(*_TOKENS)
    micro, steps = _count(tokens, "micro_batch_size"), _count(tokens, "train_steps")
    accumulation = _count(tokens, "batch_accumulation_per_replica", 1)
    parallelism = top.section("parallelism", default={})
    parallelism.known(*_PARALLELISM)
    parallel = _count(parallelism, "dp", 1)
    sections = _sections(top)
    blends = [_blend(section) for section in sections]
    lengths = [section.integer("sequence_length") for section in sections]
    begins = [_count(section, "start_training_step") - 1 for section in sections]
    if begins[0] != 0:
        raise InvalidArgument(
            f"{top.where}: the first of the data_stages must have start_training_step 1, got "
            f"{begins[0] + 1}"
        )
    names = [section.text("name", f"stage {k}") for k, section in enumerate(sections)]
    paths = {path: inside(folder, path) for blend in blends for path in blend}
    for section in sections:
        copies = _copies(section, folder)
        paths |= {name: copies[name] for name in paths if name in copies}
    # Nanotron's loader takes the seed of the first stage's data
    seed = sections[0].section("data", default={}).integer("seed")
    return Recipe(
        sequence_length=_count(tokens, "sequence_length"),
        batch=BatchSchedule.constant(global_batch_size(micro, parallel, accumulation)),
        sources=tuple(RecipeSource(name=name, path=place) for name, place in paths.items()),
        stages=tuple(map(_stage, names, blends, begins, [*begins[1:], steps], lengths)),
        seed=_SEED if seed is None else seed,
        micro_batch_size=micro,
        data_parallel_size=parallel,
        gradient_accumulation_steps=accumulation,
    )


def _stage(
    name: str, blend: dict[str, Fraction], begin: int, end: int, length: int | None
) -> RecipeStage:
    if end <= begin:
        raise InvalidArgument(
            f"data_stages: {name} begins with step {begin + 1}, and the next stage, or the end of "
            f"training, is at step {end + 1}; start_training_step must rise, below train_steps"
        )
    return RecipeStage(
        name=name,
        streams=tuple(Stream(source=name, proportion=weight) for name, weight in blend.items()),
        length=Target(kind="iterations", value=Fraction(end - begin)),
        first_step=begin,
        sequence_length=length,
    )


def _sections(top: Section) -> list[Section]:
    stages = top.values.get("data_stages")
    if not isinstance(stages, list) or not stages:
        raise InvalidArgument(
            f"{top.where}: data_stages must be a list with a stage for each range of steps"
        )
    wrapped = Section(top.where, {f"data_stages[{k}]": stage for k, stage in enumerate(stages)})
    sections = [wrapped.section(name) for name, _ in wrapped.items()]
    for section in sections:
        section.known(*_STAGE)
    return sorted(sections, key=lambda section: _count(section, "start_training_step"))


def _blend(stage: Section) -> dict[str, Fraction]:
    """Return the folders of a stage, as written, and their weights, by default equal."""
    data = stage.section("data")
    data.known(*_DATA)
    dataset = data.section("dataset")
    if "hf_dataset_or_datasets" in dataset.values:
        raise InvalidArgument(
            f"{dataset.called('hf_dataset_or_datasets')}: a Hugging Face dataset has no token "
            f"files; {TOKENIZE}, and give dataset_folder: PREFIX"
        )
    dataset.known(*_DATASET)
    if dataset.values.get("dataset_max_tokens") is not None:
        raise InvalidArgument(
            f"{dataset.where}.dataset_max_tokens: a limit on tokens has no counterpart in recipes; "
            "write a recipe with max_fraction instead"
        )
    value = dataset.values.get("dataset_folder")
    if isinstance(value, dict):
        pairs: Sequence[tuple[Any, Any]] = list(value.items())
    else:
        folders = [value] if isinstance(value, str) else value
        if not isinstance(folders, list) or not folders:
            raise InvalidArgument(
                f"{dataset.where}: dataset_folder must name the token files of the stage; other "
                "kinds of datasets have no files to read"
            )
        weights = dataset.values.get("dataset_weights")
        weights = [1] * len(folders) if weights is None else weights
        if not isinstance(weights, list) or len(weights) != len(folders):
            raise InvalidArgument(
                f"{dataset.where}: dataset_weights must hold one weight for each of the "
                f"{len(folders)} folders"
            )
        pairs = list(zip(folders, weights, strict=True))
    blend: dict[str, Fraction] = {}
    for path, weight in pairs:
        share = Section(dataset.where, {str(path): weight}).fraction(str(path))
        if not isinstance(path, str) or share is None or share < 0:
            raise InvalidArgument(
                f"{dataset.where}: {path!r} with weight {weight!r}: folders are text, weights "
                "numbers of at least 0"
            )
        name = path.rstrip("/")
        blend[name] = blend.get(name, Fraction(0)) + share
    return {path: share for path, share in blend.items() if share > 0}


def _copies(stage: Section, folder: Path) -> dict[str, str]:
    """Return the prefixes of the folders whose pair is at their ``dataset_read_path``."""
    dataset = stage.section("data").section("dataset")
    read = dataset.values.get("dataset_read_path")
    if read is None:
        return {}
    named = dataset.values["dataset_folder"]
    folders = [named] if isinstance(named, str) else list(named)
    copies = [read] if isinstance(read, str) else read
    if not isinstance(copies, list) or len(copies) != len(folders):
        raise dataset.error("dataset_read_path", f"one path for each of {len(folders)} folders")
    places = zip(folders, (inside(folder, str(copy).rstrip("/")) for copy in copies), strict=True)
    return {name.rstrip("/"): place for name, place in places if os.path.exists(f"{place}.idx")}


def _count(section: Section, name: str, default: int | None = None) -> int:
    """Return an integer from 1, which may be left out if there is a default."""
    given = section.integer(name)
    return check_between(section.called(name), default if given is None else given, 1)
