"""The ``megaindex`` command: each verb is a module of this package with a ``main(arguments)``.

``main`` returns the exit status and raises errors; the module's docstring begins its ``--help``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from megaindex.cli.streams import BAD_INPUT, guarded
from megaindex.errors import InvalidArgument

VERBS = {
    "plan": ("megaindex.cli.plan", "compute train_iters, epochs and coverage of a run"),
    "build": ("megaindex.cli.build", "build the index arrays of datasets into a cache"),
    "export": ("megaindex.cli.export", "write an order as the index arrays that a framework reads"),
    "audit": ("megaindex.cli.audit", "report how often, and when, documents and tokens are seen"),
    "trace": ("megaindex.cli.trace", "print the input rows of a step, or the steps of input rows"),
    "prove": ("megaindex.cli.prove", "show that two records of a run differ by what was skipped"),
    "diff-order": ("megaindex.cli.diff_order", "report where two orders differ, and why"),
    "lock": ("megaindex.cli.lock", "write the data, order and receipts of a run to one file"),
    "report": ("megaindex.cli.report", "print what a locked run was trained on, by source"),
    "extend": ("megaindex.cli.extend", "continue a run past its planned end, its past unchanged"),
    "tokenize": ("megaindex.cli.tokenize", "tokenize JSONL, text or Parquet files into a pair"),
    "merge": ("megaindex.cli.merge", "concatenate .bin/.idx pairs"),
    "split": ("megaindex.cli.split", "split a .bin/.idx pair between documents"),
    "import": ("megaindex.cli.import_", "convert token files of other systems, linked if possible"),
    "verify": ("megaindex.cli.verify", "check pairs, caches, recipes and locks, and repair a pair"),
    "inspect": ("megaindex.cli.inspect", "describe pairs and cache entries"),
    "demo": ("megaindex.cli.demo", "plan, build, read and check one epoch of a real corpus"),
}
_OTHER_WORDS = ("help", "--help", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    verb = arguments[0] if arguments and arguments[0] in VERBS else ""
    return guarded(verb, lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        arguments = _completed_arguments()
    verb, *rest = arguments or ("--help",)
    if verb == "help" and rest:
        verb, rest = rest[0], ["--help"]
    if verb in ("help", "-h", "--help"):
        print(_usage())
        return 0
    if verb in ("-V", "--version"):
        print(_version())
        return 0
    if verb not in VERBS:
        print(f"megaindex: {_unknown(verb)}", file=sys.stderr)
        return BAD_INPUT
    status: int = importlib.import_module(VERBS[verb][0]).main(rest)
    return status


def _unknown(verb: str) -> str:
    import difflib

    near = difflib.get_close_matches(verb, (*VERBS, *_OTHER_WORDS), 1)
    hint = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(VERBS)}"
    return f"unknown {'option' if verb.startswith('-') else 'verb'} {verb!r}; {hint}"


def _completed_arguments() -> Sequence[str]:
    """Return the verb of the command line that argcomplete completes; complete the verb itself.

    The verb's parser prints the completions and ends the process.
    """
    first = int(os.environ["_ARGCOMPLETE"])  # position of the program on the line, from 1
    line = os.environ["COMP_LINE"].encode()[: int(os.environ["COMP_POINT"])].decode()
    before = line.rpartition(" ")[0].split()[first:]
    if before and before[0] in VERBS:
        os.environ["_ARGCOMPLETE"] = str(first + 1)
        return before[:1]
    from megaindex.cli.options import Parser

    parser = Parser(prog="megaindex")
    parser.add_argument("-V", "--version", action="store_true")
    parser.add_argument("verb", choices=(*VERBS, "help"))
    parser.add_argument("verb_of_help", nargs="?", choices=tuple(VERBS))
    parser.parse_args([])
    return ()


def _version() -> str:
    """Return the version, the backend and, if the native core is missing, the reason."""
    import textwrap

    from megaindex import __version__
    from megaindex.kernels import choose, why_not_native

    lines = [f"megaindex {__version__}"]
    try:
        lines.append(f"backend: {choose()}")
    except InvalidArgument as error:
        lines.append(f"backend: {error}")
    reason = why_not_native()
    if reason is not None:
        lines.append(f"no native core: {textwrap.indent(reason, '  ').lstrip()}")
    return "\n".join(lines)


def _usage() -> str:
    lines = "\n".join(f"  {verb:<11} {text}" for verb, (_, text) in VERBS.items())
    return (
        f"usage: megaindex <verb> [options]\n\n{lines}\n\n"
        "megaindex help <verb> lists its options, megaindex --version the version and the backend."
    )
