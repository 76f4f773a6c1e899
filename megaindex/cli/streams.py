"""Standard streams, errors and exit statuses shared by the commands.

A failure to write to standard output raises an error of its own, distinct from errors of the verb;
a failure to write to standard error is ignored.
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


class _Output:
    """Standard output with typed errors, raised at every later call, since argparse drops them."""

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
    """Standard error with failures ignored."""

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
            print(f"{name}: {error}", file=sys.stderr)
            return BAD_INPUT
        except StdoutClosed:
            return _STDOUT_CLOSED
        except MemoryError as error:
            print(f"{name}: not enough memory: {error}; use smaller settings", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print(f"{name}: interrupted, nothing half-written was left", file=sys.stderr)
            return _INTERRUPTED


def _printed(body: Callable[[], int | None]) -> int:
    try:
        status = body() or 0
    except SystemExit:  # raised by --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status
