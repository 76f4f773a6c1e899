"""A recipe from its file to plan, index and audit: the same run everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import cli
from corpora import write_corpus

from megaindex.build.recipe import open_recipe
from megaindex.errors import FormatError, InvalidArgument
from megaindex.recipe.recipe_file import read_recipe

RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources:
  web: web
  code: {path: code, order: window}
  chat: {path: chat, kind: finetuning, labels: chat_labels}
stages:
  stable: {steps: 40, mix: {web: 3, code: 1}}
  decay: {steps: 20, batching: random, mix: {web: 1, chat: 1}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    write_corpus(tmp_path / "web", rng.integers(1, 60, 80))
    write_corpus(tmp_path / "code", rng.integers(1, 60, 20))
    lengths = rng.integers(2, 14, 50)
    for name in ("chat", "chat_labels"):
        write_corpus(tmp_path / name, lengths)
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    return path


def remove(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).unlink()


def test_plan_index_and_audit_agree(run_file: Path) -> None:
    status, out, err = cli("plan", "--recipe", run_file, "--json")
    assert (status, err) == (0, "")
    plan = json.loads(out)
    opened = open_recipe(read_recipe(run_file))
    index = opened.index
    assert plan["train_iters"] == 60
    assert plan["samples_consumed"] == index.num_samples == 240
    source, sample = index.origin(np.arange(240))
    names = [s.corpus.name for s in opened.sources]
    for draw in plan["draws"]:
        steps = slice(draw["first_step"] * 4, draw["end_step"] * 4)
        mine = np.flatnonzero(source[steps] == names.index(draw["source"])) + steps.start
        assert mine.size == draw["samples"]
        per_epoch = opened.sources[names.index(draw["source"])].size.samples
        assert sample[mine[0]] == round(draw["epochs_begin"] * per_epoch)
        repeats = mine[sample[mine] >= per_epoch]
        assert draw["first_repeat"] == (repeats[0] // 4 if repeats.size else None)
    status, out, _ = cli("audit", "--recipe", run_file, "--json")
    assert status == 0
    audited = json.loads(out)
    assert (audited["steps"], audited["samples"], audited["past_steps"]) == (60, 240, 0)
    assert [row["path"] for row in audited["sources"]] == names
    status, out, _ = cli("audit", "--recipe", run_file, "--consumed-samples", 100, "--json")
    assert (status, json.loads(out)["past_steps"]) == (0, 25)
    status, _, err = cli("audit", "--recipe", run_file, "--subset", "valid")
    assert (status, "a recipe has training data only" in err) == (2, True)
    status, out, _ = cli("build", "--recipe", run_file)
    assert status == 0
    assert "240 samples of 16 tokens in 60 steps, from 3 source(s)" in out


def test_the_printed_plan_names_stages_and_repeats(run_file: Path) -> None:
    status, out, _ = cli("plan", "--recipe", run_file)
    assert status == 0
    for words in ("train_iters 60", "stable", "0 … 39", "decay", "40 … 59", "every rank reads 120"):
        assert words in out
    status, _, err = cli("plan", "--recipe", run_file, "--check")
    assert status == 1
    assert "check: web repeats from step 53 on" in err


def test_no_sample_of_instructions_crosses_a_document(run_file: Path) -> None:
    opened = open_recipe(read_recipe(run_file))
    spans = opened.index.locate(np.arange(160, 240))
    chat = spans.source == 2
    lengths = opened.datasets[2].sequence_lengths
    assert chat.sum() > 40
    assert (spans.offset[chat] == 0).all()
    assert (spans.length[chat] == lengths[spans.document[chat]]).all()


def test_labels_must_fit_their_corpus(run_file: Path) -> None:
    remove(run_file.parent / "chat_labels")
    write_corpus(run_file.parent / "chat_labels", np.full(50, 3))
    with pytest.raises(FormatError, match=r"one entry for each token; sequence \d+ has 3"):
        open_recipe(read_recipe(run_file))
    remove(run_file.parent / "chat_labels")
    write_corpus(run_file.parent / "chat_labels", np.full(49, 3))
    with pytest.raises(FormatError, match="one sequence for each of its 50, it has 49"):
        open_recipe(read_recipe(run_file))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--recipe", "run.yaml", "--epochs", "1"),
            "--recipe describes the whole run, --epochs too",
        ),
        (("--recipe", "none.yaml"), "none.yaml does not exist"),
        (("--recipe", "run.yaml", "--nanotron-config", "x"), "--nanotron-config too"),
    ],
)
def test_a_recipe_stands_alone(
    run_file: Path, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_file.parent)
    for verb in ("plan", "audit"):
        status, _, err = cli(verb, *words)
        assert status == 2
        assert says in err


def test_sources_without_files_are_planned_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.split("sources", maxsplit=1)[0] + "sources: {web: {tokens: 5000}}\n"
                    "stages: {one: {epochs: 2, mix: {web: }}}\n")  # fmt: skip
    status, out, _ = cli("plan", "--recipe", path, "--json")
    assert status == 0
    assert json.loads(out)["samples_consumed"] == 4999 // 16 * 2 // 4 * 4
    with pytest.raises(InvalidArgument, match="has tokens to plan with and no path to read"):
        open_recipe(read_recipe(path))
    assert cli("build", "--recipe", path)[0] == 2
