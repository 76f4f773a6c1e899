"""The full wording of messages: golden/make_messages.py. Other tests match rule and setting."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from support.messages import CALL, COMMAND, PAGE, answered


def test_messages_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    changed = difflib.unified_diff(page.splitlines(), answered(page).splitlines(), lineterm="")
    assert "\n".join(changed) == ""


def test_every_command_of_the_page_has_one_message() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line and not line.startswith("#")]
    asked = [line.startswith((COMMAND, CALL)) for line in lines]
    assert len(lines) > 120
    assert asked == [True, False] * (len(lines) // 2)
