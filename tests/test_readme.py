"""README.md: what its examples need besides running, see test_worked_pages.py."""

from __future__ import annotations

import re
import runpy

from support.worked_pages import DOCS, ROOT

from megaindex.cli import VERBS

README = (ROOT / "README.md").read_text()


def test_every_verb_exists() -> None:
    verbs = re.findall(r"(?:`|\$ )megaindex ([\w-]+)", README)
    assert {"plan", "audit"} <= set(verbs) <= set(VERBS)


def test_both_pictures_show_the_same() -> None:
    """The dark one is the light one in other colours."""
    light, dark = (DOCS / f"audit-exposure{kind}.svg" for kind in ("", "-dark"))
    restyled = runpy.run_path(str(DOCS / "audit_sample.py"))["dark"]
    assert restyled(light.read_text()) == dark.read_text()
    for picture in (light, dark):
        assert f"docs/{picture.name}" in README


def test_the_first_result_is_on_the_first_screen() -> None:
    """The answer of the plan, train_iters, is in the first 25 lines."""
    first = README.splitlines()[:25]
    assert any(line.startswith(" │ train_iters 8063") for line in first)
