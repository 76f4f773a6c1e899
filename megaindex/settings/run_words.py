"""What users name a run by, told apart by its content.

A run is given as a lock, a recipe, the configuration of a framework, a launch script, or as pairs
with or without weights. The kind of a file follows from what it holds, never from its name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaindex.errors import InvalidArgument, MissingFile, StorageError, visible
from megaindex.io.atomic import read_named
from megaindex.io.paths import check_file, is_remote
from megaindex.objects.files import stat_path
from megaindex.settings.capture import is_capture
from megaindex.settings.settings import argument_names, flag_of
from megaindex.settings.yaml_sections import parse_yaml
from megaindex.validation import check_choice, read_number, shown


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """A kind of description of a run."""

    setting: str
    """Name of the setting that takes it, which is that of its flag with underscores."""
    noun: str
    keys: tuple[frozenset[str], ...] = ()
    """Sets of keys; a YAML file that has all keys of one of them is of this kind."""


def _each(*keys: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset({key}) for key in keys)


KINDS: dict[str, RunKind] = {
    "lock": RunKind(setting="lock", noun="a lock"),
    "recipe": RunKind(
        setting="recipe", noun="a recipe", keys=(frozenset({"sources", "stages"}),)
    ),
    "nanotron": RunKind(
        setting="nanotron_config", noun="a Nanotron configuration", keys=_each("data_stages")
    ),
    "llm-foundry": RunKind(
        setting="llm_foundry_config",
        noun="an LLM-Foundry configuration",
        keys=_each("train_loader"),
    ),
    "maxtext": RunKind(
        setting="maxtext_config",
        noun="a MaxText configuration",
        keys=_each(
            "base_config", "per_device_batch_size", "max_target_length", "dataset_type",
            "grain_train_files", "grain_train_mixture_config_path",
        ),
    ),
    "neox": RunKind(
        setting="neox_config",
        noun="a GPT-NeoX configuration",
        keys=_each(
            "seq_length", "train_micro_batch_size_per_gpu", "train_batch_size", "data_path",
            "train_data_paths", "train_iters", "train_epochs", "model_parallel_size",
            "pipe_parallel_size", "data_impl", "pack_impl", "global_num_gpus",
        ),
    ),
    "script": RunKind(setting="megatron_args", noun="a launch script of Megatron-LM"),
    "pairs": RunKind(setting="data_path", noun="pairs"),
}  # fmt: skip
"""Kinds in the order in which they are sought."""
_SEVERAL = ("maxtext", "neox")
"""Kinds of which several files make one configuration."""
_LOCK = b'"format": "megaindex run lock"'
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9_-]+")
_SHELL = re.compile(r"#!.*\b(ba|da|z|k)?sh\b")
_WORD = re.compile(r"\w+=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class NamedRun:
    """A run as users name it."""

    kind: str
    """A key of `KINDS`."""
    words: tuple[str, ...]
    is_told: bool = False
    """True if the kind was given, and does not follow from the content."""
    settings: Mapping[str, Any]
    """Settings that say the same, such as ``{"recipe": "run.yaml"}``."""

    def __str__(self) -> str:
        """Return the line that says what the words were taken for."""
        noun = KINDS[self.kind].noun
        if self.is_told:
            return f"{visible(self.words[0])} is taken for {noun}"
        if self.kind == "pairs":
            count = len(self.settings["data_path"])
            return "a pair" if count == 1 else f"{count} pairs"
        return f"{visible(self.words[0])} is {noun}"


def named_run(words: Sequence[str | os.PathLike[str]], kind: str | None = None) -> NamedRun:
    """Return the run that words name.

    Args:
        words: one or several paths, and weights before prefixes.
        kind: a key of `KINDS`, in place of what the content says.

    Raises:
        InvalidArgument: the words are of no kind, of several, or do not belong together.
        MissingFile, StorageError: a file does not exist, or is not a regular file.
    """
    texts, is_told = tuple(os.fspath(word) for word in words), kind is not None
    kind = _kind_of_words(texts) if kind is None else check_choice("--as", kind, tuple(KINDS))
    settings = _pairs(texts) if kind == "pairs" else _file_setting(kind, texts)
    return NamedRun(kind=kind, words=texts, settings=settings, is_told=is_told)


def _kind_of_words(words: Sequence[str]) -> str:
    files = [word for word in words if _is_file(word)]
    if not files:
        return "pairs"
    kind = _kind_of_files(files)
    others = [word for word in words if word not in files]
    if others and not (kind == "maxtext" and all(map(_WORD.fullmatch, others))):
        remedy = "give one of them"
        if kind == "script":
            remedy = f"give the words of the script by --script-args {others[0]}"
        raise InvalidArgument(
            f"{files[0]} is {KINDS[kind].noun}, which describes the whole run, also "
            f"{shown(others[0])}; {remedy}"
        )
    return kind


def _kind_of_files(files: Sequence[str]) -> str:
    """Return the kind of files that make one run; some of a configuration may have rare keys."""
    fits = {file: kinds_of_file(file) for file in files}
    known = [file for file in files if len(fits[file]) != 0]
    if len(known) < len(files) and not (known and fits[known[0]][0] in _SEVERAL):
        known = list(files)
    kinds = {kind_of_file(file): file for file in reversed(known)}
    if len(kinds) > 1:
        texts = (f"{kinds[kind]} is {KINDS[kind].noun}" for kind in KINDS if kind in kinds)
        raise InvalidArgument(f"a run is one of these: {', '.join(texts)}; give one of them")
    return next(iter(kinds))


def _file_setting(kind: str, words: Sequence[str]) -> dict[str, Any]:
    given = KINDS[kind]
    if len(words) > 1 and kind not in _SEVERAL:
        raise InvalidArgument(
            f"a run has one {given.noun.partition(' ')[2]}, got {len(words)}: {', '.join(words)}; "
            "give one of them"
        )
    return {given.setting: list(words) if kind in _SEVERAL else words[0]}


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """Return paths and weights; a number is a weight if no pair has its name."""
    weights, paths = [], []
    before: str | None = None
    for word in words:
        prefix = _prefix(word)
        if isinstance(read_number(word), float) and not _is_pair(word):
            if before is not None:
                raise InvalidArgument(f"{before} {word}: two weights in a row; give a pair between")
            before = word
            continue
        paths.append(prefix)
        weights.append(before)
        before = None
    if before is not None:
        raise InvalidArgument(f"{before}: a weight stands before its pair, and none follows")
    if any(weights) and not all(weights):
        bare = paths[weights.index(None)]
        raise InvalidArgument(
            f"{bare}: has no weight, other pairs have; write a weight before every pair, or none"
        )
    if len(paths) == 1 and not is_remote(paths[0]) and not _is_pair(paths[0]):
        raise MissingFile(
            f"{paths[0]}: is no file, and {paths[0]}.idx and .bin do not exist; check the path"
        )
    return {"data_path": paths, **({"weights": weights} if any(weights) else {})}


def _prefix(word: str) -> str:
    """Return the prefix of a pair's name; of one that is a number with a folder, so that it reads
    as no weight."""
    prefix = word[:-4] if word.endswith((".idx", ".bin")) else word
    return f"./{prefix}" if isinstance(read_number(prefix), float) else prefix


def _is_pair(prefix: str) -> bool:
    try:
        return stat_path(f"{prefix}.idx") is not None or stat_path(f"{prefix}.bin") is not None
    except StorageError:  # no such name is possible
        return False


def _is_file(word: str) -> bool:
    """Return True for a file that is read to see what it is.

    Raises:
        InvalidArgument: a pair has the same name, or it is a folder.
        StorageError: it is not a regular file.
    """
    if is_remote(word) or word.endswith((".idx", ".bin")) or not os.path.lexists(word):
        return False
    is_pair = _is_pair(word)
    if os.path.isdir(word):
        if not is_pair:
            raise InvalidArgument(f"{word}: is a folder; give the prefix of a pair, or a file")
        return False
    if is_pair:
        raise InvalidArgument(
            f"{word}: is a file, and {word}.idx a pair; give --as pairs, or --as with the kind of "
            "the file"
        )
    check_file(word, "cannot read")
    return True


def misplaced(error: str, given: Mapping[str, Any]) -> str:
    """Return what the files that an error names are, if another setting takes them; or nothing.

    Args:
        error: message of a failure.
        given: options by name, as they were read.
    """
    for name, value in given.items():
        if name in ("run", "out", "amend", "paths"):  # which take any, or none of them
            continue
        for word in value if isinstance(value, list) else [value]:
            if not isinstance(word, str) or word not in error or not os.path.isfile(word):
                continue
            with contextlib.suppress(InvalidArgument, StorageError, MissingFile):
                kinds = [kind for kind in kinds_of_file(word) if KINDS[kind].setting != name]
                known = KINDS[kinds[0] if kinds else "pairs"]
                if len(kinds) == 1 and f"is {known.noun}" not in error:
                    takes = f", which {flag_of(known.setting)} takes" * (known.setting in given)
                    return f"; {visible(word)} is {known.noun}{takes}"
    return ""


def kind_of_file(path: str) -> str:
    """Return the kind of a run's file by its content, a key of `KINDS`.

    Raises:
        InvalidArgument: it is of no kind, or of several.
        StorageError, MissingFile: it cannot be read.
    """
    found, no_yaml = _fits(path)
    if len(found) == 1:
        return found[0]
    if not found:
        why = f"; as YAML: {no_yaml.partition(': ')[2]}" if no_yaml else ""
        raise InvalidArgument(
            f"{path}: is no lock, no recipe (sources and stages), no configuration of a framework "
            f"and no launch script; check it, or say what it is by --as{why}"
        )
    nouns = " and ".join(KINDS[kind].noun for kind in found)
    raise InvalidArgument(f"{path}: may be {nouns}; say which by --as {found[0]}")


def kinds_of_file(path: str) -> list[str]:
    """Return the kinds that the content of a file fits.

    Raises:
        InvalidArgument: it is empty.
        StorageError, MissingFile: it cannot be read.
    """
    return _fits(path)[0]


def _fits(path: str) -> tuple[list[str], str]:
    """Return the kinds that a file fits, and the reason for which it is not YAML, if it is not."""
    raw = read_named(path)
    if is_lock(raw):
        return ["lock"], ""
    text = raw.decode(errors="replace")
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise InvalidArgument(f"{path}: is empty; give a file that describes a run")
    content, no_yaml = None, ""
    try:
        content = parse_yaml(raw, path, "", last_wins=True)
    except InvalidArgument as error:  # as of most scripts
        no_yaml = str(error)
    if isinstance(content, Mapping):
        keys = {str(key).replace("-", "_") for key in content}
        kinds = [kind for kind, each in KINDS.items() if any(need <= keys for need in each.keys)]
        if kinds:
            return kinds, ""
    return ["script"] if _is_script(text) else [], no_yaml


def is_lock(raw: bytes) -> bool:
    """Return True for the bytes of a lock, without parsing them."""
    return _LOCK in raw[:200]


def _is_script(text: str) -> bool:
    known = argument_names("megatron") - {"help"}
    return (
        is_capture(text)
        or bool(_SHELL.match(text))
        or any(flag[2:] in known for flag in _FLAG.findall(text))
    )
