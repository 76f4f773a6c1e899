"""The pages in docs/ show what their commands print."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from support.worked_pages import DOCS, PAGES, run_page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_its_commands_print(name: str, tmp_path: Path) -> None:
    text = (DOCS / name).read_text()
    assert "```console\n$ " in text
    if "import grain" in text:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("grain")
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch and grain do not run under the sanitizers")
    assert run_page(text, tmp_path) == text
