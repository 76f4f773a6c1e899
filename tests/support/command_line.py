"""The command ``megaindex``, in this process."""

from __future__ import annotations

import contextlib
import io

from megaindex.cli import main


def cli(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``megaindex <words>``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, out.getvalue(), err.getvalue()
