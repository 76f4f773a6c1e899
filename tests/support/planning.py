"""The planner's command line, in this process."""

from __future__ import annotations

import json
from typing import Any

from support import command_line


def cli(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``megaindex plan``."""
    return command_line.cli("plan", *words)


def plan_json(*words: object) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    status, out, err = cli(*words, "--json")
    assert status == 0, err
    content: dict[str, Any] = json.loads(out)
    return content
