"""The full wording of messages, and what commands print: golden/make_messages.py. Other tests match
rule and setting, and compare numbers with what they should be."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
from support import messages, outputs
from support.messages import CALL, COMMAND, PAGE


@pytest.mark.parametrize("page", [messages, outputs])
def test_messages_and_outputs_are_those_of_their_page(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    text = page.PAGE.read_text()
    changed = difflib.unified_diff(text.splitlines(), page.answered(text).splitlines(), lineterm="")
    assert "\n".join(changed) == ""


def test_every_command_of_the_page_has_one_message() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line and not line.startswith("#")]
    asked = [line.startswith((COMMAND, CALL)) for line in lines]
    assert len(lines) > 120
    assert asked == [True, False] * (len(lines) // 2)
