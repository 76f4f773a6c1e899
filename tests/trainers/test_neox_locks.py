"""Locks under the real code of GPT-NeoX, which ``NEOX`` names: see neox_locks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow  # `make trainers` runs it
def test_the_runs_are_the_locks_or_refused(tmp_path: Path) -> None:
    if "NEOX" not in os.environ:
        pytest.skip("NEOX does not name a checkout of GPT-NeoX")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "neox_locks.py"), os.environ["NEOX"],
         str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert len(found) == 4
    for kind, runs in found.items():
        for iteration, rows in runs["resumed"].items():
            assert rows == {"rows": 8 * (runs["steps"] - int(iteration)), "differ": 0}
        assert runs["workers"]["differ"] == 0
        for what, outcome in runs["wrong"].items():
            assert str(outcome).startswith("FormatError: "), (kind, what, outcome)
        if kind.endswith("epochs"):
            assert "must be" in runs["exact"] or "several passes" in runs["exact"]
        else:
            assert runs["exact"]["differ"] == 0
        for what, outcome in runs["too late"].items():
            plain = what.startswith(" ")
            expected = "the same rows" if plain else "InvalidArgument: "
            assert outcome.startswith(expected), (kind, what, outcome)
