"""The planner's command line, in this process."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from megaindex.plan.__main__ import main


def cli(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``python -m megaindex.plan``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, out.getvalue(), err.getvalue()


def plan_json(*words: object) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    status, out, err = cli(*words, "--json")
    assert status == 0, err
    content: dict[str, Any] = json.loads(out)
    return content
