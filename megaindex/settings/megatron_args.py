"""Megatron-LM command lines and launch scripts as settings."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import DEFAULT_SPLIT, SPLITS
from megaindex.io.atomic import parse_object
from megaindex.io.paths import is_remote
from megaindex.settings.batch_schedule import parse_count
from megaindex.settings.capture import CAPTURE, is_capture, read_capture
from megaindex.settings.megatron_versions import IGNORED, NOTES, PROGRAMS, REFUSED, version_of
from megaindex.settings.settings import (
    Settings,
    argument_names,
    merged,
    replaced_by,
    settings_in_comments,
)
from megaindex.settings.shell import Script, Unknown, is_several, is_unknown
from megaindex.settings.yaml_sections import read_text
from megaindex.validation import check_integer, read_number, shown

Flags = Mapping[str, list[str]]


class OpenWord(str):
    """A word as the script has it, which is not known because of `unknown`."""

    unknown: Unknown

    def __new__(cls, text: str, unknown: Unknown) -> OpenWord:
        word = super().__new__(cls, text)
        word.unknown = unknown
        return word


def _named(*flags: str) -> dict[str, str]:
    """Return the settings of flags, most of which have the name of their flag."""
    others = {
        "--encoder-seq-length": "seq_length",
        "--step-batch-size-schedule": "batch_schedule",
        "--ds-sequence-parallel-size": "context_parallel_size",
    }
    return {flag: others.get(flag, flag[2:].replace("-", "_")) for flag in flags}


_WHOLE = _named(
    "--seq-length", "--encoder-seq-length", "--micro-batch-size", "--global-batch-size",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--train-iters", "--eval-interval", "--eval-iters", "--eval-global-batch-size",
    "--eval-micro-batch-size", "--start-eval-at-iter", "--seed", "--train-data-exact-num-epochs",
    "--ds-sequence-parallel-size",
)  # fmt: skip
_TEXT = _named(
    "--split", "--train-samples", "--step-batch-size-schedule", "--dataloader-type",
    "--mid-level-dataset-surplus",
)  # fmt: skip
_PATHS = _named("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_LISTS = _named("--rampup-batch-size", "--iterations-to-skip")
_SWITCHES = _named("--skip-train", "--full-validation", "--multiple-validation-sets")
_BLEND_FILE, _SPLIT_FILE = "--data-args-path", "--per-split-data-args-path"
_PHASES = "--phase-transition-iterations"
_DEEPSPEED = frozenset((  # arguments of Megatron-DeepSpeed, which Megatron-LM never had
    "--deepspeed", "--deepspeed_config", "--deepspeed-config", "--zero-stage",
    "--ds-sequence-parallel-size", "--train-data-exact-num-epochs",
))  # fmt: skip
_NODES = ("--nnodes",)
_GPUS = ("--nproc_per_node", "--nproc-per-node")
_HONOURED = {*_WHOLE, *_TEXT, *_PATHS, *_LISTS, *_SWITCHES, _BLEND_FILE, _SPLIT_FILE, _PHASES}
_NEEDED = {  # by other arguments, without which Megatron-LM stops with an AssertionError
    "--dataloader-fast-cache-load": "--data-cache-path",
    "--dataloader-defer-npy-index-mmap": "--data-cache-path",
    "--hybrid-context-parallel": "--calculate-per-token-loss",
}
_ONE_VALUE = frozenset(
    f"--{name}{sign}{rest}"
    for name, rest in (("master", "addr"), ("master", "port"), ("node", "rank"), ("rdzv", "id"),
                       ("rdzv", "endpoint"), ("log", "dir"))
    for sign in "_-"
) | {"--save", "--load", "--tensorboard-dir", "--data-cache-path", "--wandb-save-dir",
     "--wandb-exp-name", "--wandb-project", "--tokenizer-model", "--vocab-file", "--merge-file",
     "--job-name", "--output", "--error", "--moe-layer-freq"}  # fmt: skip
"""Arguments of one value that changes no plan, which scripts often compute."""
_RUNS_MODULES = re.compile(r"(i?python|pypy)[\d.]*t?|torchrun|accelerate|uv")
_RUNNERS = ("torch.distributed", "megaindex.adapters.")  # modules that run a program
_ABSOLUTE = re.compile(r"`pwd`|\$\(\s*(cd [^;&|#\\]*;\s*)*pwd\s*\)")  # prints a path from the root
_CLOSE = 0.85  # similarity of a misspelt argument


def read_megatron(
    source: str,
    environment: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    over: Settings | None = None,
) -> Settings:
    """Return the settings of a Megatron-LM command line or launch script.

    Arguments are those of megatron-core 0.16.1 and of main (2026-08). Those that do not concern
    the data are ignored; those that concern it and do not change the plan are in
    `Settings.ignored`.

    Args:
        source: arguments as one string, or the path of a shell script, which is not run.
        environment: variables besides those that the script sets; default: ``os.environ``.
        script_args: positional parameters of the script.
        over: settings that take precedence; arguments that they replace are not read.

    Raises:
        MissingFile, StorageError: the script, or a file it names, cannot be read.
        InvalidArgument: an argument has the wrong form or an undefined variable, Megatron-LM would
            refuse it, or the program does not read GPT data.
    """
    held = os.environ if environment is None else environment
    text, path = source, "bash"
    if is_remote(source) or ("--" not in source and "\n" not in source):
        text, path = read_text(source, "--megatron-args"), source
    if is_capture(text):
        words, variables, notes = read_capture(text, source)
    else:
        words, variables, notes = _evaluated(text, held, script_args, path, over or Settings())
    found = _ArgumentsReader(words, variables, over or Settings()).settings()
    if is_unknown(str(variables.get("PWD"))) and _is_relative(found):
        notes += ("the script changes its folder: the plan reads relative paths from this one",)
    found = replace(found, notes=(*notes, *found.notes))
    return merged(found, Settings(**settings_in_comments(text, "megatron", "--megatron-args")))


def _evaluated(
    text: str, environment: Mapping[str, str], arguments: Sequence[str], path: str, over: Settings
) -> tuple[list[str], Mapping[str, Any], tuple[str, ...]]:
    """Return the words of the command that trains, its variables, and what the script leaves open.

    Raises:
        InvalidArgument: the script has no such command or several, or a word that matters is
            unknown.
    """
    name = "--megatron-args" + (f" {shown(path)}" if path != "bash" else "")
    try:
        script = Script(text, environment, arguments, path)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}, {error}; {CAPTURE}") from None
    commands = [command for command in script.commands if trains(command.words)]
    if not commands:
        raise InvalidArgument(_nothing(script, path if path != "bash" else text))
    planned = [one for one in commands if not _refusal(_program(one.words)[0])] or commands[-1:]
    if any(one.words != planned[0].words for one in planned[1:]):
        raise InvalidArgument(
            f"{name} runs {len(planned)} commands with Megatron arguments; give those of one of "
            f"them as a string, or choose one with megaindex capture --command N"
        )
    command = planned[0]
    words, notes = _known_words(script, command.words, name, replaced_by(over))
    for where in command.assumed:
        notes += (f"the plan assumes that the script goes on at {where}, which is not evaluated",)
    return words, command.variables, notes


def _nothing(script: Script, source: str) -> str:
    if script.exits_at:
        return (
            f"--megatron-args: {source[:80]!r} exits at {script.exits_at}, before it trains: "
            "export the variables it needs, or give its parameters with --script-args"
        )
    named = [p for one in script.commands if (p := _program(one.words)[0])]
    starts = f"; it starts {script.written(named[-1])}" if named else ""
    return (
        f"--megatron-args: no Megatron argument in {source[:80]!r}{starts}; give the arguments as "
        f"one string, or the path of a script that trains, or {CAPTURE}"
    )


def trains(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in _HONOURED for word in words)


def _known_words(
    script: Script, words: Sequence[str], name: str, replaced: set[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return a command's words, those that do not matter as the script has them, with notes.

    Raises:
        InvalidArgument: a word could be others, or a number of processes is unknown.
    """
    found: list[str] = []
    notes: list[str] = []
    for place, word in enumerate(words):
        unknown = script.unknown_in(word)
        flag, equals, value = word.partition("=")
        if unknown is not None and equals and flag.startswith("--") and not is_unknown(flag):
            found.append(flag)
            word = value
        last = next((w for w in reversed(found) if w.startswith("--")), "")
        follows = bool(found) and found[-1] == last
        if unknown is None or unknown.undefined:
            found.append(word if unknown is None else OpenWord(script.written(word), unknown))
            continue
        several = is_several(word)
        counts = last in (*_NODES, *_GPUS)
        sized = counts and not replaced & {"world_size", "data_parallel_size"}
        single = (follows and (counts or last in _ONE_VALUE)) or not place
        if not sized and (last in _HONOURED or single or _is_one(script, word)):
            if several:
                notes.append(
                    f"{script.written(word)} of {last or 'the command'} ({unknown.line}) is not "
                    "evaluated; the plan assumes that it is one word"
                )
            found.append(OpenWord(script.written(word), unknown))
            continue
        raise InvalidArgument(
            f"{name}: {last} {script.written(word)} needs `{unknown.text}` of {unknown.line}, "
            f"which is not evaluated; {CAPTURE}"
        )
    return found, tuple(notes)


def _is_one(script: Script, word: str) -> bool:
    """Return True for a word that begins no option and is one word: quoted, or taken for a path,
    with a slash before its first unknown part or behind a ``pwd``."""
    if first := script.unknown_in(word[:1]):
        return word[1:2] == "/" and bool(_ABSOLUTE.fullmatch(first.text))
    known = next(place for place, char in enumerate(word) if is_unknown(char))
    return word[0] != "-" and ("/" in word[:known] or not is_several(word))


def _refusal(program: str) -> str:
    """Return the reason for not planning a program of Megatron-LM; empty for all others."""
    path = "/" + program.removesuffix(".py")
    return next((why for end, why in PROGRAMS.items() if path.endswith("/" + end)), "")


def _program(words: Sequence[str]) -> tuple[str, int]:
    """Return the path of the Python program or module that a command runs, and the number of words
    up to it; an empty path and 0 for arguments alone.

    ``-m`` names a module behind Python and launchers that take one, and behind a first word that is
    not known, such as ``$PYTHON``; srun and numactl, for example, have another ``-m``.
    """
    runs_modules = any(is_unknown(word) or isinstance(word, OpenWord) for word in words[:1])
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return word, place + 1
        if word == "-m" and runs_modules and place + 1 < len(words):
            module = words[place + 1]
            if not module.startswith(_RUNNERS):
                return module.replace(".", "/"), place + 2
        runs_modules = runs_modules or bool(_RUNS_MODULES.fullmatch(os.path.basename(word)))
    return "", 0


class _ArgumentsReader:
    """Reader of the arguments of one training command."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, Any], over: Settings) -> None:
        self._variables = variables
        self._over = over
        self._replaced = replaced_by(over)
        self._program, begin = _program(words)
        self._known = self._planned_program()
        self._launcher = _flags(words[:begin]) if begin else _flags(words)
        self._flags = _flags(words[begin:])
        self._is_deepspeed = not _DEEPSPEED.isdisjoint(self._flags)
        self._notes: list[str] = []
        self._ignored: list[str] = []

    def settings(self) -> Settings:
        self._sort()
        found: dict[str, Any] = {"order": "megatron"}
        readers: tuple[tuple[dict[str, str], Callable[[str, list[str]], Any]], ...] = (
            (_WHOLE, _whole),
            (_TEXT, _one),
            (_PATHS, _defined),
            (_LISTS, _numbers),
            (_SWITCHES, _switch),
        )
        for flags, read in readers:
            for flag, name in flags.items():
                if self._has(flag, name):
                    found[name] = read(flag, self._flags[flag])
        if self._has(_PHASES, "phase_transition_iterations"):
            phases = _one(_PHASES, self._flags[_PHASES]).split(",")
            found["phase_transition_iterations"] = tuple(sorted(_numbers(_PHASES, phases)))
        if self._is_deepspeed:
            found["order"] = "megatron-legacy"
            if "--train-data-path" in self._flags and found.pop("split", None):
                self._ignored.append("--split")
        if found.get("train_data_exact_num_epochs", 0) < 0:  # its default
            found["train_data_exact_num_epochs"] = None
        found.update(self._blend_files())
        if not self._replaced.intersection(("world_size", "data_parallel_size")):
            found["world_size"] = _world_size(self._launcher, self._variables)
        if "--data-path" in self._flags:
            found.setdefault("split", DEFAULT_SPLIT)
        self._check(found)
        return Settings(**found, notes=tuple(self._notes), ignored=tuple(self._ignored))

    def _has(self, flag: str, name: str) -> bool:
        return flag in self._flags and name not in self._replaced

    def _planned_program(self) -> bool:
        """Return True for Megatron's programs that read GPT data; refuse its other programs."""
        if reason := _refusal(self._program):
            raise InvalidArgument(f"--megatron-args: {self._program} is not planned: {reason}")
        name = self._program.rsplit("/", 1)[-1].removesuffix(".py")
        return name in PROGRAMS or not name

    def _sort(self) -> None:
        """Refuse or list the arguments that are not planned."""
        if not self._known:
            self._notes.append(
                f"{self._program} is not a program of Megatron-LM: the plan assumes that it builds "
                "its data as pretrain_gpt.py does"
            )
        for flag in self._flags:
            if flag in _HONOURED:
                continue
            reason = REFUSED.get(flag)
            if reason is not None:
                text, settings = reason
                if not self._replaced.intersection(settings):
                    raise InvalidArgument(f"{flag} is not planned: {text}")
            if reason is not None or flag in IGNORED:
                self._ignored.append(flag)
                if flag in NOTES:
                    self._notes.append(f"{flag} {NOTES[flag]}")
            elif flag[2:] not in argument_names("megatron"):
                self._unknown(flag)

    def _unknown(self, flag: str) -> None:
        near = difflib.get_close_matches(flag[2:], argument_names("megatron"), 1, _CLOSE)
        hint = f"; did you mean --{near[0]}?" if near else ""
        if self._known and near and "--" + near[0] in _HONOURED:
            raise InvalidArgument(f"{flag} is not an argument of Megatron-LM{hint}")
        self._ignored.append(flag)
        if self._known and not self._is_deepspeed:
            self._notes.append(
                f"{flag} is not an argument of Megatron-LM 0.16.1 or main, which would refuse it"
                f"{hint or '; the plan ignores it'}"
            )

    def _blend_files(self) -> dict[str, Any]:
        """Return the blends of files: words, or JSON with a list or text for each split."""
        if "data_path" in self._replaced:
            return {}
        if _BLEND_FILE in self._flags:
            return {"data_path": tuple(self._read(_BLEND_FILE).split())}
        if _SPLIT_FILE not in self._flags:
            return {}
        try:
            content = parse_object(self._read(_SPLIT_FILE))
            given = {split: content[split] for split in SPLITS if content[split]}
            return {
                f"{split}_data_path": tuple(
                    words.split() if isinstance(words, str) else map(str, words)
                )
                for split, words in given.items()
            }
        except (ValueError, AttributeError, TypeError, KeyError):
            raise InvalidArgument(
                f"{_SPLIT_FILE}: {self._flags[_SPLIT_FILE]} is not JSON with lists train, valid "
                "and test"
            ) from None

    def _read(self, flag: str) -> str:
        return read_text(_one(flag, self._flags[flag]), flag)

    def _check(self, found: dict[str, Any]) -> None:
        """Refuse settings that Megatron-LM refuses, except where `over` replaces them."""
        given = self._flags.keys()
        if "data_path" not in self._replaced:
            blend = [flag for flag in ("--data-path", _BLEND_FILE) if flag in given]
            split = [flag for flag in (*_PATHS, _SPLIT_FILE) if flag in given - {"--data-path"}]
            files = [flag for flag in split if flag == _SPLIT_FILE]
            for one, other in (
                (blend[:1], blend[1:]),
                (blend[:1], split[:1]),
                (files, [flag for flag in split if flag != _SPLIT_FILE][:1]),
                (split[:1], [flag for flag in ("--split",) if self._splits()]),
                (blend[:1], [flag for flag in ("--dataloader-fast-cache-load",) if flag in given]),
            ):
                if one and other:
                    raise InvalidArgument(
                        f"{one[0]} and {other[0]} exclude each other in Megatron-LM; remove one"
                    )
            if blend == [_BLEND_FILE] and "split" not in found and "split" not in self._replaced:
                raise InvalidArgument(
                    f"{_BLEND_FILE} needs --split: Megatron-LM stops with an AssertionError"
                )
        lengths = [flag for flag in ("--seq-length", "--encoder-seq-length") if flag in given]
        if len(lengths) > 1 and "seq_length" not in self._replaced:
            raise InvalidArgument(f"{' and '.join(lengths)} exclude each other; remove one")
        if "batch_schedule" in found and self._has("--global-batch-size", "global_batch_size"):
            raise InvalidArgument(
                "--step-batch-size-schedule and --global-batch-size exclude each other in "
                "Megatron-LM; remove one"
            )
        if "phase_transition_iterations" in found and "train_iters" in found:
            raise InvalidArgument(
                f"{_PHASES} needs --train-samples: Megatron-LM stops with a TypeError; give "
                "--train-samples in place of --train-iters"
            )
        for flag, needed in _NEEDED.items():
            if flag in given and needed not in given:
                raise InvalidArgument(
                    f"{flag} needs {needed}: Megatron-LM stops with an AssertionError; give both, "
                    "or neither"
                )
        if self._is_deepspeed:
            self._check_deepspeed(found)
        self._check_interval(found)

    def _splits(self) -> bool:
        """Return True if --split divides one blend: Megatron-DeepSpeed ignores it without one."""
        return self._has("--split", "split") and not self._is_deepspeed

    def _check_deepspeed(self, found: dict[str, Any]) -> None:
        """Refuse what Megatron-DeepSpeed stops at, or ends a run by."""
        paths = self._flags.get("--data-path", [])
        if self._has("--data-path", "data_path") and len(paths) > 1 and not _is_weight(paths[0]):
            raise InvalidArgument(
                "--data-path: Megatron-DeepSpeed takes one path, or a weight before each, and "
                "stops with a ValueError; give weights"
            )
        lengths = {"train_samples", "train_iters", "train_tokens"}
        if "--train-tokens" not in self._flags or self._replaced & lengths:
            return
        tokens = _whole("--train-tokens", self._flags["--train-tokens"])
        samples = parse_count(found.get("train_samples") or "0", "--train-samples")
        samples = samples or found.get("train_iters", 0) * found.get("global_batch_size", 2**62)
        if samples * found.get("seq_length", 1) > tokens:
            raise InvalidArgument(
                f"--train-tokens {tokens} ends the run before the samples that Megatron-DeepSpeed "
                "builds, which is not planned; pass --train-samples, for which datasets are built "
                "that end with it"
            )

    def _check_interval(self, found: dict[str, Any]) -> None:
        """Note a missing --eval-interval, for releases that have no default and need one."""
        if found["order"] != "megatron":
            return
        release = self._over.framework_version
        version = version_of(Settings(**{**found, "framework_version": release}))
        needed = not (found.get("full_validation") or found.get("skip_train"))
        if "eval_interval" in found or "eval_interval" in self._replaced or not needed:
            return
        if version.eval_interval is None:
            self._notes.append(
                f"--eval-interval is missing: {version.framework} has no default and stops with a "
                "TypeError; the plan evaluates every 1000 iterations"
            )


def _is_relative(found: Settings) -> bool:
    """Return True if data are read from a path that depends on the folder of the run."""
    paths = [path for name in _PATHS.values() for path in getattr(found, name) or ()]
    return not all(path[:1] == "/" or is_remote(path) or _is_weight(path) for path in paths)


def _is_weight(word: str) -> bool:
    return isinstance(read_number(word), float)


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of every argument; of repeated ones the last, as in argparse."""
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if not word.startswith("--"):
            current.append(word)
            continue
        name, equals, value = word.partition("=")
        current = [value] if equals else []
        flags[name] = current
    return flags


def _world_size(flags: Flags, variables: Mapping[str, Any]) -> int | None:
    """Return nodes x processes of the launcher; of a command without one, WORLD_SIZE."""
    nodes, gpus = (
        next((flags[flag] for flag in names if flag in flags), None) for names in (_NODES, _GPUS)
    )
    count, each = _count(nodes or ["1"]), _count(gpus or [])
    if count is not None and each is not None:
        return count * each
    held = variables.get("WORLD_SIZE") if nodes is None and gpus is None else None
    return _count([held]) if isinstance(held, str) else None


def _count(words: Sequence[str]) -> int | None:
    """Return the number of nodes or GPUs in the first word; None for `auto` and the like."""
    return int(words[0]) if words and words[0].isdecimal() and len(words[0]) < 10 else None


def _defined(flag: str, words: Sequence[str]) -> tuple[str, ...]:
    for word in words:
        if isinstance(word, OpenWord) and word.unknown.undefined:
            raise InvalidArgument(
                f"{flag} holds {word}, which is not defined: {_remedy(flag, word)}"
            )
        if isinstance(word, OpenWord):
            raise InvalidArgument(
                f"{flag} holds {word}, which needs `{word.unknown.text}` of {word.unknown.line} "
                f"and is not evaluated: pass {flag}, or {CAPTURE}"
            )
    if not words:
        raise InvalidArgument(f"{flag} has no value; give one, or remove it")
    return tuple(words)


def _remedy(flag: str, word: str) -> str:
    """Return the remedy for an undefined variable in a word."""
    own = {"--step-batch-size-schedule": "--batch-schedule"}.get(flag, flag)
    numbers = re.findall(r"\$\{?(\d)", word)
    if numbers:
        return f"give the script's parameters with --script-args, at least {max(numbers)}, or {own}"
    return f"export it, or pass {own}"


def _one(flag: str, words: Sequence[str]) -> str:
    defined = _defined(flag, words)
    if len(defined) > 1:
        raise InvalidArgument(
            f"{flag} takes one word, got {' '.join(defined)!r}; put the whole value in quotes, and "
            'expand an array with it as "${NAME[@]}"'
        )
    return defined[0]


def _switch(flag: str, words: Sequence[str]) -> bool:
    if words:
        raise InvalidArgument(f"{flag} takes no value, got {' '.join(words)!r}; remove the value")
    return True


def _numbers(flag: str, words: Sequence[str]) -> tuple[int, ...]:
    return tuple(_whole(flag, [word]) for word in words)


def _whole(flag: str, words: Sequence[str]) -> int:
    text = " ".join(_defined(flag, words))
    try:
        return int(text)
    except ValueError:
        return check_integer(flag, text)
