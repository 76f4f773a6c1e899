"""Standard streams, errors and exit statuses shared by the commands.

A failure to print to standard output is an error of its own, not one of the verb's work; a failure
to print to standard error is ignored.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from megaindex.errors import MegaIndexError
from megaindex.io.os_errors import storage_error


class StdoutClosed(Exception):
    """The reader of standard output has closed it, as ``| head`` does."""


@contextlib.contextmanager
def prepared_streams() -> Iterator[None]:
    """Inside ``with`` both streams can be written to, whatever the command was started with.

    One that is missing or closed is written nowhere; characters that an encoding cannot say are
    written as escapes. Printing raises StorageError where standard output is full, and
    `StdoutClosed` where it is a closed pipe.
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
    """Descriptors 0 to 2, where they are closed, would be given to the next files that are opened:
    what is printed, here or in a library, would end up in a corpus."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)  # by workers
    os.close(lowest)


def _usable(stream: TextIO | None, stack: contextlib.ExitStack) -> TextIO:
    if stream is None or getattr(stream, "closed", False):
        return stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _end(stream: TextIO) -> None:
    """Flush, so that the interpreter does not fail with another status when it ends."""
    try:
        stream.flush()
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Send what is still to come, and what is buffered, nowhere."""
    with contextlib.suppress(OSError):  # a stream of another kind, without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


class _Output:
    """Standard output with typed failures, raised at each call, since argparse ignores them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failure: Exception | None = None

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Messages:
    """Standard error, whose failures are ignored."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _silence(self._stream)
            return len(text)

    def flush(self) -> None:
        _end(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


BAD_INPUT = 2
_INTERRUPTED = 128 + 2  # as a shell says of a command that SIGINT ended
_STDOUT_CLOSED = 128 + 13  # and SIGPIPE


def guarded(verb: str, body: Callable[[], int | None]) -> int:
    """Run ``body`` with streams that can be written to.

    Returns:
        What ``body`` returns, 0 for None; 2 after a MegaIndexError, also where standard output
        cannot be written; 130 after Ctrl-C; 141 without a message if stdout is closed (SIGPIPE).
    """
    name = f"megaindex {verb}".rstrip()
    with prepared_streams():
        try:
            return _printed(body)
        except MegaIndexError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return BAD_INPUT
        except StdoutClosed:
            return _STDOUT_CLOSED
        except MemoryError as error:
            print(f"{name}: not enough memory: {error}; ask for less", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print(f"{name}: interrupted, nothing half-written was left", file=sys.stderr)
            return _INTERRUPTED


def _printed(body: Callable[[], int | None]) -> int:
    """The status of ``body``, once all that it printed is out."""
    try:
        status = body() or 0
    except SystemExit:  # of --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status
