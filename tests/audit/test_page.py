"""The page holds all it shows, in one file."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex.audit import audit, stream_of_run


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


def test_the_picture_of_the_documentation_shows_what_its_text_says(tmp_path: Path) -> None:
    """docs/audit_sample.py, on a smaller corpus: one jump, from 2 earlier exposures to 3."""
    sample = runpy.run_path(str(Path(__file__).parents[2] / "docs/audit_sample.py"))
    sample["make_corpus"](tmp_path / "corpus", documents=7_000)
    result = audit(stream_of_run(sample["sample_run"](tmp_path / "corpus")), points=120)
    (jump,) = result.jumps
    assert (round(jump.before), round(jump.after)) == (2, 3)


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
    assert "missing does not exist; write the page (--html) to a disk" in err


def audit_to(page: Path, prefix: Path) -> tuple[int, str]:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    status, _, err = cli("audit", *run, "--html", page)
    return status, err


def test_a_page_is_replaced_by_the_next_one_and_no_other_file(prefix: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert audit_to(page, prefix)[0] == 0
    first = page.read_bytes()
    page.write_bytes(first + b"<!-- of an earlier run -->")
    assert audit_to(page, prefix)[0] == 0
    assert page.read_bytes() == first
    page.write_bytes(b"<!DOCTYPE html>\n<title>my own</title>")
    status, err = audit_to(page, prefix)
    assert (status, err.count("page.html: the file exists and is not a page of")) == (2, 1)
    assert page.read_bytes() == b"<!DOCTYPE html>\n<title>my own</title>"
    assert [path.name for path in tmp_path.glob("*html*")] == ["page.html"]


def test_an_input_is_not_replaced(prefix: Path) -> None:
    index = Path(f"{prefix}.idx")
    before = index.read_bytes()
    status, err = audit_to(index, prefix)
    assert status == 2
    assert "is not a page of megaindex audit" in err
    assert index.read_bytes() == before


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def _link(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _socket, _link])
def test_what_is_no_file_is_neither_replaced_nor_waited_for(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pages"
    folder.mkdir()
    make(folder / "page.html")
    kind = stat.S_IFMT((folder / "page.html").lstat().st_mode)
    status, err = audit_to(folder / "page.html", prefix)
    assert (status, err.count("not a regular file; check the path")) == (2, 1)
    assert stat.S_IFMT((folder / "page.html").lstat().st_mode) == kind
    assert os.listdir(folder) == ["page.html"]


def test_no_name_beside_the_page_is_followed(prefix: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".page.html.part").symlink_to(victim)
    assert audit_to(tmp_path / "page.html", prefix)[0] == 0
    assert victim.read_text() == "precious"
    assert not (tmp_path / "page.html").is_symlink()


def test_the_folder_of_a_page_is_checked_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["--data-path", "no/such/data", "--seq-length", 16, "--global-batch-size", 8]
    page = tmp_path / "missing" / "page.html"
    status, _, err = cli("audit", *run, "--epochs", 1, "--html", page)
    assert status == 2
    assert f"page.html: cannot write: the folder {page.parent} does not exist" in err
    page.parent.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(page.parent))
    status, _, err = cli("audit", *run, "--epochs", 1, "--html", page)
    assert status == 2
    assert f"page.html: cannot write: no write access to {page.parent}" in err
