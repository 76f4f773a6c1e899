"""``megaindex <verb>``: each verb is a module of this package with a ``main(arguments)``.

``main`` returns the exit status, and raises errors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megaindex.cli.streams import BAD_INPUT, guarded
from megaindex.errors import InvalidArgument

VERBS = {
    "plan": ("megaindex.cli.plan", "train_iters and epochs, before anything is built"),
    "build": ("megaindex.cli.build", "build the index arrays of a dataset into a cache"),
    "audit": ("megaindex.cli.audit", "how often each token and document is seen, and when"),
    "diff-order": ("megaindex.cli.diff_order", "where two orders differ, how much, and why"),
    "extend": ("megaindex.cli.extend", "go past a run's planned end without reordering its past"),
    "tokenize": ("megaindex.cli.tokenize", "make .bin/.idx pairs of JSONL, text or Parquet"),
    "merge": ("megaindex.cli.merge", "put .bin/.idx pairs one behind the other"),
    "split": ("megaindex.cli.split", "cut a .bin/.idx pair into several, between documents"),
    "import": ("megaindex.cli.import_", "make a pair from another format, linked where possible"),
    "verify": ("megaindex.cli.verify", "check pairs and caches; what is broken, what repairs it"),
    "inspect": ("megaindex.cli.inspect", "what a pair or a cache entry is"),
    "demo": ("megaindex.cli.demo", "one epoch of a real corpus, planned, built, read and proven"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    verb = arguments[0] if arguments and arguments[0] in VERBS else ""
    return guarded(verb, lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    """Imports what the verb needs, which takes time enough for a Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(_version())
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        known = ", ".join(VERBS)
        print(f"megaindex: unknown verb {verb!r}; it must be one of {known}", file=sys.stderr)
        return BAD_INPUT
    status: int = importlib.import_module(VERBS[verb][0]).main(rest)
    return status


def _version() -> str:
    """Return the version, the backend and, without the native core, the reason."""
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
    return f"usage: megaindex <verb> [options]\n\n{lines}\n\nmegaindex <verb> --help explains each."
