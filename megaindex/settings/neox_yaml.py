"""GPT-NeoX configuration files and host files as settings.

Keys are read as NeoX reads them: several files make one configuration, and hyphens equal
underscores. Keys that do not concern the data are ignored; unknown keys are reported.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import DEFAULT_SPLIT, SPLITS, parse_split
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.io.paths import listed_paths
from megaindex.settings.settings import Settings, argument_names, settings_in_comments
from megaindex.settings.yaml_sections import load_mapping, read_text
from megaindex.validation import check_integer, check_number, check_setting, shown

NAMES = argument_names("neox")
_HOST = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d{1,9})\s*(#.*)?$")


def gpus_of_hosts(config: Mapping[str, Any]) -> int | None:
    """Return the number of GPUs in a configuration's host file, None where it is not determined.

    ``num_nodes`` selects the first hosts, ``num_gpus`` overrides their slots. With ``include`` or
    ``exclude``, which name single devices, the result is None.
    """
    path = config.get("hostfile") or os.environ.get("DLTS_HOSTFILE")
    if not path or config.get("include") or config.get("exclude"):
        return None
    if not isinstance(path, str):
        raise InvalidArgument(f"hostfile must be a path, got a {type(path).__name__}")
    if not os.path.isfile(path):
        return None
    hosts = map(_HOST.match, map(str.strip, read_text(path, "hostfile").splitlines()))
    slots = [int(host["slots"]) for host in hosts if host]
    nodes = config.get("num_nodes")
    if isinstance(nodes, int) and nodes > 0:
        slots = slots[:nodes]
    gpus = config.get("num_gpus")
    total = gpus * len(slots) if isinstance(gpus, int) and gpus > 0 else sum(slots)
    return total or None


_MICRO = "train_micro_batch_size_per_gpu"
_VERSION = "GPT-NeoX (main, 2026-05)"
# Keys that change a plan; an unknown key similar to one of them is refused as a typing error.
_TAKEN = (
    "seq_length", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_path",
    "train_batch_size", "global_num_gpus", "model_parallel_size", "pipe_parallel_size", "split",
    "train_iters", "train_epochs", "eval_interval", "eval_iters", "data_impl", "pack_impl",
    "dataset_impl", "allow_chopped", "weight_by_num_documents", "weighted_sampler_alpha",
    "hostfile", "num_nodes", "num_gpus", "include", "exclude", "exit_interval",
    "curriculum_learning", "data_efficiency", "autotuning", "elasticity", "train_impl",
    *(f"{split}{kind}_data_paths" for split in SPLITS for kind in ("", "_label")),
    *(f"{split}_data_weights" for split in SPLITS),
)  # fmt: skip
_UNPLANNED = {
    "curriculum_learning": "shortens samples, which the plan's shares of tokens ignore",
    "data_efficiency": "chooses samples itself, which the plan ignores",
    "autotuning": "chooses batch sizes, which the plan ignores",
    "elasticity": "chooses batch sizes, which the plan ignores",
}


def read_neox(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Settings:
    """Return the settings of one or several GPT-NeoX files.

    Keys are those of GPT-NeoX main (2026-05). Calls of ``megaindex.adapters.neox.install`` in
    comments set its buffer, as ``--print-config neox`` writes them.

    Args:
        paths: YAML file, or files that make one configuration, as on NeoX's command line.

    Raises:
        MissingFile, StorageError: a file, or the host file, cannot be read.
        InvalidArgument: a file is not a mapping, repeats a key of another, or has a value that NeoX
            refuses or that cannot be planned; the message names the file.
    """
    paths = listed_paths(paths)
    config = merged_files(paths)
    try:
        settings = neox_settings(config)
    except InvalidArgument as error:
        raise InvalidArgument(f"{_file_of(str(error), paths)}: {error}") from None
    called: dict[str, Any] = {}
    for path in paths:
        name = os.fspath(path)
        called |= settings_in_comments(read_text(name, "--neox-config"), "neox", name)
    return replace(settings, **called)


def _file_of(message: str, paths: Sequence[str | os.PathLike[str]]) -> str:
    """Return the file that sets the first key in a message; all files if none does."""
    files = {
        key.replace("-", "_"): os.fspath(path)
        for path in paths
        for key in load_mapping(path, "--neox-config", last_wins=True)
    }
    words = re.findall(r"\w+", message)
    return next((files[word] for word in words if word in files), ", ".join(map(str, paths)))


def merged_files(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Return all keys of the files, with underscores.

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
            name = key.replace("-", "_")
            near = difflib.get_close_matches(name, _TAKEN, 1, cutoff=0.8)
            if name not in NAMES and near:
                raise InvalidArgument(
                    f"{os.fspath(path)}: GPT-NeoX has no argument {key} and refuses it; did you "
                    f"mean {near[0]}?"
                )
            config[name] = value
    return config


def neox_settings(config: Mapping[str, Any]) -> Settings:
    """Return the planner's settings of a merged NeoX configuration."""
    _check_train_epochs(config)
    return Settings(
        order="neox",
        **_data(config),
        packing=_packing(config),
        seq_length=_whole(config, "seq_length"),
        micro_batch_size=_whole(config, _MICRO, "micro_batch_size"),
        gradient_accumulation_steps=_accumulation(config),
        global_batch_size=_whole(config, "train_batch_size", "global_batch_size"),
        world_size=_whole(config, "global_num_gpus") or gpus_of_hosts(config),
        tensor_model_parallel_size=max(1, _whole(config, "model_parallel_size") or 1),
        pipeline_model_parallel_size=max(1, _whole(config, "pipe_parallel_size") or 1),
        **_length(config),
        notes=tuple(_notes(config)),
    )


def _accumulation(config: Mapping[str, Any]) -> int | None:
    """Return the accumulation steps: NeoX's default is 1, even where both batch sizes are given."""
    key, sizes = "gradient_accumulation_steps", ("train_batch_size", _MICRO)
    if key in config or any(_whole(config, size) is None for size in sizes):
        return _whole(config, key)
    return 1


_NEVER_NULL = ("seed", "eval_interval", "eval_iters")  # keys with a default, used in arithmetic


def _length(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the run; of train_iters and train_epochs, the one that is not 0."""
    iterations, epochs = config.get("train_iters"), config.get("train_epochs")
    if iterations is not None and epochs:
        end = "stops with a ValueError" if iterations else "trains nothing"
        raise InvalidArgument(f"train_iters and train_epochs: GPT-NeoX {end}; remove one of them")
    if epochs == 0 and iterations:
        epochs = None
    return {
        **{key: _whole(config, key) for key in _NEVER_NULL},
        "train_iters": _whole(config, "train_iters"),
        "train_epochs": _whole({"train_epochs": epochs}, "train_epochs"),
    }


def _check_train_epochs(config: Mapping[str, Any]) -> None:
    """Check the rules of NeoX's validate_train_epochs, which hold for 0 epochs too."""
    if config.get("train_epochs") is None:
        return
    weights = config.get("train_data_weights")
    for key, refused in (
        ("pack_impl", config.get("pack_impl", "packed") != "packed"),
        ("dataset_impl", config.get("dataset_impl", "gpt2") != "gpt2"),
        ("weight_by_num_documents", bool(config.get("weight_by_num_documents"))),
        ("train_data_weights", isinstance(weights, list) and any(w != 1.0 for w in weights)),
    ):
        if refused:
            raise InvalidArgument(
                f"train_epochs with {key}: {shown(config[key])} is refused by NeoX; give "
                "train_iters in place of train_epochs"
            )


def _data(config: Mapping[str, Any]) -> dict[str, Any]:
    _check_dataset_impl(config)
    paths: dict[str, list[Any]] = {split: _list(config, f"{split}_data_paths") for split in SPLITS}
    single = config.get("data_path")
    missing = [split for split, given in paths.items() if not given]
    if all(config.get(f"{split}_data_paths") is None for split in SPLITS):
        return {} if single is None else _divided(config, single)
    if single is not None:
        raise InvalidArgument(
            "data_path and train_data_paths exclude each other in NeoX; remove one of them"
        )
    if missing:
        raise InvalidArgument(
            "NeoX takes data paths of train, valid and test, or of none of them; give "
            + " and ".join(f"{split}_data_paths" for split in missing)
        )
    found: dict[str, Any] = {
        f"{split}_data_path": _blend(config, split, given) for split, given in paths.items()
    }
    if config.get("weight_by_num_documents"):
        found["documents_alpha"] = _number(config, "weighted_sampler_alpha", 1.0)
    found["labels"] = _labels(config, paths)
    return found


def _check_dataset_impl(config: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for data other than texts."""
    kind = config.get("dataset_impl", "gpt2")
    if kind != "gpt2":
        pairs = "pairs of texts are left to GPT-NeoX" if kind == "pairwise" else (
            "it reads its samples from a server"
        )  # fmt: skip
        raise InvalidArgument(
            f"dataset_impl: {shown(kind)} is not planned: {pairs}; 'gpt2' is planned"
        )
    for split in SPLITS:
        if config.get(key := f"pos_{split}_data_paths"):
            raise InvalidArgument(
                f"{key} is a key of dataset_impl 'pairwise', not 'gpt2'; use {split}_data_paths"
            )


def _divided(config: Mapping[str, Any], single: Any) -> dict[str, Any]:
    if not isinstance(single, str):
        raise InvalidArgument(
            f"data_path must be one path, got {shown(single)}; use train_data_paths"
        )
    split = config.get("split", DEFAULT_SPLIT)
    if not isinstance(split, str) and _scalar("split", split):
        raise InvalidArgument(f"split must be text, got {shown(split)}; put it into quotes")
    parse_split(split, "neox")
    return {"data_path": (single,), "split": split.replace(" ", "")}


def _blend(config: Mapping[str, Any], split: str, paths: Sequence[Any]) -> tuple[str, ...]:
    """Return ``weight path weight path …`` of a split; NeoX's default weights are equal."""
    key = f"{split}_data_weights"
    weights = [1.0] * len(paths) if config.get(key) is None else _list(config, key)
    for weight in weights:
        if not isinstance(weight, (int, float)):
            raise InvalidArgument(
                f"{key} must hold numbers, got {shown(weight)}, at which GPT-NeoX stops with a "
                "TypeError; write it without quotes"
            )
    if len(weights) != len(paths):
        raise InvalidArgument(
            f"{split}_data_weights has {len(weights)} entries for {len(paths)} {split}_data_paths; "
            "give one weight for each path"
        )
    pairs = zip(map(float, weights), paths, strict=True)
    return tuple(_scalar(f"{split}_data_paths", word) for pair in pairs for word in pair)


def _labels(
    config: Mapping[str, Any], paths: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[str, ...]] | None:
    """Return the labels of each path of a split, empty if not given."""
    if config.get("pack_impl", "packed") == "packed":
        return None  # they are read at the positions of the text
    found = {}
    for split, given in paths.items():
        key = f"{split}_label_data_paths"
        labels = ["" if path is None else _scalar(key, path) for path in _list(config, key)]
        found[split] = (*labels[: len(given)], *[""] * (len(given) - len(labels)))
    return found


def _packing(config: Mapping[str, Any]) -> NeoxDocumentsOrder | None:
    kind = config.get("pack_impl", "packed")
    if kind not in ("packed", "unpacked", "pack_until_overflow"):
        raise InvalidArgument(
            f"pack_impl: {shown(kind)} is not planned; NeoX has packed, unpacked and "
            "pack_until_overflow"
        )
    if kind == "packed":
        return None
    return NeoxDocumentsOrder(pack_impl=kind, allow_chopped=bool(config.get("allow_chopped", True)))


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    unknown = [key for key in config if key not in NAMES]
    if unknown:
        yield f"{_VERSION} has no argument {', '.join(unknown)} and refuses the file: remove it"
    has_data = any(key.endswith(("data_path", "data_paths")) for key in config)
    if has_data and config.get("data_impl", "infer") == "infer":
        yield (
            f"data_impl infer, the default: {_VERSION} opens no file with it, and ends with an "
            "AttributeError unless megaindex.adapters.neox.install() is called; write data_impl: "
            "mmap"
        )
    for key, effect in _UNPLANNED.items():
        value = config.get(key)
        if value and (not isinstance(value, Mapping) or value.get("enabled", True)):
            yield f"{key} {effect}"
    stop, iterations = config.get("exit_interval"), config.get("train_iters")
    if isinstance(stop, int) and stop and (not isinstance(iterations, int) or stop < iterations):
        yield f"exit_interval {stop}: NeoX stops there; the plan is for all iterations"


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, (list, dict)):
        raise InvalidArgument(f"{key} must hold plain values, got {shown(value)}")
    return str(value)


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgument(f"{key} must be a list, got {shown(value)}; put it into [ ]")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    return check_number(key, str(value) if isinstance(value, bool) else value)


def _whole(config: Mapping[str, Any], key: str, setting: str = "") -> int | None:
    value = config.get(key)
    if value is None and key in _NEVER_NULL and key in config:
        raise InvalidArgument(
            f"{key}: null stops GPT-NeoX with a TypeError; give a number, or remove the key"
        )
    if value is None or value == "auto":
        return None
    return check_setting(setting or key, check_integer(key, value, flags=False), key)
