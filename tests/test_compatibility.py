"""What an earlier version wrote, printed and served: golden/make_compatibility.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if os.environ.get("MEGAINDEX_SANITIZE") == "1":
    pytest.skip("torch does not run under the sanitizers", allow_module_level=True)

from support import compatibility_runs as runs
from support.command_line import cli

GOLDEN = json.loads((Path(__file__).parent / "golden" / "compatibility.json").read_text())


def test_every_group_is_held() -> None:
    assert set(GOLDEN) == {"made_by", *runs.GROUPS}


@pytest.mark.parametrize("group", runs.GROUPS)
def test_nothing_changed(group: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if group == "megatron_caches":
        pytest.importorskip("megatron.core")
    found = runs.run(group, tmp_path)
    differing = {
        case: (found.get(case, "missing"), expected)
        for case, expected in GOLDEN[group].items()
        if found.get(case, "missing") != expected
    }
    assert differing == {}
    assert set(found) == set(GOLDEN[group])


@pytest.mark.parametrize("name", runs.SAMPLERS)
def test_samplers_go_on_from_earlier_states(name: str) -> None:
    case = GOLDEN["samplers"][name]
    assert runs.rest_of(name, case["states"]) == case["rest"]


@pytest.mark.parametrize("recipe", runs.RECIPES)
def test_recipes_go_on_from_earlier_states(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.write_inputs()
    case = GOLDEN["recipe_runs"][recipe]
    assert runs.recipe_rest(recipe, case["states"]) == case["rest"]


@pytest.mark.parametrize("words", [["megaindex", "plan"], ["megaindex.plan"]])
def test_modules_run_as_commands(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.write_inputs()
    flags: list[Any] = [*runs.PLANS["split"], "--json"]
    result = subprocess.run(
        [sys.executable, "-m", *words, *map(str, flags)], capture_output=True, text=True, check=True
    )
    assert (0, result.stdout, "") == cli("plan", *flags)
