"""The identity of a run: what decides samples and steps enters it, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex import Skip, build_blend
from megaindex.index.description import describe_index
from megaindex.lock import make_lock, read_lock, report_run, run_of_lock
from megaindex.recipe import read_recipe
from megaindex.run.identity import canonical_index

RUN = {"sequence_length": 16, "train_iters": 30, "global_batch_size": 4, "eval_iters": 0}
SPLIT = {"split": "1,0,0"}
RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources: {web: web, code: code}
stages:
  main: {steps: 30, mix: {web: 2, code: 1}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number, name in enumerate(("web", "code")):
        write_corpus(tmp_path / name, np.random.default_rng(number).integers(1, 60, 40), np.uint16)
    np.save(tmp_path / "ids.npy", np.arange(7))
    np.save(tmp_path / "others.npy", np.arange(1, 8))
    (tmp_path / "run.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def identity(**changes: Any) -> str:
    given = {"data_path": [1, "web", 2, "code"], **RUN, **SPLIT, **changes}
    return make_lock(**given).write("run.lock", overwrite=True).identity


def test_what_does_not_decide_samples_and_steps_does_not_enter(folder: Path) -> None:
    first = identity()
    assert len(first) == 32
    ranks = {"micro_batch_size": 2, "data_parallel_size": 2}
    assert identity(**ranks, global_batch_size=None) == first
    there = folder / "elsewhere"
    there.mkdir()
    for path in folder.glob("*.*"):
        shutil.copy(path, there)
    assert read_lock(there / "run.lock").identity == first
    paths = [1, str(there / "web"), 2, str(there / "code")]
    assert make_lock(data_path=paths, **RUN, **SPLIT).write("moved.lock").identity == first


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 5},
        {"train_iters": 31},
        {"global_batch_size": 2, "train_iters": 60},
        {"sequence_length": 15},
        {"order": "neox"},
        {"data_path": [2, "web", 1, "code"]},
        {"data_path": [2, "code", 1, "web"]},
        {"split": "9,1,0"},
        {"skip": Skip(steps=3)},
        {"skip": Skip(steps=3, move=True)},
        {"skip": Skip(documents="ids.npy", source="web", from_step=2)},
    ],
)
def test_what_decides_them_enters(changes: dict[str, Any]) -> None:
    assert identity(**changes) != identity()


def test_documents_of_a_mask_enter_by_their_content() -> None:
    def masked(name: str) -> str:
        return identity(skip=Skip(documents=name, source="web"))

    assert masked("ids.npy") != masked("others.npy")
    shutil.copy("ids.npy", "again.npy")
    assert masked("ids.npy") == masked("again.npy")


def test_lengths_of_a_source_enter(folder: Path) -> None:
    first = identity()
    for suffix in ("bin", "idx"):
        (folder / f"web.{suffix}").unlink()
    write_corpus(folder / "web", np.full(40, 30), np.uint16)
    assert identity() != first


def test_a_keyed_order_has_no_end(folder: Path) -> None:
    corpus = str(folder / "web")
    first, longer = (
        describe_index(build_blend([corpus, corpus], sequence_length=16, seed=3, order="epoch",
                                   weights=[1, 1], num_samples=n))
        for n in (80, 400)
    )  # fmt: skip
    assert first["common"] != longer["common"] or first["sources"] != longer["sources"]
    ours, theirs = (canonical_index(node, ()) for node in (first, longer))
    assert ours["sources"] == theirs["sources"]
    arrays = describe_index(build_blend([corpus], sequence_length=16, order="neox",
                                        weights=[1], num_samples=40))  # fmt: skip
    assert canonical_index(arrays, ())["sources"][0]["epochs"] >= 1


@pytest.mark.parametrize(("scale", "same"), [(1, True), (3, True), (2.5, False)])
def test_shares_of_a_stage_enter_in_proportion(scale: float, same: bool) -> None:
    first = make_lock(read_recipe("run.yaml")).write("first.lock").identity
    ratio = f"web: {2 * scale:g}, code: {scale if same else 1:g}"
    Path("run.yaml").write_text(RECIPE.replace("web: 2, code: 1", ratio))
    assert (make_lock(read_recipe("run.yaml")).write("second.lock").identity == first) == same


def test_a_blend_by_divisors_is_a_stage(folder: Path) -> None:
    """Weights in the proportion 2 to 1, as integers and with a common divisor."""
    source = {"order": "epoch", "name": "a", "epochs": 3, "samples": 9}
    table = {"common": source, "sources": [{}, {"name": "b"}]}
    stage = {"samples": 12, "rule": "stratified", "shares": [2, 1]}
    blend = {"order": "blend", "rule": "divisor", "weights": [4, 2], "samples": 12, **table}
    stages = {"order": "stages", "stages": [stage], **table}
    assert canonical_index(blend, ()) == canonical_index(stages, ())


def test_ranges_that_continue_are_one() -> None:
    leaf = {"order": "arrays", "samples": 50}

    def sequence(*parts: list[list[int]]) -> Any:
        parts_of = [{"ranges": ranges, "index": leaf} for ranges in parts]
        return canonical_index({"order": "sequence", "parts": parts_of}, ())

    whole = sequence([[0, 30, 1]])
    assert sequence([[0, 10, 1], [10, 30, 1]]) == whole
    assert sequence([[0, 10, 1]], [[10, 10, 1], [10, 30, 1]]) == whole
    assert sequence([[0, 10, 1], [11, 31, 1]]) != whole
    assert sequence([[0, 10, 2], [10, 20, 1]]) != sequence([[0, 20, 1]])


def test_equal_identities_have_equal_samples() -> None:
    """By names and ranks that differ, the runs are the same at every position."""
    make_lock(read_recipe("run.yaml")).write("first.lock")
    Path("run.yaml").write_text(RECIPE.replace("main:", "other:").replace("micro_batch_size: 2, "
                                "data_parallel_size: 2", "global_batch_size: 4"))  # fmt: skip
    make_lock(read_recipe("run.yaml")).write("second.lock")
    first, second = (run_of_lock(f"{name}.lock") for name in ("first", "second"))
    assert read_lock("first.lock").identity == read_lock("second.lock").identity
    assert first.step_bounds.tolist() == second.step_bounds.tolist()
    ids = np.arange(first.num_samples)
    for ours, theirs in zip(first.index.locate(ids), second.index.locate(ids), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_commands_print_it() -> None:
    words = ("--data-path", "web", "--seq-length", 16, "--train-iters", 5)
    words = (*words, "--global-batch-size", 4, "--split", "1,0,0")
    status, out, _ = cli("lock", *words, "--out", "a.lock", "--json")
    expected = read_lock("a.lock").identity
    assert status == 0
    assert json.loads(out)["identity"] == expected
    status, out, _ = cli("lock", *words, "--out", "b.lock")
    assert f"identity of the run {expected}" in out
    status, out, _ = cli("verify", "b.lock", "--json")
    assert [each["identity"] for each in json.loads(out)["reports"]] == [expected]
    report = report_run("a.lock")
    assert report.identity == report.to_json()["identity"] == expected
    assert expected in report.to_markdown()
