"""Files of release 1.0: each is read, and gives what it gave then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.folders import inside
from support.release_files import FOLDER, facts


def test_files_of_the_release_are_read_as_then(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shutil.copytree(FOLDER, tmp_path / "release")
    with inside(tmp_path / "release"):
        found = json.loads(json.dumps(facts()))
    expected = json.loads((FOLDER / "expected.json").read_text())
    for name, value in expected.items():
        assert found[name] == value, name
