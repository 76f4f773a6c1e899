"""What every verb shares: typed errors become one line on stderr and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megaindex.errors import MegaIndexError


def guarded(verb: str, body: Callable[[], None]) -> int:
    """Run ``body``; 0 if it returns, 2 after a MegaIndexError, 130 after Ctrl-C."""
    try:
        body()
        sys.stdout.flush()
    except MegaIndexError as error:
        print(f"megaindex {verb}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError as error:
        print(f"megaindex {verb}: not enough memory: {error}; ask for less", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megaindex {verb}: interrupted, nothing half-written was left", file=sys.stderr)
        return 130
    return 0
