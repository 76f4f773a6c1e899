"""GPT-NeoX configuration files as settings.

Keys are read as NeoX reads them: several files make one configuration, hyphens equal underscores,
keys that do not concern the data are ignored.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.dialect import DEFAULT_SPLIT
from megaindex.recipe.hosts import gpus_of_hosts
from megaindex.recipe.settings import Settings
from megaindex.recipe.yaml_file import load_mapping

_SPLITS = ("train", "valid", "test")


def read_neox(paths: Sequence[str | os.PathLike[str]]) -> Settings:
    """Settings of one or several NeoX files.

    Raises:
        MissingFile, StorageError: a file cannot be read.
        InvalidArgument: a file is not a mapping, repeats a key of another, or asks for what the
            planner cannot size.
    """
    return neox_settings(merged_files(paths))


def merged_files(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """All keys of the files, with underscores.

    NeoX compares a key as written with the converted keys it has: ``train_iters`` a second time is
    an error, ``train-iters`` silently replaces.
    """
    config: dict[str, Any] = {}
    for path in paths:
        for key, value in load_mapping(path, "--neox-config", last_wins=True).items():
            if key in config:
                raise InvalidArgument(
                    f"{os.fspath(path)}: {key} is set by an earlier file too, which NeoX refuses; "
                    "remove one of them"
                )
            config[key.replace("-", "_")] = value
    return config


def neox_settings(config: Mapping[str, Any]) -> Settings:
    """The planner's settings in a merged NeoX configuration."""
    _refuse_other_packing(config)
    epochs = _whole(config, "train_epochs")
    return Settings(
        order="neox",
        **_data(config),
        seq_length=_whole(config, "seq_length"),
        micro_batch_size=_whole(config, "train_micro_batch_size_per_gpu"),
        gradient_accumulation_steps=_whole(config, "gradient_accumulation_steps"),
        global_batch_size=_whole(config, "train_batch_size"),
        world_size=_whole(config, "global_num_gpus") or gpus_of_hosts(config),
        tensor_model_parallel_size=max(1, _whole(config, "model_parallel_size") or 1),
        pipeline_model_parallel_size=max(1, _whole(config, "pipe_parallel_size") or 1),
        train_iters=_whole(config, "train_iters"),
        # With train_epochs NeoX asks for one epoch, without a buffer, however many it is to train.
        epochs=None if epochs is None else "1",
        variance_buffer=None if epochs is None else "1.0",
        seed=_whole(config, "seed"),
        eval_interval=_whole(config, "eval_interval"),
        eval_iters=_whole(config, "eval_iters"),
        notes=_notes(epochs),
    )


def _data(config: Mapping[str, Any]) -> dict[str, Any]:
    paths = {f"{split}_data_path": _blend(config, split) for split in _SPLITS}
    single = config.get("data_path")
    if single is not None and any(paths.values()):
        raise InvalidArgument(
            "data_path and train_data_paths exclude each other in NeoX; remove one of them"
        )
    if single is None:
        return paths
    if not isinstance(single, str):
        raise InvalidArgument(
            f"data_path must be one path, got {_shown(single)}; use train_data_paths"
        )
    split = _scalar("split", config.get("split", DEFAULT_SPLIT))
    return {"data_path": (single,), "split": split.replace(" ", "")}


def _blend(config: Mapping[str, Any], split: str) -> tuple[str, ...] | None:
    """``weight path weight path …`` of a split; NeoX weighs all alike where it is told nothing."""
    paths = _list(config, f"{split}_data_paths")
    if not paths:
        return None
    weights = _list(config, f"{split}_data_weights") or [1.0] * len(paths)
    if len(weights) != len(paths):
        raise InvalidArgument(
            f"{split}_data_weights has {len(weights)} entries for {len(paths)} {split}_data_paths; "
            "give one weight for each path"
        )
    pairs = zip(weights, paths, strict=True)
    return tuple(_scalar(f"{split}_data_paths", word) for pair in pairs for word in pair)


def _refuse_other_packing(config: Mapping[str, Any]) -> None:
    for key, known in (("pack_impl", "packed"), ("dataset_impl", "gpt2")):
        if config.get(key, known) != known:
            raise InvalidArgument(
                f"{key}: {_shown(config[key])} is not planned; only {known!r} packs tokens "
                "into samples whose number can be known ahead"
            )
    if config.get("weight_by_num_documents"):
        raise InvalidArgument(
            "weight_by_num_documents replaces the weights by ones it computes; write those into "
            "train_data_weights and turn it off"
        )


def _notes(epochs: int | None) -> tuple[str, ...]:
    if epochs is None or epochs <= 1:
        return ()
    return (
        f"train_epochs {epochs}: NeoX builds one epoch and replays it in the same order; this plan "
        "is of one pass. Use train_iters for epochs with orders of their own",
    )


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, (list, dict)):
        raise InvalidArgument(f"{key} must hold plain values, got {_shown(value)}")
    return str(value)


def _shown(value: Any) -> str:
    """A value in an error message. Aliases of YAML nest lists in lists: never write out all."""
    return reprlib.repr(value)


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgument(f"{key} must be a list, got {_shown(value)}; put it into [ ]")
    return value


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{key} must be a whole number, got {_shown(value)}")
    return value
