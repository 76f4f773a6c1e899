"""The page holds all it shows, in one file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from command_line import cli
from corpora import write_corpus


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    for name, size in (("web", 300), ("books", 40)):
        write_corpus(folder / name, np.random.default_rng(size).integers(1, 90, size))
    run = ["--data-path", 0.8, folder / "web", 0.2, folder / "books", "--seq-length", 16]
    run += ["--global-batch-size", 8, "--train-iters", 150, "--consumed-samples", 400]
    out = folder / "audit.html"
    status, _, err = cli("audit", *run, "--order", "neox", "--html", out)
    assert status == 0, err
    assert not list(folder.glob(".*"))
    return out.read_text(encoding="utf-8")


def test_nothing_is_fetched(page: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe|image)\b|@import|url\((?!#)", page)


def test_every_picture_is_well_formed_and_explained(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert len(pictures) == len(captions) == 5
    for picture, caption in zip(pictures, captions, strict=True):
        assert ElementTree.fromstring(picture).get("role") == "img"
        assert len(caption) > 80
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))
    for reference in re.findall(r'(?:url\(|href=")#([^)"]+)', page):
        assert reference in identifiers


def test_the_numbers_are_on_it(page: str) -> None:
    assert "of which 50 are past" in page
    for words in ("earlier exposures", "web", "books", "so far", "after all steps", "@media print"):
        assert words in page


def test_the_same_audit_gives_the_same_page(prefix: Path, tmp_path: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    texts = []
    for name in ("one.html", "two.html"):
        assert cli("audit", *run, "--html", tmp_path / name)[0] == 0
        texts.append((tmp_path / name).read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert "No token is served twice" in texts[0]


def test_without_matplotlib_the_extra_is_named(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    status, _, err = cli("audit", *run, "--html", tmp_path / "page.html")
    assert status == 2
    assert "pip install 'megaindex[plots]'" in err
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(prefix: Path, tmp_path: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    status, _, err = cli("audit", *run, "--html", tmp_path / "missing" / "page.html")
    assert status == 2
    assert "cannot write" in err
