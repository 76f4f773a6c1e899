"""The command ``megaindex`` in this process, and a terminal that it prints to."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

import pytest

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


def plan(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``megaindex plan``."""
    return cli("plan", *words)


def plan_json(*words: object) -> dict[str, Any]:
    """The object that ``megaindex plan --json`` prints."""
    status, out, err = plan(*words, "--json")
    assert status == 0, err
    content: dict[str, Any] = json.loads(out)
    return content


def shares_by_times(coverage: dict[str, float]) -> list[float]:
    """The shares of tokens seen 0, 1, 2, … times, those of none too."""
    times = 1 + max((int(key.removeprefix("seen_")) for key in coverage), default=-1)
    return [coverage.get(f"seen_{k}", 0.0) for k in range(times)]


class Terminal(io.StringIO):
    """A stream that is a terminal by its own account, and keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def stderr_as(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace stderr by that stream, with 120 columns, whatever the environment of the tests."""
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
