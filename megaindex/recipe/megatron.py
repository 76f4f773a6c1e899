"""Megatron-LM command lines and launch scripts as settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.index.dialect import DEFAULT_SPLIT
from megaindex.io.json_files import parse_object
from megaindex.recipe.adapter_line import settings_in_comments
from megaindex.recipe.data import parse_blend
from megaindex.recipe.settings import Settings
from megaindex.recipe.shell import Script

_WHOLE = {
    "--seq-length": "seq_length",
    "--micro-batch-size": "micro_batch_size",
    "--global-batch-size": "global_batch_size",
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--train-iters": "train_iters",
    "--eval-interval": "eval_interval",
    "--eval-iters": "eval_iters",
    "--eval-global-batch-size": "eval_global_batch_size",
    "--seed": "seed",
    "--train-data-exact-num-epochs": "train_data_exact_num_epochs",
}
_TEXT = {
    "--split": "split",
    "--train-samples": "train_samples",
    "--step-batch-size-schedule": "batch_schedule",
}
_PATHS = {
    "--data-path": "data_path",
    "--train-data-path": "train_data_path",
    "--valid-data-path": "valid_data_path",
    "--test-data-path": "test_data_path",
}
_NUMBERS = {
    "--rampup-batch-size": "rampup_batch_size",
    "--phase-transition-iterations": "phase_transition_iterations",
}
_OTHERS = ("--data-args-path", "--per-split-data-args-path", "--mid-level-dataset-surplus")
_NODES = ("--nnodes",)
_GPUS = ("--nproc_per_node", "--nproc-per-node")
_KNOWN = {*_WHOLE, *_TEXT, *_PATHS, *_NUMBERS, *_OTHERS, *_NODES, *_GPUS}


def read_megatron(source: str, environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of a Megatron command line, or of the script at that path.

    Args:
        source: arguments as one string, or the path of a shell script.
        environment: variables to expand besides those the script sets; default: this process's.

    Raises:
        MissingFile, StorageError: the script, or a file it names, cannot be read.
        InvalidArgument: an argument has the wrong form, or holds an undefined variable.
    """
    held = os.environ if environment is None else environment
    text = _text(source)
    script = Script(text, held)
    flags = _flags(script.commands)
    if not flags:
        raise InvalidArgument(
            f"--megatron-args: no Megatron argument in {source[:80]!r}; give the arguments as one "
            "string, or the path of a script"
        )
    said = settings_in_comments(text, "megatron", "--megatron-args")
    return replace(_settings(flags, script), **said)


def _text(source: str) -> str:
    """The script, where ``source`` is a path; a command line has arguments in it."""
    if "--" in source or "\n" in source:
        return source
    try:
        with open(source, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise MissingFile(f"--megatron-args: {source} does not exist; check the path") from None
    except (OSError, ValueError) as error:  # no text, or no path at all
        raise StorageError(f"--megatron-args: {source} cannot be read: {error}") from None


def _flags(commands: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Values of every known argument; the last one counts, as for argparse."""
    flags: dict[str, list[str]] = {}
    for words in commands:
        current: list[str] = []
        for word in words:
            name, equals, value = word.partition("=")
            if not word.startswith("--"):
                current.append(word)
                continue
            current = [value] if equals else []
            if name in _KNOWN:
                flags[name] = current
    return flags


def _settings(flags: Mapping[str, list[str]], script: Script) -> Settings:
    found: dict[str, Any] = {"order": "megatron"}
    for flag, name in _WHOLE.items():
        if flag in flags:
            found[name] = _whole(flag, flags[flag])
    for flag, name in _TEXT.items():
        if flag in flags:
            found[name] = " ".join(_defined(flag, flags[flag]))
    for flag, name in _NUMBERS.items():
        if flag in flags:
            found[name] = tuple(_whole(flag, [word]) for word in flags[flag])
    for flag, name in _PATHS.items():
        if flag in flags:
            found[name] = tuple(_defined(flag, flags[flag]))
    found.update(_exact_epochs(found))
    found.update(_from_files(flags))
    found["world_size"] = _world_size(flags, script)
    if "data_path" in found:
        found.setdefault("split", DEFAULT_SPLIT)
    if words := found.get("data_path") or found.get("train_data_path"):
        found["variance_buffer"] = _buffer(flags, words)
    return Settings(**found)


def _exact_epochs(found: Mapping[str, Any]) -> dict[str, Any]:
    """Only Megatron-DeepSpeed has the argument; its default, -1, asks for nothing."""
    if "train_data_exact_num_epochs" not in found:
        return {}
    if found["train_data_exact_num_epochs"] < 0:
        return {"order": "megatron-legacy", "train_data_exact_num_epochs": None}
    return {"order": "megatron-legacy"}


def _from_files(flags: Mapping[str, list[str]]) -> dict[str, Any]:
    """Blends kept in files: words, or JSON with a list for each split."""
    if "--data-args-path" in flags:
        return {"data_path": tuple(_read("--data-args-path", flags).split())}
    if "--per-split-data-args-path" not in flags:
        return {}
    flag = "--per-split-data-args-path"
    try:
        content = parse_object(_read(flag, flags))
        blends = {
            f"{split}_data_path": tuple(str(word) for word in content[split])
            for split in ("train", "valid", "test")
            if content.get(split)
        }
    except (ValueError, AttributeError, TypeError):
        raise InvalidArgument(
            f"{flag}: {flags[flag]} is not JSON with lists train, valid and test"
        ) from None
    return blends


def _read(flag: str, flags: Mapping[str, list[str]]) -> str:
    path = " ".join(_defined(flag, flags[flag]))
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:  # no text, or no path at all
        raise StorageError(f"{flag}: {path} cannot be read: {error}") from None


def _buffer(flags: Mapping[str, list[str]], words: Sequence[str]) -> str | None:
    """``1 + mid_level_dataset_surplus``, which Megatron applies to weighted blends alone."""
    flag = "--mid-level-dataset-surplus"
    weighted = parse_blend(words, None, "--data-path")[0].weight is not None
    if flag not in flags or not weighted:
        return None
    try:
        return repr(1 + float(" ".join(flags[flag])))
    except ValueError:
        raise InvalidArgument(f"{flag} must be a number, got {' '.join(flags[flag])!r}") from None


def _world_size(flags: Mapping[str, list[str]], script: Script) -> int | None:
    """Nodes x processes of the launcher, else a variable WORLD_SIZE of the script."""
    nodes, gpus = (
        next((flags[flag] for flag in names if flag in flags), None) for names in (_NODES, _GPUS)
    )
    count, each = _count(nodes or ["1"]), _count(gpus or [])
    if count is not None and each is not None:
        return count * each
    held = script.variables.get("WORLD_SIZE")
    return _count([held]) if isinstance(held, str) else None


def _count(words: Sequence[str]) -> int | None:
    """The number of nodes or GPUs that the first word says; None for `auto` and the like."""
    return int(words[0]) if words and words[0].isdecimal() and len(words[0]) < 10 else None


def _defined(flag: str, words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if "$" in word or "`" in word:
            raise InvalidArgument(
                f"{flag} holds {word}, which is not defined here; export it, or pass {flag}"
            )
    if not words:
        raise InvalidArgument(f"{flag} has no value; give one, or remove it")
    return words


def _whole(flag: str, words: Sequence[str]) -> int:
    text = " ".join(_defined(flag, words))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{flag} must be a whole number, got {text!r}") from None
