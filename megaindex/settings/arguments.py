"""Settings of a run by the names of arguments, with those of a framework's files."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import RunSettings
from megaindex.settings.settings import NAMES, Settings, flag_of, merged, settings_by_name
from megaindex.validation import check_kind

_FILES = ("neox_config", "megatron_args", "script_args", "maxtext_config")
_A_RECIPE = (
    "{} describes the whole run; plan it with megaindex.make_plan(recipe), as "
    "megaindex.recipe.read_recipe returns one"
)
_IN_PYTHON = {"seq_length": "sequence_length"}
ARGUMENTS = (*(_IN_PYTHON.get(name, name) for name in NAMES), *_FILES)
"""Names of the settings of a run in Python: those of the flags, and ``sequence_length``."""


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a framework's files, replaced by those given by name.

    Args:
        given: values by the names of the flags of ``megaindex plan``: ``neox_config``,
            ``maxtext_config``, or ``megatron_args`` and ``script_args``, and any of `NAMES`. None
            is not given.
    """
    over, base = settings_by_name(given), Settings()
    neox, megatron, words, maxtext = (given.get(name) for name in _FILES)
    described = [name for name in ("neox_config", "megatron_args", "maxtext_config")
                 if given.get(name)]  # fmt: skip
    if len(described) > 1:
        one, other = (flag_of(name) for name in described[:2])
        raise InvalidArgument(f"{one} and {other} exclude each other; give one")
    if words and not megatron:
        raise InvalidArgument("--script-args needs --megatron-args; give the script as well")
    if neox:
        from megaindex.settings.neox_yaml import read_neox

        base = read_neox(neox)
    elif megatron:
        from megaindex.settings.megatron_args import read_megatron

        words = [words] if isinstance(words, str) else [str(word) for word in words or ()]
        if len(words) == 1:  # one quoted text
            words = shlex.split(words[0])
        if not isinstance(megatron, (str, os.PathLike)):  # a list of arguments
            megatron = shlex.join(map(str, megatron))
        base = read_megatron(os.fspath(megatron), script_args=words, over=over)
    elif maxtext:
        from megaindex.settings.maxtext_yaml import read_maxtext

        found = read_maxtext(
            [maxtext] if isinstance(maxtext, str) else list(maxtext), over.world_size
        )
        if found is None:
            raise InvalidArgument(_A_RECIPE.format("maxtext_config"))
        base = found
    return replace(merged(base, over), of_framework=bool(described))


@contextmanager
def given_run(run: RunSettings | None, settings: Mapping[str, Any]) -> Iterator[RunSettings]:
    """Yield a run, or that of settings by name, which errors in the block are named by too."""
    if run is not None:
        check_kind("run", run, RunSettings, "RunSettings", "name settings, as data_path=…")
        if settings:
            raise InvalidArgument(
                f"RunSettings hold all settings, also {next(iter(settings))}; change it with "
                "dataclasses.replace, or give settings alone"
            )
    # messages on the settings of Megatron-LM name its flags
    reads_files = settings.get("neox_config") or settings.get("megatron_args")
    named = named_as_in_files(settings) if reads_files else _named_as_arguments()
    with nullcontext() if run is not None else named:
        yield run_by_name(settings) if run is None else run


def run_by_name(given: Mapping[str, Any]) -> RunSettings:
    """Return the run of settings given as arguments, named like the flags of the command."""
    for name in given:
        if name in ("recipe", "nanotron_config", "llm_foundry_config"):
            raise InvalidArgument(_A_RECIPE.format(name))
        if name not in ARGUMENTS and name not in _IN_PYTHON:
            near = difflib.get_close_matches(name, ARGUMENTS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(ARGUMENTS)}"
            raise InvalidArgument(f"unknown setting {name}{hint}")
    flags = dict(given)
    for flag, name in _IN_PYTHON.items():
        if name in flags:
            if flag in flags:
                raise InvalidArgument(f"{name} and {flag} are the same setting; give one of them")
            flags[flag] = flags.pop(name)
    return resolve(read_settings(flags))


_NEOX_KEYS = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "world_size": "global_num_gpus",
    "tensor_model_parallel_size": "model_parallel_size",
    "pipeline_model_parallel_size": "pipe_parallel_size",
    **{f"{split}_data_path": f"{split}_data_paths" for split in ("train", "valid", "test")},
    **{key: key for key in ("seq_length", "gradient_accumulation_steps", "data_path", "split",
                            "train_iters", "seed", "eval_interval", "eval_iters")},
}  # fmt: skip
"""Keys of GPT-NeoX by the names of the flags."""


def in_keys_of_files(message: str, given: Mapping[str, Any]) -> str:
    """Return a message with the keys of a GPT-NeoX file in place of flags that are not given."""
    if not given.get("neox_config"):
        return message

    def key(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return _NEOX_KEYS.get(name, flag[0]) if given.get(name) is None else flag[0]

    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", key, message)


@contextmanager
def named_as_in_files(given: Mapping[str, Any]) -> Iterator[None]:
    """Change the message of an InvalidArgument by `in_keys_of_files`."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(in_keys_of_files(error.args[0], given)) from None


@contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Replace the flags in the message of an InvalidArgument by the names of arguments."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(re.sub(r"--([a-z]+(?:-[a-z]+)*)", _argument, error.args[0])) from None


def _argument(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    name = _IN_PYTHON.get(name, name)
    return name if name in ARGUMENTS else flag[0]
