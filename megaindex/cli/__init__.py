"""The ``megaindex`` command: each verb is a module of this package with a ``main(arguments)``.

``main`` returns the exit status and raises errors; the module's docstring begins its ``--help``. A
failure to write to standard output raises an error of its own, distinct from errors of the verb; a
failure to write to standard error is ignored.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.io.paths import storage_error

VERBS = {
    "plan": ("megaindex.cli.plan", "compute train_iters, epochs and coverage of a run"),
    "build": ("megaindex.cli.build", "build the index arrays of datasets into a cache"),
    "lock": ("megaindex.cli.lock", "write the data, order and receipts of a run to one file"),
    "export": ("megaindex.cli.export", "write an order as the index arrays that a framework reads"),
    "extend": ("megaindex.cli.extend", "continue a run past its planned end, its past unchanged"),
    "capture": ("megaindex.cli.capture", "run a launch script, and write the command it starts"),
    "audit": ("megaindex.cli.audit", "report how often, and when, documents and tokens are seen"),
    "trace": ("megaindex.cli.trace", "print the input rows of steps, or the steps of input rows"),
    "prove": ("megaindex.cli.prove", "show that two records of a run differ by what was skipped"),
    "report": ("megaindex.cli.report", "print what a run was trained on, by source"),
    "diff-order": ("megaindex.cli.diff_order", "report where two orders differ, and why"),
    "tokenize": ("megaindex.cli.tokenize", "tokenize JSONL, text or Parquet files into a pair"),
    "import": ("megaindex.cli.import_", "convert token files of other systems, linked if possible"),
    "verify": ("megaindex.cli.verify", "check pairs, caches, recipes and locks, and repair a pair"),
    "merge": ("megaindex.cli.merge", "concatenate .bin/.idx pairs"),
    "split": ("megaindex.cli.split", "split a .bin/.idx pair between documents"),
    "inspect": ("megaindex.cli.inspect", "describe pairs and cache entries"),
    "schema": ("megaindex.cli.schema", "print the JSON schema of recipes, for editors"),
    "demo": ("megaindex.cli.demo", "plan, build, read and check one epoch of a real corpus"),
}
_TASKS = {
    "before a run": ("plan", "lock", "build"),
    "during a run": ("trace", "extend"),
    "after a run": ("audit", "report", "prove"),
    "corpora": ("tokenize", "import", "verify"),
}
"""Verbs by task; the others are listed by ``megaindex help more``."""
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
    if verb == "help" and rest == ["more"]:
        print(_usage(more=True))
        return 0
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


def _usage(*, more: bool = False) -> str:
    """Return the list of the verbs by task, or of those of no task."""
    listed = {verb for verbs in _TASKS.values() for verb in verbs}
    rest = [verb for verb in VERBS if verb not in listed]
    if more:
        return "\n".join(["more verbs", *map(_line, rest)])
    lines = []
    for task, verbs in _TASKS.items():
        lines += [task, *map(_line, verbs), ""]
    return "\n".join(
        [
            "usage: megaindex <verb> [RUN …] [options]",
            "",
            *lines,
            "RUN is a lock, a recipe, a framework's configuration or launch script, or pairs.",
            f"megaindex help more: {', '.join(rest)}.",
            "megaindex help <verb> lists its options, megaindex --version the version and backend.",
        ]
    )


def _line(verb: str) -> str:
    return f"  {verb:<11} {VERBS[verb][1]}"


class StdoutClosed(Exception):
    """Standard output was closed by its reader, as by ``| head``."""


@contextlib.contextmanager
def prepared_streams() -> Iterator[None]:
    """Make both standard streams writable inside ``with``, whatever state they were inherited in.

    A missing or closed stream is replaced by the null device; characters that an encoding lacks
    are escaped. Printing raises StorageError if standard output is full, and `StdoutClosed` if it
    is a closed pipe.
    """
    _open_descriptors()
    with contextlib.ExitStack() as stack:
        out, err = (_usable(stream, stack) for stream in (sys.stdout, sys.stderr))
        stack.callback(_end, err)
        stack.callback(_end, out)
        stack.enter_context(contextlib.redirect_stdout(cast("TextIO", _Output(out))))
        stack.enter_context(contextlib.redirect_stderr(cast("TextIO", _Messages(err))))
        yield


def _open_descriptors() -> None:
    """Open closed descriptors 0 to 2 on the null device.

    The next opened file would get such a descriptor, and printed text would end up in a corpus.
    """
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)  # for worker processes
    os.close(lowest)


def _usable(stream: TextIO | None, stack: contextlib.ExitStack) -> TextIO:
    if stream is None or getattr(stream, "closed", False):
        return stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _end(stream: TextIO) -> None:
    """Flush now, since a failure at interpreter exit would change the exit status."""
    try:
        stream.flush()
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Redirect buffered and further output to the null device."""
    with contextlib.suppress(OSError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


class _StandardStream:
    """A standard stream, with other errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Output(_StandardStream):
    """Standard output with typed errors, raised at every later call, since argparse drops them."""

    _failure: Exception | None = None

    def write(self, text: str) -> int:
        with self._typed():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._typed():
            self._stream.flush()

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        if self._failure is None:
            try:
                yield
            except BrokenPipeError:
                self._failure = StdoutClosed()
            except OSError as error:
                self._failure = storage_error(error, "standard output", "cannot write")
            else:
                return
            _silence(self._stream)
        raise self._failure


class _Messages(_StandardStream):
    """Standard error with failures ignored."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _silence(self._stream)
            return len(text)

    def flush(self) -> None:
        _end(self._stream)


BAD_INPUT = 2
_INTERRUPTED = 128 + 2  # SIGINT, by the convention of shells
_STDOUT_CLOSED = 128 + 13  # SIGPIPE


def guarded(verb: str, body: Callable[[], int | None]) -> int:
    """Run ``body`` with writable streams and return the exit status.

    The status is the result of ``body`` (0 for None); 2 after a MegaIndexError, such as a failure
    to write to standard output; 130 after Ctrl-C; 141 without a message if stdout is closed.
    """
    name = f"megaindex {verb}".rstrip()
    with prepared_streams():
        try:
            return _printed(body)
        except MegaIndexError as error:
            print(f"{name}: {error}{_hint(error)}", file=sys.stderr)
            return BAD_INPUT
        except StdoutClosed:
            return _STDOUT_CLOSED
        except MemoryError as error:
            print(f"{name}: not enough memory: {error}; use smaller settings", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print(f"{name}: interrupted, nothing half-written was left", file=sys.stderr)
            return _INTERRUPTED


def _hint(error: MegaIndexError) -> str:
    """Return what a file is that the error names, if it was given in the wrong place."""
    options = sys.modules.get("megaindex.cli.options")
    if options is None or not options.Parser.given:
        return ""
    from megaindex.settings.run_words import misplaced

    return misplaced(str(error), options.Parser.given)


def _printed(body: Callable[[], int | None]) -> int:
    try:
        status = body() or 0
    except SystemExit:  # raised by --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status
