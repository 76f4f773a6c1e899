"""LLM-Foundry training configurations as recipes of one stage."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaindex.errors import InvalidArgument, MissingFile
from megaindex.io.paths import inside, is_remote
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import (
    Recipe,
    RecipeEvaluation,
    RecipeSource,
    RecipeStage,
    Stream,
    Weighting,
)
from megaindex.settings.run_settings import Target, TargetKind
from megaindex.settings.yaml_sections import TOKENIZE, Section, load_mapping
from megaindex.validation import check_between

_SEED = 9176  # shuffle_seed of Streaming, where the file has none
_UNITS: dict[str, TargetKind] = {
    "ep": "epochs",
    "ba": "iterations",
    "sp": "samples",
    "tok": "tokens",
}
_REFERENCE = re.compile(r"\$\{([^{}$]*)\}")
_MOST_NESTED = 100  # references that lead to references
_MOST_REPLACED = 1_000_000  # values and characters of a configuration
_STREAM = ("local", "remote", "split", "proportion", "repeat", "choose")
_OF_DOWNLOADS = ("download_retry", "download_timeout", "validate_hash", "keep_zip")
_DATASET = (
    *_STREAM[:3], "streams", "max_seq_len", "epoch_size", "shuffle", "shuffle_seed",
    "sampling_method", "batching_method", "packing_ratio", "decoder_only_format", "target_prompts",
)  # fmt: skip
# settings that change neither the samples of a recipe nor their number
_WITHOUT_EFFECT = (
    *_OF_DOWNLOADS, "token_encoding_type", "predownload", "cache_limit", "partition_algo",
    "num_canonical_nodes", "batch_size", "shuffle_algo", "shuffle_block_size",
    "sampling_granularity", "allow_unsafe_types", "replication", "stream_name", "stream_config",
    "eos_token_id", "bos_token_id", "seq_parallel_replication", "auto_packing_replication",
    "max_leftover_bins_to_keep", "allow_pad_trimming", "pad_to_longest", "target_responses",
    "preprocessing_fn", "hf_kwargs",
)  # fmt: skip


def read_llm_foundry(path: str | os.PathLike[str], *, devices: int | None = None) -> Recipe:
    """Return the run that a training configuration of LLM-Foundry describes.

    A stream's folder of MDS shards, ``local`` and ``split`` joined, is the prefix of a .bin/.idx
    pair: of ``local: mds/web`` and ``split: train``, ``mds/web/train.bin`` and ``.idx``. The loader
    ``finetuning`` takes the loss mask from the pair with ``_loss_mask`` behind that prefix. The
    keys were those of LLM-Foundry 0.22 and Streaming 0.13.

    Args:
        path: the YAML file; relative folders in it are relative to its directory.
        devices: number of data-parallel ranks, which the file does not hold. Default: unknown.

    Raises:
        MissingFile, StorageError: the file cannot be read, or a stream has no pair.
        InvalidArgument: a setting is missing or wrong, or has no counterpart here.
    """
    name, folder = os.fspath(path), Path(path).parent
    top = Section(name, _resolved(load_mapping(path, "--llm-foundry-config"), name))
    loader = _loader(top, "train_loader")
    dataset = loader.section("dataset")
    length = dataset.integer("max_seq_len") or top.integer("max_seq_len")
    if length is None:
        raise InvalidArgument(f"{top.called('max_seq_len')} is missing: tokens per sample")
    if not dataset.flag("shuffle", False):
        raise InvalidArgument(
            f"{dataset.called('shuffle')} must be true: samples of a recipe are shuffled, and "
            "without shuffle they are read in the order of the files"
        )
    streams = _streams(dataset)
    size = check_between(top.called("global_train_batch_size"),
                         top.integer("global_train_batch_size"), 1)  # fmt: skip
    micro = None
    if top.values.get("device_train_microbatch_size", "auto") != "auto":
        micro = top.integer("device_train_microbatch_size")
    seed = dataset.integer("shuffle_seed")
    return Recipe(
        sequence_length=length,
        batch=BatchSchedule.constant(size),
        sources=tuple(_source(key, each, loader, folder) for key, each in streams.items()),
        stages=(_stage(dataset, streams, _duration(top)),),
        seed=_SEED if seed is None else seed,
        tail="drop" if loader.flag("drop_last", True) else "pad",
        evaluation=_evaluation(top, folder, devices),
        micro_batch_size=micro,
        data_parallel_size=devices,
    )


def _resolved(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the configuration with every ``${a.b}`` replaced by the value of that key."""

    def look_up(key: str) -> Any:
        value: Any = content
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise InvalidArgument(
                    f"{file}: ${{{key}}} names no key of the file; write the value in its place"
                )
            value = value[part]
        return value

    left = _MOST_REPLACED

    def replaced(value: Any, depth: int = 0) -> Any:
        nonlocal left
        left -= len(value) if isinstance(value, str) else 1
        if depth > _MOST_NESTED or left < 0:
            raise InvalidArgument(
                f"{file}: a reference ${{…}} leads to itself, or to too many others; write the "
                "value"
            )
        if isinstance(value, Mapping):
            return {str(key): replaced(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each, depth + 1) for each in value]
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return replaced(look_up(whole[1]), depth + 1)
        text = _REFERENCE.sub(lambda found: str(look_up(found[1])), value)
        return text if text == value else replaced(text, depth + 1)

    return {
        key: replaced(content[key])
        for key in ("max_seq_len", "global_train_batch_size", "device_train_microbatch_size",
                    "max_duration", "eval_interval", "eval_subset_num_batches",
                    "device_eval_batch_size", "train_loader", "eval_loader")
        if key in content
    }  # fmt: skip


def _loader(top: Section, name: str) -> Section:
    loader = top.section(name)
    if loader.text("name") not in ("text", "finetuning"):
        raise loader.error("name", "text or finetuning")
    dataset = loader.section("dataset")
    for key in ("hf_name", "safe_load"):
        if dataset.values.get(key) is not None:
            raise InvalidArgument(
                f"{dataset.called(key)}: a Hugging Face dataset has no token files; {TOKENIZE}, "
                "and give a stream with local: PREFIX"
            )
    dataset.known(*_DATASET, *_WITHOUT_EFFECT)
    if dataset.text("sampling_method", "balanced") != "balanced":
        raise InvalidArgument(
            f"{dataset.called('sampling_method')}: fixed draws the same samples in each epoch; a "
            "recipe draws new ones: use balanced, or max_fraction and max_epochs in a recipe"
        )
    return loader


def _streams(dataset: Section) -> dict[str, Section]:
    """Return the streams by name, with the settings of the dataset that they inherit."""
    if dataset.values.get("streams") is None:
        one = {key: dataset.values[key] for key in _STREAM[:3] if key in dataset.values}
        place = one.get("local") or one.get("remote")
        if not isinstance(place, str):
            raise InvalidArgument(f"{dataset.where}: give local, or streams")
        return {place: Section(dataset.file, one, dataset.path)}
    streams = dataset.section("streams")
    sections = {name: streams.section(name) for name, _ in streams.items()}
    for section in sections.values():
        section.known(*_STREAM, *_OF_DOWNLOADS)
    inherited = {"split": dataset.values.get("split")}
    return {
        name: Section(section.file, {**inherited, **section.values}, section.path)
        for name, section in sections.items()
    }


def _source(name: str, stream: Section, loader: Section, folder: Path) -> RecipeSource:
    dataset = loader.section("dataset")
    prefix = _prefix(stream, folder)
    if loader.text("name") == "text":
        return RecipeSource(name=name, path=prefix)
    if not dataset.flag("decoder_only_format", False):
        raise InvalidArgument(
            f"{dataset.called('decoder_only_format')} must be true: encoder-decoder models read "
            "other rows"
        )
    everything = dataset.text("target_prompts", "none") == "all"
    mask = f"{prefix}_loss_mask"
    if not everything and not is_remote(mask) and not os.path.exists(f"{mask}.idx"):
        raise MissingFile(
            f"{stream.where}: {mask}.idx does not exist; write a pair with 1 for every token of a "
            "response and 0 for the others, or give target_prompts: all"
        )
    return RecipeSource(
        name=name,
        path=prefix,
        kind="finetuning",
        loss_mask="" if everything else mask,
        packed=dataset.values.get("packing_ratio") not in (None, 1, 1.0),
    )


def _prefix(stream: Section, folder: Path) -> str:
    """Return the prefix of the pair of a stream."""
    key = "local" if stream.values.get("local") is not None else "remote"
    if stream.values.get(key) is None:
        raise InvalidArgument(f"{stream.where}: give local, the folder of the stream")
    place = inside(folder, stream.text(key).rstrip("/"))
    if stream.values.get("split") is not None:
        place = posixpath.join(place, stream.text("split"))
    if os.path.isdir(place) and not os.path.exists(f"{place}.idx"):
        raise MissingFile(
            f"{stream.where}: {place}.idx does not exist; make it of the shards with `megaindex "
            f"import mds {place} {place}`"
        )
    return place


def _stage(dataset: Section, streams: Mapping[str, Section], length: Target) -> RecipeStage:
    size = dataset.integer("epoch_size")
    drawn = tuple(Stream(source=name, **section.given(Stream)) for name, section in streams.items())
    by_size = size is not None and all(
        (each.proportion, each.repeat, each.choose) == (None, None, None) for each in drawn
    )
    batching: Any = dataset.text("batching_method", "random")
    return RecipeStage(
        name="train",
        streams=drawn,
        length=length,
        epoch_size=size,
        weighting=Weighting(by="samples") if by_size else None,
        batching=batching,
        rounding="streaming",
    )


def _duration(top: Section) -> Target:
    """Return the length of ``max_duration``: an integer counts epochs."""
    kind, value = _time(top, "max_duration")
    return Target(kind=kind, value=Fraction(value))


def _time(top: Section, name: str) -> tuple[TargetKind, int]:
    given = top.values.get(name)
    found = re.fullmatch(r"\s*(\d+)\s*(ep|ba|sp|tok)\s*", f"{given}ep" if type(given) is int
                         else str(given))  # fmt: skip
    if found is None or int(found[1]) < 1:
        raise top.error(name, "a number with its unit ep, ba, sp or tok, such as 4800ba")
    return _UNITS[found[2]], int(found[1])


def _evaluation(top: Section, folder: Path, devices: int | None) -> RecipeEvaluation | None:
    given = top.values.get("eval_loader")
    if given is None:
        return None
    if isinstance(given, list):
        if len(given) != 1:
            raise InvalidArgument(
                f"{top.called('eval_loader')}: a recipe evaluates on one source, got {len(given)} "
                "loaders; keep one"
            )
        top = Section(top.file, {**top.values, "eval_loader": given[0]})
    loader = _loader(top, "eval_loader")
    streams = _streams(loader.section("dataset"))
    if len(streams) != 1:
        raise InvalidArgument(
            f"{loader.called('dataset')}: a recipe evaluates on one source, got {len(streams)} "
            "streams; keep one"
        )
    (stream,) = streams.values()
    kind, interval = _time(Section(top.file, {"eval_interval": 1, **top.values}), "eval_interval")
    if kind != "iterations":
        raise top.error("eval_interval", "a number of batches, such as 500ba")
    source = _source("validation", stream, loader, folder)
    if top.values.get("eval_subset_num_batches", -1) == -1:
        return RecipeEvaluation(source=source, interval=interval)
    batches, size = top.integer("eval_subset_num_batches"), top.integer("device_eval_batch_size")
    if devices is None or size is None:
        raise InvalidArgument(
            f"{top.called('eval_subset_num_batches')} counts batches of device_eval_batch_size "
            "rows on every device: give both, and --world-size, or -1 for all samples"
        )
    return RecipeEvaluation(
        source=source, interval=interval, iterations=batches, batch_size=size * devices
    )
