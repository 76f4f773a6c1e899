"""Runs opened in Python by whatever names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_run_words import RECIPE, SCRIPT
from support.command_line import cli
from support.corpora import write_corpus

import megaindex
from megaindex.door import pairs_of
from megaindex.errors import InvalidArgument
from megaindex.recipe import read_recipe
from megaindex.run import from_settings

pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, size in (("web", 40), ("code", 20)):
        write_corpus(tmp_path / name, [9 + k % 7 for k in range(size)])
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "launch.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAIRS: dict[str, Any] = {
    "sequence_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "data_parallel_size": 2,
    "train_iters": 9,
    "split": "100,0,0",
}
RUNS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "recipe": (("run.yaml",), {}),
    "script": (("launch.sh",), {}),
    "pairs": ((3, "web", 1.0, "code"), PAIRS),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_and_its_lock_answer_alike(folder: Path, kind: str) -> None:
    words, settings = RUNS[kind]
    run = megaindex.open_run(*words, **settings)
    assert isinstance(run, megaindex.OpenedRun)
    lock = run.lock("run.lock")
    locked = megaindex.open_run("run.lock")
    assert locked.make_lock().identity == lock.identity
    assert run.plan().train_iters == locked.plan().train_iters == 9
    assert run.run.num_samples == locked.run.num_samples == 36
    ids = np.arange(36)
    for ours, theirs in zip(run.index().locate(ids), locked.index().locate(ids), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    seen = [
        [source["tokens_by_times_seen"] for source in each.audit().to_json()["sources"]]
        for each in (run, locked)
    ]
    assert seen[0] == seen[1]
    for rank in range(2):
        loaders = [
            each.loader(data_parallel_rank=rank, data_parallel_size=2) for each in (run, locked)
        ]
        batches = [[batch["tokens"].numpy() for batch in loader] for loader in loaders]
        np.testing.assert_array_equal(*batches)
        assert len(batches[0]) == 9
        states = [loader.state_dict() for loader in loaders]
        assert states[0]["identity"] == states[1]["identity"] == lock.identity
        assert states[0]["receipt"] == states[1]["receipt"]


def test_a_script_and_its_settings_are_one_run(folder: Path) -> None:
    script, pairs = (megaindex.open_run(*words, **more) for words, more in
                     (RUNS["script"], RUNS["pairs"]))  # fmt: skip
    assert script.make_lock().identity == pairs.make_lock().identity
    longer = megaindex.open_run("launch.sh", train_iters=12)  # settings override a file's
    assert longer.plan().train_iters == 12


def test_what_does_not_belong_together_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="run.yaml is a recipe"):
        megaindex.open_run("run.yaml", seed=3)
    with pytest.raises(InvalidArgument, match="has data_path too"):
        megaindex.open_run("web", data_path="code", **PAIRS)
    with pytest.raises(InvalidArgument, match="open_run needs what names the run"):
        megaindex.open_run()
    with pytest.raises(InvalidArgument, match="unknown setting sed; did you mean seed"):
        megaindex.open_run("web", sed=3)
    run = megaindex.open_run("run.yaml")
    with pytest.raises(InvalidArgument, match=r"name ends in \.lock"):
        run.lock("run.txt")
    run.lock("run.lock")
    with pytest.raises(InvalidArgument, match="without hashes of tokens"):
        megaindex.open_run("run.lock").lock("other.lock", tokens=True)
    megaindex.open_run("run.lock").lock("other.lock")
    assert megaindex.lock.verify_lock("other.lock").is_clean


def test_pairs_of_a_recipe_are_each_named_once(folder: Path) -> None:
    Path("more.yaml").write_text(
        "sequence_length: 16\nbatch: {global_batch_size: 4}\n"
        "sources: {a: web, b: {path: web}, c: {tokens: 900}}\n"
        "evaluation: {source: code}\nstages: {all: {steps: 1, mix: {a: 1, b: 1, c: 1}}}\n"
    )
    made = read_recipe("more.yaml")
    assert [Path(path).name for path in pairs_of(made)] == ["web", "code"]
    alone = pairs_of(replace(made, evaluation=None))
    assert [Path(path).name for path in alone] == ["web"]


def test_an_audit_prints_as_the_command_prints_it(folder: Path) -> None:
    run = megaindex.open_run(3, "web", 1, "code", **PAIRS)
    words = "--seq-length 16 --micro-batch-size 2 --data-parallel-size 2 --train-iters 9"
    status, out, _ = cli("audit", "3", "web", "1", "code", *words.split(), "--global-batch-size",
                         "4", "--split", "100,0,0")  # fmt: skip
    assert status == 0
    assert "samples" in out
    assert out.split() == str(run.audit()).split()

    def sources(text: str) -> set[str]:
        """Return the sources that have a row."""
        return {"web", "code"} & {line.split()[0] for line in text.splitlines() if line.strip()}

    assert sources(out) == {"web", "code"}
    assert not sources(str(megaindex.open_run("web", **PAIRS).audit()))  # a row of one says no more


@pytest.mark.parametrize("kind", ["recipe", "settings", "lock"])
def test_a_loader_lists_no_steps(folder: Path, kind: str) -> None:
    """The position of a step follows from a formula; of a run of few steps too."""
    count = 10**3 if kind == "lock" else 10**7
    Path("run.yaml").write_text(RECIPE.replace("steps: 9", f"steps: {count}"))
    settings = {**PAIRS, "train_iters": count, "order": "epoch"}
    opened = megaindex.open_run("web", **settings) if kind != "recipe" else (
        megaindex.open_run("run.yaml"))  # fmt: skip
    if kind == "lock":
        opened.lock("run.lock")
        opened = megaindex.open_run("run.lock")
    loader = opened.loader(data_parallel_size=2)
    next(iter(loader))
    assert len(loader) == count
    assert opened.run.steps.listed is None
    assert "bounds" not in vars(opened.run.steps)


def test_the_run_of_a_loader_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the identity in its first checkpoint."""
    words, settings = RUNS["pairs"]
    run = megaindex.open_run(*words, **settings)
    lock = run.make_lock()
    loader = run.loader(data_parallel_size=2)
    next(iter(loader))
    monkeypatch.setattr(from_settings, "build_index", None)
    assert loader.state_dict()["identity"] == lock.identity
