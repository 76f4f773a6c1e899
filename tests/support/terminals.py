"""A stream that says that it is a terminal."""

from __future__ import annotations

import io
import sys

import pytest


class Terminal(io.StringIO):
    """Keeps what is shown on it."""

    def isatty(self) -> bool:
        return True


def stderr_as(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stderr be that stream, wide enough, whatever this terminal is told to be."""
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
