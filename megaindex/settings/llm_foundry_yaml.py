"""LLM-Foundry training configurations as recipes of one stage."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaindex.arithmetic import ceil_div
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
    "preprocessing_fn", "hf_kwargs", "override_eos_token_id_mismatch_error",
    "override_bos_token_id_mismatch_error",
)  # fmt: skip
_READ = (
    "max_seq_len", "global_train_batch_size", "device_train_microbatch_size", "max_duration",
    "eval_interval", "eval_subset_num_batches", "device_eval_batch_size", "train_loader",
    "eval_loader", "train_subset_num_batches", "eval_first",
)  # fmt: skip
# settings that no file is read with, their value that changes nothing, and what to do instead
_REFUSED = {
    "train_subset_num_batches": (-1, "every epoch would end early; give the batches of all in "
                                     "max_duration"),
    "eval_first": (False, "a recipe does not evaluate before the first step"),
}  # fmt: skip
# parts of other sections that change which samples are read
_CHANGES_SAMPLES = {
    ("callbacks", "curriculum_learning"): "write a recipe with a stage for each of its mixtures",
    ("algorithms", "seq_length_warmup"): "write a recipe with a stage for each sequence_length",
}
_DURATION = re.compile(
    r"\s*(\d[\d_]*(?:\.\d*)?(?:e\+?\d{1,2})?)\s*(ep|ba|sp|tok)\s*", re.IGNORECASE
)


def read_llm_foundry(path: str | os.PathLike[str], *, devices: int | None = None) -> Recipe:
    """Return the run that a training configuration of LLM-Foundry describes.

    A stream's folder of MDS shards, ``local`` and ``split`` joined, is the prefix of a .bin/.idx
    pair: of ``local: mds/web`` and ``split: train``, ``mds/web/train.bin`` and ``.idx``. A document
    of the pair, which is a sample of MDS, is a row, cut to max_seq_len. The loader ``finetuning``
    takes the loss mask from the pair with ``_loss_mask`` behind that prefix. The keys were those of
    LLM-Foundry 0.22 and Streaming 0.13.

    Args:
        path: the YAML file; relative folders in it are relative to its directory.
        devices: number of data-parallel ranks, which the file does not hold. Default: unknown.

    Raises:
        MissingFile, StorageError: the file cannot be read, or a stream has no pair.
        InvalidArgument: a setting is missing or wrong, or has no counterpart here.
    """
    name, folder = os.fspath(path), Path(path).parent
    content = load_mapping(path, "--llm-foundry-config")
    top = Section(name, _resolved(content, name))
    _check_other_settings(content, top)
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
    seed = dataset.integer("shuffle_seed")
    return Recipe(
        sequence_length=length,
        batch=BatchSchedule.constant(size),
        sources=tuple(_source(key, each, loader, folder) for key, each in streams.items()),
        stages=(_stage(loader, streams, _duration(top, size, length)),),
        seed=_SEED if seed is None else seed,
        tail="drop" if loader.flag("drop_last", True) else "pad",
        evaluation=_evaluation(top, folder, devices),
        micro_batch_size=_micro_batch_size(top, size, devices),
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

    return {key: replaced(content[key]) for key in _READ if key in content}


def _check_other_settings(content: Mapping[str, Any], top: Section) -> None:
    """Refuse what changes the samples, or their number, in a way that a recipe does not."""
    for key, (plain, remedy) in _REFUSED.items():
        if top.values.get(key) not in (None, plain):
            raise InvalidArgument(f"{top.called(key)} must be {str(plain).lower()}: {remedy}")
    for (part, name), remedy in _CHANGES_SAMPLES.items():
        given = content.get(part)
        if isinstance(given, Mapping) and name in given:
            raise InvalidArgument(
                f"{top.where}: {part}.{name} changes the samples in mid-run; {remedy}"
            )


def _micro_batch_size(top: Section, size: int, devices: int | None) -> int | None:
    """Return the rows of a micro batch; None if LLM-Foundry finds them, or they divide no batch.

    LLM-Foundry lowers them to the rows of a device, and its last micro batch may be smaller.
    """
    if top.values.get("device_train_microbatch_size", "auto") == "auto":
        return None
    micro = top.integer("device_train_microbatch_size")
    rows = size if devices is None or size % devices else size // devices
    return None if micro is None or (0 < micro < rows and rows % micro) else min(micro, rows)


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
    if dataset.values.get("mlm_probability") is not None:
        raise InvalidArgument(
            f"{dataset.called('mlm_probability')}: random tokens of the rows would be replaced; "
            "set it to null"
        )
    dataset.known(*_DATASET, *_WITHOUT_EFFECT, "hf_name", "safe_load", "mlm_probability")
    if dataset.text("sampling_method", "balanced") != "balanced":
        raise InvalidArgument(
            f"{dataset.called('sampling_method')}: fixed draws the same samples in each epoch; a "
            "recipe draws new ones: use balanced, or max_fraction and max_epochs in a recipe"
        )
    return loader


def _streams(dataset: Section) -> dict[str, Section]:
    """Return the streams by name, with the settings of the dataset that they inherit."""
    if not dataset.values.get("streams"):
        one = {key: dataset.values[key] for key in _STREAM[:3] if key in dataset.values}
        place = one.get("local") or one.get("remote")
        if not isinstance(place, str):
            raise InvalidArgument(f"{dataset.where}: give local, or streams")
        return {place: Section(dataset.file, one, dataset.path)}
    for name in ("local", "remote"):
        if dataset.values.get(name):
            raise InvalidArgument(
                f"{dataset.called(name)}: Streaming takes it or streams, not both; leave one out"
            )
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
        return RecipeSource(name=name, path=prefix, kind="finetuning", packed=False)
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
        packed=_is_packed(loader),
    )


def _is_packed(loader: Section) -> bool:
    dataset = loader.section("dataset")
    ratio = dataset.values.get("packing_ratio")
    return loader.text("name") == "finetuning" and ratio not in (None, 1, 1.0)


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


def _stage(loader: Section, streams: Mapping[str, Section], length: Target) -> RecipeStage:
    dataset = loader.section("dataset")
    size = dataset.integer("epoch_size")
    drawn = tuple(Stream(source=name, **section.given(Stream)) for name, section in streams.items())
    by_size = size is not None and all(
        (each.proportion, each.repeat, each.choose) == (None, None, None) for each in drawn
    )
    if _is_packed(loader) and (size is not None or any(each.choose for each in drawn)):
        raise InvalidArgument(
            f"{dataset.where}: epoch_size and choose count examples, of which packing_ratio puts "
            "several into a row; leave one of them out"
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


def _duration(top: Section, size: int, length: int) -> Target:
    """Return the length of ``max_duration``: an integer counts epochs.

    Composer trains whole batches until the samples or tokens are reached.
    """
    kind, value = _time(top, "max_duration")
    if kind == "tokens" and top.section("train_loader").text("name") == "finetuning":
        raise top.error("max_duration", "in ep, ba or sp: of rows with padding, tokens are unknown")
    if kind in ("samples", "tokens"):
        value = ceil_div(value, size if kind == "samples" else size * length)
        kind = "iterations"
    return Target(kind=kind, value=Fraction(value))


def _time(top: Section, name: str) -> tuple[TargetKind, int]:
    given = top.values.get(name)
    found = _DURATION.fullmatch(f"{given}ep" if type(given) is int else str(given))
    value = Fraction(found[1].replace("_", "")) if found else Fraction(0)
    if found is None or value < 1 or value.denominator != 1:
        raise top.error(name, "a number with its unit ep, ba, sp or tok, such as 4800ba")
    return _UNITS[found[2].lower()], int(value)


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
    top = Section(top.file, {"eval_interval": "1ep", **top.values})
    kind, interval = _time(top, "eval_interval")
    if kind != "iterations":
        raise top.error(
            "eval_interval", "a number of batches, such as 500ba, or without eval_loader"
        )
    source = _source("validation", stream, loader, folder)
    size = top.integer("device_eval_batch_size")
    if top.values.get("eval_subset_num_batches", -1) == -1:
        if loader.flag("drop_last", False):
            raise loader.error("drop_last", "false: here an evaluation reads every sample once")
        batch = None if devices is None or size is None else size * devices
        return RecipeEvaluation(source=source, interval=interval, batch_size=batch)
    batches = top.integer("eval_subset_num_batches")
    if devices is None or size is None:
        raise InvalidArgument(
            f"{top.called('eval_subset_num_batches')} counts batches of device_eval_batch_size "
            "rows on every device: give both, and --world-size, or -1 for all samples"
        )
    return RecipeEvaluation(
        source=source, interval=interval, iterations=batches, batch_size=size * devices
    )
