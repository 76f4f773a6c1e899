"""The files of docs/lock-format/ against megaindex; test_lock_js.py compares them with lock.js."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.folders import inside
from support.lock_vectors import FILES, FOLDER, LOCKS, expected, make_locks, vectors, write_inputs

from megaindex.cli import main
from megaindex.lock import Lock, read_lock
from megaindex.lock.shape import SECTIONS, lock_schema

PAGE = FOLDER.with_suffix(".md").read_text()


@pytest.fixture(scope="module", autouse=True)
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with the locks of the page and the pairs that they name."""
    folder = tmp_path_factory.mktemp("page")
    write_inputs(folder)
    for name in LOCKS:
        (folder / f"{name}.lock").write_bytes((FOLDER / f"{name}.lock").read_bytes())
    with inside(folder):
        yield


def test_values_of_functions() -> None:
    assert json.loads((FOLDER / "vectors.json").read_text()) == vectors()


def test_files_that_the_locks_name() -> None:
    for name in set(FILES) - {"public.lengths"}:  # which is made with its lock, below
        assert Path(name).read_bytes() == (FOLDER / name).read_bytes(), name


@pytest.mark.parametrize("name", LOCKS)
def test_what_follows_from_a_lock(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lock = read_lock(f"{name}.lock")
    wanted = json.loads((FOLDER / "expected.json").read_text())[f"{name}.lock"]
    assert expected(lock) == wanted
    assert main(["verify", f"{name}.lock"]) == 0  # fingerprints, and all receipts
    assert lock.identity in capsys.readouterr().out


def _made(lock: Lock) -> dict[str, Any]:
    """Return what does not depend on the version that wrote a lock."""
    return {key: lock.content[key] for key in ("hash", *SECTIONS)}


def test_the_locks_are_those_of_their_settings(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    for name, lock in make_locks(tmp_path).items():
        assert _made(lock) == _made(read_lock(f"{name}.lock")), name
    name = "public.lengths"
    assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    assert json.loads((FOLDER / "lock.schema.json").read_text()) == lock_schema()


def test_the_page_names_every_file_and_function() -> None:
    for name in (*LOCKS, *FILES, *vectors()):
        assert re.search(rf"`{re.escape(name.removesuffix('.idx'))}\b", PAGE), name
