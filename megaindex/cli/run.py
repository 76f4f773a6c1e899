"""What every verb shares: errors become one line on stderr and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megaindex.cli.streams import ReaderGone, prepared_streams
from megaindex.errors import MegaIndexError

BAD_INPUT = 2
_INTERRUPTED = 128 + 2  # as a shell says of a command that SIGINT ended
_READER_GONE = 128 + 13  # and SIGPIPE


def guarded(verb: str, body: Callable[[], int | None]) -> int:
    """Run ``body`` with streams that can be written to.

    Returns:
        What ``body`` returns, 0 for None; 2 after a MegaIndexError, also where standard output
        cannot be written; 130 after Ctrl-C; 141, and silently, where nobody reads standard output.
    """
    name = f"megaindex {verb}".rstrip()
    with prepared_streams():
        try:
            return _printed(body)
        except MegaIndexError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return BAD_INPUT
        except ReaderGone:
            return _READER_GONE
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
