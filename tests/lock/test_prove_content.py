"""Tokens, loss targets, evaluation and the range of two records: `compare_records`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli

from megaindex import FormatError, IndexedDatasetWriter
from megaindex.builders.recipe import open_recipe
from megaindex.lock import compare_records, make_lock, read_lock
from megaindex.lock.lock_file import lock_text
from megaindex.recipe import read_recipe

RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 1, global_batch_size: 4}
sources:
  web: DATA/web
  talk: {path: DATA/talk, kind: finetuning, loss_mask: DATA/mask}
stages:
  main: {steps: 20, mix: {web: 3, talk: 1}}
evaluation: {source: DATA/chat, interval: 5, iterations: 1}
"""
LENGTHS = np.random.default_rng(5).integers(5, 40, 60)


def write_data(folder: Path, **seeds: int) -> None:
    """Pairs of the same lengths everywhere; their tokens depend on the seeds."""
    folder.mkdir()
    for name in ("web", "talk", "mask", "chat"):
        values = np.random.default_rng(seeds.get(name, 0)).integers(0, 2, int(LENGTHS.sum()))
        dtype = np.int16 if name == "mask" else np.uint16
        with IndexedDatasetWriter(str(folder / name), dtype) as writer:
            writer.add_documents(values.astype(dtype), LENGTHS)


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "first")


def recipe(name: str, data: str = "first", change: Callable[[str], str] = str) -> Any:
    Path(f"{name}.yaml").write_text(change(RECIPE.replace("DATA", data)))
    return read_recipe(f"{name}.yaml")


def checkpoint(made: Any, *, rounds: int = 40, **loading: Any) -> list[dict[str, Any]]:
    """The state after so many micro batches, as JSON."""
    pytest.importorskip("torch")
    from megaindex.loader import loader_of_recipe

    loader = loader_of_recipe(open_recipe(made), **loading)
    for _ in zip(range(rounds), loader, strict=False):
        pass
    return json.loads(json.dumps([loader.state_dict()]))  # type: ignore[no-any-return]


def records(made: Any, name: str) -> dict[str, Any]:
    tokens = make_lock(made, tokens=True).write(f"{name}.lock", overwrite=True)
    return {"lock": tokens, "checkpoint": checkpoint(made)}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of the first data, as every test makes them."""
    folder = tmp_path_factory.mktemp("unchanged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data(folder / "first")
        return records(recipe("first"), str(folder / "first"))


KINDS = [(a, b) for a in ("lock", "checkpoint") for b in ("lock", "checkpoint")]
INTERVAL = ("interval: 5", "interval: 6")
ITERATIONS = ("iterations: 1", "iterations: 2")
WITHOUT = ("evaluation: {source: second/chat, interval: 5, iterations: 1}", "")
TARGETS = ("loss_mask: second/mask", "labels: second/mask")


@pytest.mark.parametrize(
    ("seeds", "replaced", "named"),
    [
        ({}, ("", ""), None),
        ({"web": 1}, ("", ""), "source 0: "),
        ({"talk": 1}, ("", ""), "source 1: "),
        ({"mask": 1}, ("", ""), "source 1: "),
        ({"chat": 1}, ("", ""), "subset valid: source 0: "),
        ({}, TARGETS, "source 1: targets: "),
        ({}, INTERVAL, "subset valid: every: 5 in the first, 6 in the second"),
        ({}, ITERATIONS, "subset valid: samples: 4 in the first, 8 in the second"),
        ({}, WITHOUT, "subset valid: '4 samples' in the first, 'none' in the second"),
    ],
)
def test_tokens_targets_and_evaluation_are_compared(
    unchanged: dict[str, Any], seeds: dict[str, int], replaced: tuple[str, str], named: str | None
) -> None:
    write_data(Path("second"), **seeds)
    first = unchanged
    second = records(recipe("second", "second", lambda text: text.replace(*replaced)), "second")
    for a, b in KINDS:
        proof = compare_records(first[a], second[b])
        assert proof.holds == (named is None), (a, b, str(proof))
        assert proof.content.tokens == ("whole" if a == b == "lock" else "sampled")
        assert proof.content.not_compared == ()
        found = [text for text in proof.differences if named and text.startswith(named)]
        assert len(found) == (named is not None), (a, b, proof.differences)


def test_files_changed_since_the_lock_are_no_proof() -> None:
    """A lock holds hashes of its own files; a checkpoint of others is not compared with those."""
    lock = make_lock(recipe("first"), tokens=True).write("first.lock")
    shutil.rmtree("first")
    write_data(Path("first"), web=1)
    with pytest.raises(FormatError, match=r"first/web.bin: .* hashes in first.lock"):
        compare_records(lock, checkpoint(recipe("first")))


@pytest.mark.parametrize("content", ["sampled", "whole", None])
def test_what_a_side_does_not_hold_is_not_compared(content: Any) -> None:
    bare = make_lock(recipe("first")).write("bare.lock")
    lock = make_lock(recipe("first"), tokens=True).write("whole.lock")
    proof = compare_records(bare, lock)
    assert (proof.holds, proof.content.tokens) == (True, "none")
    assert "up to sample 80; tokens not compared" in str(proof).splitlines()[-1]
    states = checkpoint(recipe("first"), content=content)
    for other, level in ((bare, "none"), (lock, "sampled" if content else "none")):
        proof = compare_records(other, states)
        assert (proof.holds, proof.content.tokens) == (True, level)
        assert ("tokens not compared" in str(proof)) == (level == "none")
    proof = compare_records(states, checkpoint(recipe("first"), content="whole"))
    assert proof.content.tokens == (content or "none")


def test_hashes_of_other_chunks_or_lengths_are_not_compared() -> None:
    lock = make_lock(recipe("first"), tokens=True).write("first.lock")
    content = json.loads(json.dumps(lock.content))
    content["tokens"]["chunk_bytes"] *= 2
    Path("chunks.lock").write_bytes(lock_text(content))
    proof = compare_records(lock, read_lock("chunks.lock"))
    assert (proof.holds, proof.content.tokens) == (True, "none")
    assert "chunks of 67108864 and of 134217728 bytes" in proof.content.not_compared[0]
    write_data(Path("second"))
    with IndexedDatasetWriter("second/web", np.uint16, overwrite=True) as writer:
        writer.add_documents(np.zeros(1100, np.uint16), np.array([1000, 100]))
    other = make_lock(recipe("second", "second"), tokens=True).write("second.lock")
    proof = compare_records(lock, other)
    assert (proof.holds, proof.content.tokens) == (False, "none")
    assert any(text.startswith("fingerprint of source 0") for text in proof.differences)


def test_a_loader_holds_no_evaluation() -> None:
    pytest.importorskip("torch")
    from megaindex.lock import open_run

    run = {"data_path": "first/web", "sequence_length": 16, "order": "epoch", "eval_iters": 1,
           "split": "90,10,0", "train_iters": 6, "global_batch_size": 4}  # fmt: skip
    lock = make_lock(**run, tokens=True).write("run.lock")
    loader = open_run(lock, micro_batch_size=4)
    for _ in zip(range(3), loader, strict=False):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    proof = compare_records(lock, [state])
    assert (proof.holds, proof.content.tokens, proof.end) == (True, "sampled", 12)
    assert proof.content.not_compared == ("evaluation not compared: the second holds none",)
    state["content"][0]["tokens"]["sampled"] = "0" * 32
    assert not compare_records(lock, [state]).holds


BOTH = "main: {steps: 10, mix: {web: 3, talk: 1}}\n  rest: {steps: 10, mix: {web: 1, talk: 1}}"


@pytest.mark.parametrize(
    ("stages", "behind"),
    [
        ("main: {steps: 20, mix: {web: 3, talk: 1}}", 0),
        (BOTH, 1),
        ("main: {steps: 22, mix: {web: 3, talk: 1}}", 1),
        ("main: {steps: 8, mix: {web: 3, talk: 1}}", 1),
    ],
)
def test_the_verdict_names_its_range_and_what_differs_behind_it(stages: str, behind: int) -> None:
    """A record at step 8, and the run of another recipe, which begins alike."""
    plain = checkpoint(recipe("first"), rounds=16)
    changed = RECIPE.replace("main: {steps: 20, mix: {web: 3, talk: 1}}", stages)
    other = recipe("other", change=lambda _: changed.replace("DATA", "first"))
    for record in (make_lock(other).write("other.lock"), checkpoint(other, rounds=16)):
        proof = compare_records(plain, record)
        assert (proof.holds, proof.end, len(proof.behind)) == (True, 32, behind), proof
        assert "up to sample 32" in str(proof).splitlines()[-1]
        assert str(proof).count("behind sample 32") == behind


def test_a_changed_file_of_skipped_documents_is_named() -> None:
    Path("bad.ids").write_text("1 2 3")
    skipped = recipe(
        "skipped",
        change=lambda text: (
            text + "skip: [{steps: '3'}, {documents: bad.ids, source: web, from_step: 2}]\n"
        ),
    )
    Path("state.json").write_text(json.dumps(checkpoint(skipped)))
    make_lock(recipe("first")).write("first.lock")
    assert cli("prove", "first.lock", "state.json")[0] == 0
    for text in ("1 2 4", "1 2 3 4"):
        Path("bad.ids").write_text(text)
        status, out, err = cli("prove", "first.lock", "state.json")
        assert (status, out) == (2, "")
        assert "bad.ids: must hold the 3 documents that the checkpoint masks" in err
    Path("bad.ids").write_text("3 2 1 1")  # the same documents
    assert cli("prove", "first.lock", "state.json")[0] == 0
