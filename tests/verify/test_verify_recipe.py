"""`megaindex verify` of a recipe and of every pair that it names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.cli import main
from megaindex.corpus.inspect import inspect
from megaindex.errors import InvalidArgument
from megaindex.format.findings import Finding, Report
from megaindex.verify.verify import verify_all

RECIPE = """
sequence_length: 8
batch: {global_batch_size: 2}
evaluation: {source: valid}
sources:
  web: data/web
  again: data/../data/web
  chat: {path: chat, kind: finetuning, labels: chat_labels}
  side: {path: chat, kind: finetuning, loss_mask: chat_mask}
stages:
  one: {steps: 2, mix: {web: 0.5, chat: 0.5}}
"""


def write_labels(prefix: Path, lengths: list[int]) -> None:
    with megaindex.IndexedDatasetWriter(prefix, np.int32) as writer:
        for length in lengths:
            writer.add_document(np.full(length, -100))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe of web, validation, and chat with labels and a mask."""
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data/web", [40, 30, 20], np.uint16, eod=7)
    write_corpus(tmp_path / "valid", [30], np.uint16, eod=7)
    write_corpus(tmp_path / "chat", [5, 6, 4], np.uint16, eod=7)
    write_labels(tmp_path / "chat_labels", [5, 6, 4])
    write_labels(tmp_path / "chat_mask", [5, 6, 4])
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    return path


def only(reports: list[Report]) -> Finding:
    (finding,) = [finding for report in reports for finding in report.findings]
    return finding


@pytest.mark.parametrize("full", [False, True])
def test_a_sound_recipe(recipe: Path, full: bool) -> None:
    """Ids and document ends are checked in tokens, not in labels."""
    more = {"vocab_size": 200, "eod": 7} if full else {}
    first, *pairs = verify_all(recipe, full=full, **more)
    assert (first.kind, first.path) == ("recipe", str(recipe))
    assert first.counted == {"sources": 5, "stages": 1, "pairs": 5}
    names = ["data/web", "chat", "valid", "chat_labels", "chat_mask"]
    assert [report.path for report in pairs] == [str(recipe.parent / name) for name in names]
    assert all(report.is_clean and report.full == full for report in pairs)
    assert first.is_clean


def test_a_pair_that_is_given_too_is_checked_once(recipe: Path) -> None:
    from megaindex.verify.verify import checks

    paths = [str(check) for check in checks([recipe, recipe.parent / "chat", recipe])]
    assert paths.count(str(recipe.parent / "chat")) == 1
    assert len(paths) == 7


def test_damage_of_a_pair_is_in_its_report(recipe: Path) -> None:
    with open(recipe.parent / "valid.bin", "r+b") as file:
        file.truncate(20)
    first, *pairs = verify_all(recipe)
    damaged = [report.path for report in pairs if not report.is_clean]
    assert damaged == [str(recipe.parent / "valid")]
    assert {finding.rule for finding in first.findings} <= {"source", "layout"}


@pytest.mark.parametrize(
    ("old", "new", "where", "found"),
    [
        ("steps: 2", "stops: 2", "stages.one", "unknown setting stops"),
        ("steps: 2", "steps: two", "", ""),
        ("steps: 2", "steps: 2, steps: 3", "the file", "steps is given twice"),
        ("mix: {web: 0.5, chat: 0.5}", "mix: {}", "stage one", "has no stream"),
        ("{web: 0.5, chat: 0.5}", "{webb: 0.5}", "stage one", "unknown source webb"),
        ("sequence_length: 8\n", "", "the file", "sequence_length is missing"),
        ("kind: finetuning, labels", "labels", "source chat", "are for kind finetuning"),
        ("sequence_length: 8", "sequence_length: 8: 9", "", "is not YAML"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_a_finding(
    recipe: Path, old: str, new: str, where: str, found: str
) -> None:
    recipe.write_text(RECIPE.replace(old, new))
    (report,) = verify_all(recipe)
    finding = only([report])
    assert (finding.rule, finding.severity, finding.file) == ("recipe", "error", str(recipe))
    assert where in finding.where
    assert found in finding.found
    assert finding.repair
    with pytest.raises(InvalidArgument):
        inspect(recipe)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[1, 2]", b"", b"a: &a [*a, *a]", b"0"])
def test_other_content_is_a_finding(recipe: Path, content: bytes) -> None:
    recipe.write_bytes(content)
    assert only(verify_all(recipe)).rule == "recipe"


@pytest.mark.parametrize(
    ("name", "rule", "where"),
    [
        ("data/web", "missing-path", "source web"),
        ("chat_labels", "missing-labels", "source chat"),
        ("chat_mask", "missing-loss-mask", "source side"),
        ("valid", "missing-path", "source validation"),
    ],
)
def test_a_pair_that_is_not_there(recipe: Path, name: str, rule: str, where: str) -> None:
    for suffix in (".bin", ".idx"):
        os.unlink(f"{recipe.parent / name}{suffix}")
    first, *pairs = verify_all(recipe)
    assert (first.findings[0].rule, first.findings[0].where) == (rule, where)
    assert len(pairs) == 4
    assert all(report.is_clean for report in pairs)


def test_labels_of_other_lengths(recipe: Path) -> None:
    for suffix in (".bin", ".idx"):
        os.unlink(recipe.parent / f"chat_labels{suffix}")
    write_labels(recipe.parent / "chat_labels", [5, 7, 4])
    finding = only(verify_all(recipe))
    assert (finding.rule, finding.where) == ("source", "source chat")
    assert "sequence 1 has 7 and 6 tokens in the text" in finding.found


def test_a_float_token_type(recipe: Path) -> None:
    for suffix in (".bin", ".idx"):
        os.unlink(recipe.parent / f"valid{suffix}")
    with megaindex.IndexedDatasetWriter(recipe.parent / "valid", np.float32) as writer:
        writer.add_document(np.arange(30))
    first, *_ = verify_all(recipe)
    assert [(f.rule, f.where) for f in first.findings] == [("token-type", "source validation")]


def test_stages_that_cannot_be_laid_out(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("steps: 2", "first_step: 3, steps: 2"))
    finding = only(verify_all(recipe))
    assert (finding.rule, finding.where) == ("layout", "the file")
    assert "is to begin with step 3" in finding.found


def test_sources_without_files(recipe: Path) -> None:
    recipe.write_text(
        "{sequence_length: 8, batch: {global_batch_size: 2}, sources: {web: {tokens: 900}}, "
        "stages: {one: {steps: 2, mix: {web: }}}}"
    )
    (report,) = verify_all(recipe)
    assert report.is_clean
    assert report.counted["pairs"] == 0


def test_eod_is_in_the_vocabulary(recipe: Path) -> None:
    with pytest.raises(InvalidArgument, match="from 0 to 199, got 200"):
        verify_all(recipe, full=True, vocab_size=200, eod=200)


def test_the_command(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["verify", str(recipe), "--full", "--vocab-size", "200", "--eod", "7", "--workers", "1"]
        )
        == 0
    )
    assert "run.yaml: recipe, 5 sources, 1 stage, 5 pairs" in capsys.readouterr().out
    recipe.write_text("sources: {")
    assert main(["verify", str(recipe), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert report["findings"][0]["rule"] == "recipe"
    assert main(["verify", str(recipe.parent / "none.yaml")]) == 2


def test_inspect_describes_its_pairs(recipe: Path) -> None:
    assert [Path(each.path).name for each in inspect(recipe)] == [
        "web", "chat", "valid", "chat_labels", "chat_mask",
    ]  # fmt: skip
