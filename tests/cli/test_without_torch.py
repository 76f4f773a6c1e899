"""Every verb in an environment without torch: it does its work, or is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.locked_runs import RUNS, write_inputs

from megaindex.cli import VERBS, main
from megaindex.lock import open_run

CHILD = """
import contextlib, io, json, sys, traceback
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: (
    None if name.partition(".")[0] == "torch" else find(name, *more)
)
from megaindex.cli import guarded, main
from megaindex.lock import open_run

found = {}
for command in json.load(sys.stdin):
    verb, *words = command.split()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            is_verb = verb != "open_run"
            status = main([verb, *words]) if is_verb else guarded(verb, lambda: open_run(*words))
        except BaseException:
            status = traceback.format_exc()
    found[command] = [status, out.getvalue()]
assert "torch" not in sys.modules
print(json.dumps(found))
"""
PAIR = "--data-path data/web --seq-length 32"
DONE = {
    f"plan {RUNS['flags']} --micro-batch-size 8": 0,
    "plan --recipe run.yaml": 0,
    f"build {PAIR} --cache-dir cache": 0,
    f"export {PAIR} --epochs 1 --global-batch-size 8 --to neox --eval-iters 0": 0,
    f"audit {RUNS['flags']} --micro-batch-size 8": 0,
    "lock --recipe run.yaml": 0,
    f"lock {RUNS['flags']} --out flags.lock": 0,
    "lock --recipe lengths.yaml --out lengths.lock": 0,
    "trace --lock run.lock --step 3": 0,
    "prove run.lock run.lock": 0,
    "diff-order run.lock lengths.lock": 1,
    "report run.lock": 0,
    f"extend {PAIR} --epochs 1 --more-samples 10": 0,
    "tokenize out/text text.txt --format lines --tokenizer bytes": 0,
    "merge out/both data/web data/code": 0,
    "split data/web out/part{} --parts 2": 0,
    "import numpy tokens.npy out/imported --separator 0": 0,
    "verify run.lock": 0,
    "inspect data/web": 0,
    "schema": 0,
    "capture --out out/command.json -- bash launch.sh": 0,
    "demo --dir demo --root text --seq-length 32": 0,
}
REFUSED = (
    "open_run run.lock",
    "open_run flags.lock",
)
STATES = {
    "lock --recipe run.yaml --out state-run.lock": 0,
    "prove state-run.lock state.json": 0,
    "plan --state state.json": 0,
    "audit --state state.json": 0,
    "lock --state state.json --out new.lock": 0,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    write_inputs(folder)
    for name in ("out", "text"):
        (folder / name).mkdir()
    (folder / "text.txt").write_text("one\ntwo\n")
    (folder / "launch.sh").write_text("torchrun pretrain_gpt.py --seq-length 8 --data-path d\n")
    (folder / "text/words.py").write_text("some words " * 1000)
    np.save(folder / "tokens.npy", np.array([1, 2, 0, 3, 0]))
    return folder


def test_states_are_read_without_torch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from megaindex.loader import loader_of_recipe
    from megaindex.recipe import open_recipe, read_recipe

    monkeypatch.chdir(home)
    loader = loader_of_recipe(open_recipe(read_recipe("run.yaml")), data_parallel_size=1)
    next(iter(loader))
    Path("state.json").write_text(json.dumps(loader.state_dict()))
    found = without_torch(home, STATES)
    assert {command: each for command, each in found.items() if each[0]} == {}


def without_torch(home: Path, commands: Iterable[str]) -> dict[str, list[Any]]:
    """Status and output of each command, run one after the other in a process without torch."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(list(commands)), cwd=home, check=False,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found: dict[str, list[Any]] = json.loads(child.stdout)
    return found


@pytest.mark.slow
def test_every_verb_works_or_is_refused_without_torch(home: Path) -> None:
    assert {command.split()[0] for command in DONE} == set(VERBS)
    found = without_torch(home, [*DONE, *REFUSED])
    assert {command: found[command] for command in DONE if found[command][0] != DONE[command]} == {}
    for command in REFUSED:
        status, shown = found[command]
        assert (status, shown.count("\n"), "needs torch" in shown) == (2, 1, True), shown


def test_a_checkpoint_of_a_loader_is_proved_without_torch(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(home)
    assert main(["lock", *RUNS["flags"].split(), "--out", "loader.lock"]) == 0
    loader = open_run(home / "loader.lock")
    for _ in zip(range(8), loader, strict=False):
        pass
    (home / "loader.json").write_text(json.dumps(loader.state_dict()))
    command = "prove loader.lock loader.json"
    assert without_torch(home, [command])[command][0] == 0
