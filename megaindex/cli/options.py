"""Parser, flags and engine options shared by the commands."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from megaindex.arithmetic import INT64_MAX
from megaindex.errors import InvalidArgument, MissingFile, visible
from megaindex.validation import DEFAULT_SEED, check_choice, check_epochs, check_setting, shown

if TYPE_CHECKING:
    from megaindex.corpus.outputs import WriteResult
    from megaindex.engine import Engine
    from megaindex.index.order_settings import Order

_MAY_BE_EMPTY = ("script_args", "shuffle_names")
_ELSEWHERE = {"--html": "`megaindex audit RUN --html FILE` writes the page of a run"}
_MOST_SPREAD = 24  # items of a list in JSON that may have several lines each


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors that checks common settings under the names of their flags."""

    given: ClassVar[Mapping[str, Any]] = {}
    """The options that were read last."""
    _words: Sequence[str] = ()
    _is_completing = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._rare: set[str] = set()

    def hide(self, group: argparse._ArgumentGroup, besides: Collection[str] = ()) -> None:
        """Leave the flags of a group out of ``--help``, but for some; ``--help-all`` shows them."""
        if not self._rare:
            self.add_argument("--help-all", action=_HelpAll, help="show the rarer options too")
            self.usage = "%(prog)s [RUN ...] [options]"
        flags = {flag for action in group._group_actions for flag in action.option_strings}
        self._rare |= flags - {*besides}

    def format_help(self) -> str:
        """Return the help without the flags that are hidden."""
        rare = [
            action for action in self._actions if self._rare.intersection(action.option_strings)
        ]
        shown = [action.help for action in rare]
        for action in rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(rare, shown, strict=True):
                action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; under argcomplete print completions and end the process."""
        if "_ARGCOMPLETE" in os.environ and not Parser._is_completing:
            Parser._is_completing = True  # argcomplete calls this method
            importlib.import_module("argcomplete").autocomplete(self)
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def parse_args(self, *arguments: Any, **more: Any) -> Any:
        """Return the options; raise InvalidArgument for one that breaks its rule."""
        return self._checked(super().parse_args(*arguments, **more))

    def parse_intermixed_args(self, *arguments: Any, **more: Any) -> Any:
        """Return the options, also those between paths, as `parse_args` does."""
        return self._checked(super().parse_intermixed_args(*arguments, **more))

    def _checked(self, options: argparse.Namespace) -> argparse.Namespace:
        Parser.given = dict(vars(options))
        flags = {a.dest: (*a.option_strings, str(a.metavar))[0] for a in _actions_of(self)}
        for name, value in vars(options).items():
            flag = flags.get(name, name)
            empty = value == "" or (isinstance(value, list) and "" in value)
            if isinstance(value, int) and not isinstance(value, bool):
                check_setting(name, value, flag)
                if value > INT64_MAX:
                    raise InvalidArgument(f"{flag} must be below 2**63, got {shown(value)}")
            elif empty and name not in _MAY_BE_EMPTY:  # such as that of an unset variable
                part = "" if value in ("", [""]) else f"value {value.index('') + 1} of "
                raise InvalidArgument(f"{part}{flag} is empty; give a value, or leave it out")
            elif name in ("epochs", "more_epochs") and value is not None:
                for part in value.split(","):  # one for each source
                    check_epochs(flag, part)
            elif name == "order" and value is not None:
                from megaindex.index.frameworks import FRAMEWORK_RULES

                check_choice(flag, value, tuple(FRAMEWORK_RULES))
            elif name == "split" and value is not None:
                from megaindex.index.frameworks import parse_split

                parse_split(value, options.order or "megatron", flag)
            elif name == "dtype" and value is not None:
                from megaindex.format.header import code_of_dtype, get_dialect

                code_of_dtype(value, get_dialect(getattr(options, "dialect", "megatron")), flag)
        return options

    def error(self, message: str) -> NoReturn:
        hint = "".join(f"; {text}" for text in self._suggestions())
        self.exit(2, f"{self.prog}: {visible(message + hint)}; --help lists the arguments\n")

    def _suggestions(self) -> Iterator[str]:
        """Yield the flags that are close to unknown ones on the command line."""
        flags = sorted(_flags_of(self))
        for word in self._words:
            if " " in word:  # a value, also where it begins with dashes
                continue
            name = word.partition("=")[0]
            known = any(flag.startswith(name) for flag in flags) if self.allow_abbrev else False
            if name.startswith("--") and name not in flags and not known:
                near = difflib.get_close_matches(name, flags, 1)
                if name in _ELSEWHERE:
                    yield _ELSEWHERE[name]
                elif near:
                    yield f"{name}: did you mean {near[0]}?"


def check_output(flag: str, path: str, *endings: str, overwrite: bool) -> None:
    """Refuse a file before the work that makes it.

    The ending keeps ``--overwrite`` from replacing a file of another kind, such as a corpus.

    Raises:
        InvalidArgument: the path has none of the ``endings``, or is a URL.
        MissingFile: its folder does not exist.
        StorageError: the file exists, without ``overwrite``, or something else has its name.
    """
    from megaindex.io.atomic import AtomicFiles

    if not path.lower().endswith(endings):
        raise InvalidArgument(
            f"{flag} must end in {' or '.join(endings)}, got {path}: files of other kinds are not "
            "replaced"
        )
    AtomicFiles([path], overwrite=overwrite)
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise MissingFile(f"{flag} {path}: the folder {folder} does not exist; make it first")


class _HelpAll(argparse._HelpAction):
    """Print the help with all flags."""

    def __call__(self, parser: Any, *others: Any) -> None:
        parser._rare.clear()
        super().__call__(parser, *others)


def _actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for chosen in action.choices.values():
                yield from _actions_of(chosen)


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the long flags of a parser and of its subcommands."""
    names = (name for action in _actions_of(parser) for name in action.option_strings)
    return {name for name in names if name.startswith("--")}


_FLAGS: dict[str, dict[str, Any]] = {
    "--recipe": {"metavar": "FILE", "help": "recipe of the whole run, a YAML file"},
    "--data-path": {
        "nargs": "+",
        "metavar": "P",
        "help": "prefixes of .bin and .idx, or URLs (s3://, gs://, az://)",
    },
    "--seq-length": {"type": int, "metavar": "S", "help": "tokens per sample"},
    "--seed": {"type": int, "metavar": "N", "help": f"default: {DEFAULT_SEED}"},
    "--epochs": {"metavar": "E", "help": "such as 1, 1.5 or 3/2"},
    "--num-samples": {"type": int, "metavar": "N", "help": "samples of the index"},
    "--variance-buffer": {"metavar": "B", "help": "of a blend: a number >= 1, or exact"},
    "--split": {"metavar": "a,b,c", "help": "such as 969,30,1; default: all documents"},
    "--max-documents": {
        "type": int,
        "metavar": "N",
        "help": "order packed: most documents in a sample; default: S / 32, at least 16",
    },
    "--long-documents": {
        "metavar": "HOW",
        "help": "order packed: split (default), truncate or skip documents longer than a sample",
    },
    "--align": {
        "type": int,
        "metavar": "N",
        "help": "order packed: documents begin at multiples of N tokens, 2 x the context-parallel "
        "size",
    },
    "--cache-dir": {"metavar": "DIR", "help": "folder of the index arrays"},
    "--overwrite": {"action": "store_true", "help": "replace existing files"},
    "--json": {"action": "store_true", "help": "print one JSON object"},
}


def add_flags(parser: argparse._ActionsContainer, *flags: str, **changes: Any) -> None:
    """Add shared flags; ``changes`` replace arguments of `add_argument`."""
    for flag in flags:
        parser.add_argument(flag, **(_shared_arguments(flag) | changes))


def add_run(parser: argparse._ActionsContainer) -> None:
    """Add the run in first place, which `take_run` reads."""
    meaning = (
        "the run: a lock, a recipe, the configuration of a framework or its launch script, or "
        "pairs, as P P … or w P w P …"
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help=meaning)
    parser.add_argument("--as", dest="run_kind", metavar="KIND", help="what RUN is, if it fits two")


def take_run(options: argparse.Namespace, verb: str) -> None:
    """Set the options that say the same as the run in first place, and print what it is.

    Raises:
        InvalidArgument: it is not clear what it is, or it is given by a flag too.
        MissingFile, StorageError: it cannot be read.
    """
    words, kind = options.run, options.run_kind
    del options.run, options.run_kind
    if not words:
        if kind is not None:
            raise InvalidArgument(f"--as {kind} says what RUN is, and none is given; give RUN")
        return
    from megaindex.settings.run_words import KINDS, named_run

    named = named_run(words, kind)
    for setting, value in named.settings.items():
        if getattr(options, setting) is not None:
            flag = f"--{setting.replace('_', '-')}"
            raise InvalidArgument(
                f"{words[0]} is {KINDS[named.kind].noun}, also given by {flag}; give one of them"
            )
        setattr(options, setting, value)
    print(f"megaindex {verb}: {named}", file=sys.stderr)


def order_of_flags(options: argparse.Namespace) -> Order:
    """Return the order of --order, --max-documents, --long-documents and --align."""
    from megaindex.index.order_settings import make_order

    names = ("max_documents", "long_documents", "align")
    given = {name: getattr(options, name) for name in names}
    return make_order(options.order, given, {n: f"--{n.replace('_', '-')}" for n in names})


def _shared_arguments(flag: str) -> dict[str, Any]:
    """Return the arguments of `add_argument`; only flags that list a table import NumPy."""
    if flag == "--order":
        from megaindex.index.frameworks import FRAMEWORK_RULES

        return {"metavar": "ORDER", "help": f"{', '.join(FRAMEWORK_RULES)}; default: megatron"}
    if flag == "--subset":
        from megaindex.index.frameworks import SPLITS

        return {"default": "train", "choices": SPLITS, "help": "default: train"}
    if flag == "--dialect":
        from megaindex.format.header import DIALECTS

        return {
            "default": "megatron",
            "choices": DIALECTS,
            "help": "framework that defines the dtype codes of the .idx; default: megatron",
        }
    return _FLAGS[flag]


def refuse_others(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    flag: str,
    besides: Collection[str],
) -> None:
    """Refuse options that have no effect together with `flag`, such as ``--repair``."""
    own = flag.removeprefix("--").replace("-", "_")
    for name, value in vars(options).items():  # "paths" has no flag
        if name not in (own, "paths", *besides) and value != parser.get_default(name):
            other = f"--{name.replace('_', '-')}"
            raise InvalidArgument(
                f"{other}: has no effect with {flag}, which takes only "
                f"{', '.join(f'--{one}'.replace('_', '-') for one in besides)}; leave it out"
            )


def refuse_weights(verb: str, words: Sequence[str]) -> None:
    """Refuse a blend ``w P w P …``, as `megaindex plan` and the frameworks accept it."""
    weights, paths = words[::2], words[1::2]
    if paths and len(weights) == len(paths) and all(map(_is_weight, weights)):
        raise InvalidArgument(
            f"{words[0]} {words[1]}: megaindex {verb} takes prefixes without weights (weights are "
            f"for megaindex plan); give {' '.join(paths[:3])}{' …' * (len(paths) > 3)}"
        )


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return not (os.path.lexists(word) or os.path.lexists(f"{word}.idx"))


def print_json(value: Any) -> None:
    """Print the object of ``--json``; of a long list each item is one line."""
    print(_json_text(value, "\n"))


def _json_text(value: Any, end: str) -> str:
    """Return JSON as text that ``end``, a line's end and indentation, follows."""
    if not (isinstance(value, (dict, list, tuple)) and value):
        return json.dumps(value)
    begin = f"{end}  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(str(key))}: {_json_text(each, begin)}" for key, each in value.items()]
    elif len(value) > _MOST_SPREAD:
        rows = list(map(json.dumps, value))
    else:
        rows = [_json_text(each, begin) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + begin + f",{begin}".join(rows) + end + closing


def print_pairs(pairs: Sequence[WriteResult], seconds: float, *, as_json: bool) -> None:
    """Print the pairs that a verb wrote: a line for each, or one JSON object."""
    total = sum(pair.nbytes for pair in pairs)
    if as_json:
        rate = total / max(seconds, 1e-9)  # the clock may not have advanced
        found = {"pairs": list(map(vars, pairs)), "seconds": seconds, "bytes_per_second": rate}
        print_json(found)
        return
    for pair in pairs:
        print(pair.line(seconds * pair.nbytes / total if total else seconds))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("execution (results do not depend on it)").add_argument
    engine = "processes on this machine, or Ray; default: local"
    cluster = "running Ray cluster, such as auto or 10.0.0.1:6379; default: start one here"
    add("--engine", default="local", choices=("local", "ray"), help=engine)
    add("--workers", type=int, metavar="N", help="tasks at the same time; default: one per CPU")
    add("--address", metavar="A", help=cluster)


def chosen_engine(options: argparse.Namespace) -> AbstractContextManager[Engine]:
    from megaindex.engine import open_engine

    return open_engine(options.engine, workers=options.workers, address=options.address)
