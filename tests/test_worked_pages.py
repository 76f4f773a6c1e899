"""The examples of README.md and docs/ run, and print what the pages show."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from pathlib import Path

import pytest
from support.inputs import for_each
from support.worked_pages import DOCS, PAGES, ROOT, run_page, setup_of

from megaindex.cli import VERBS

_NEEDED = {
    "grain": "import grain",
    "pyarrow": "import pyarrow",
    "streaming": "write_mds(",
    "tokenizers": "train_bpe(",
    "torch": "megaindex.loader import",
}


@pytest.mark.parametrize("name", PAGES)
def test_examples_of_a_page(name: str, tmp_path: Path) -> None:
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch and grain do not run under the sanitizers")
    text, setup = (ROOT / name).read_text(), setup_of(name)
    for module, words in _NEEDED.items():
        if words in text + setup and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that the pages import
        assert run_page(text, tmp_path, setup) == text


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@for_each("page", ["README.md", "CONTRIBUTING.md", *(p.name for p in DOCS.glob("*.md"))])
def test_links_lead_to_pages_and_headings(page: str) -> None:
    source = ROOT / page if (ROOT / page).exists() else DOCS / page
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", source.read_text()):
        path, _, anchor = link.partition("#")
        target = source.parent / path if path else source
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), link


def test_the_pages_have_at_most_45000_words() -> None:
    """Counted as `wc -w docs/*.md README.md` counts them."""
    pages = (ROOT / "README.md", *DOCS.glob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= 45_000


def test_the_index_names_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, page.name


def test_the_reference_names_every_verb_and_variable() -> None:
    reference = (DOCS / "reference.md").read_text()
    for verb in VERBS:
        assert f"`{verb}`" in reference, verb
    for source in (*(ROOT / "megaindex").rglob("*.py"), ROOT / "setup.py"):
        for variable in re.findall(r'"(MEGAINDEX_[A-Z_]+)"', source.read_text()):
            assert variable in reference, variable
