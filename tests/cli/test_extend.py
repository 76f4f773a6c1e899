"""Output of ``megaindex extend``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.cli import main


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    return write_corpus(tmp_path / "c", np.random.default_rng(1).integers(1, 200, 400))


def options(corpus: Any, *more: object) -> list[str]:
    path = ["extend", "--data-path", corpus.path_prefix, "--seq-length", 16]
    return [str(part) for part in (*path, *more)]


def test_a_neox_run(corpus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    per_epoch = (corpus.num_tokens - 1) // 16
    arguments = options(
        corpus, "--order", "neox", "--num-samples", per_epoch + 1,
        "--consumed-samples", per_epoch, "--more-epochs", "0.25",
    )  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["past_unchanged"] is True
    assert report["receipt_of_the_past"]["samples"] == report["consumed_samples"] == per_epoch
    assert report["more_samples"] == report["from_the_old_index"] == corpus.num_tokens // 64
    assert report["further_epochs"] == []
    before, after = report["coverage_before"], report["coverage_after"]
    in_order = report["coverage_after_in_the_old_order"]
    for shares in (before, after, in_order):
        assert sum(shares.values()) == pytest.approx(1)
    assert before["seen_0"] == pytest.approx(0.25, abs=0.03)
    assert after["seen_0"] < 0.03
    assert in_order["seen_0"] > 0.1

    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert f"order neox: {per_epoch:,} samples consumed, receipt" in text
    assert "(unchanged)" in text
    assert f"  (the old order would give 0x {100 * in_order['seen_0']:.2f} %  1x" in text


def test_further_epochs(corpus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = options(corpus, "--order", "megatron", "--epochs", "1", "--more-samples", 3000)
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    per_epoch = (corpus.num_tokens - 1) // 16
    assert report["consumed_samples"] == per_epoch
    assert report["from_the_old_index"] == 0
    assert [epoch["samples"] for epoch in report["further_epochs"]] == [per_epoch, 3000 - per_epoch]
    assert report["coverage_after_in_the_old_order"] is None
    assert main(arguments) == 0
    assert "samples of a further epoch, seed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-samples", 9, "--more-epochs", "x"], "--more-epochs must be a positive number"),
        (["--num-samples", 9, "--more-samples", 0], "--more-samples must be at least 1"),
        (["--epochs", "y", "--more-samples", 1], "--epochs must be a positive number"),
        (
            ["--num-samples", 9, "--more-samples", 1, "--consumed-samples", 10**7],
            "consumed_samples must be from 0",
        ),
    ],
)
def test_bad_input(
    corpus: Any, more: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(corpus, *more)) == 2
    assert message in capsys.readouterr().err


def test_the_settings_of_order_packed(corpus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--max-documents", 2, "--long-documents", "skip")
    common = ("--epochs", 1, "--more-epochs", 1)
    assert main([*options(corpus, "--order", "packed", *few, *common), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    order = megaindex.PackedOrder(max_documents=2, long_documents="skip")
    index = megaindex.build_index(corpus, sequence_length=16, order=order, epochs=1)
    assert report["consumed_samples"] == report["more_samples"] == index.num_samples
    assert report["coverage_before"]["seen_0"] == index.cut_tokens / corpus.num_tokens > 0.5
    assert main(options(corpus, "--order", "neox", *few, *common)) == 2
    assert "--max-documents is a setting of order packed" in capsys.readouterr().err


def blend_with_changes(tmp_path: Path, *more: object) -> list[str]:
    for number, name in enumerate(("web", "code", "math")):
        rng = np.random.default_rng(number)
        write_corpus(tmp_path / name, rng.integers(1, 90, 60 if number else 400))
    blend = ["extend", "--data-path", 0.9, tmp_path / "web", 0.1, tmp_path / "code"]
    shape = ["--seq-length", 16, "--num-samples", 900, *more]
    return [str(part) for part in (*blend, *shape)]


def test_a_blend_that_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web, code, math = (str(tmp_path / name) for name in ("web", "code", "math"))
    changes = ["--change", 600, 0.5, web, 0.5, math, "--change", 700, 1, code]
    arguments = blend_with_changes(tmp_path, *changes, "--more-samples", 200)
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["past_unchanged"] is True
    assert report["receipt_of_the_past"]["samples"] == report["consumed_samples"] == 600
    assert report["changes"] == [
        {"first_sample": 600, "samples": 100, "sources": {web: 50, math: 50}},
        {"first_sample": 700, "samples": 200, "sources": {code: 200}},
    ]
    first = {row["data_path"]: row.get("from_its_first_epoch") for row in report["sources"]}
    assert first == {web: None, code: None, math: 50}
    rows = {row["data_path"]: row for row in report["sources"]}
    assert rows[web]["from_the_old_index"] == 50
    (further,) = rows[code]["further_epochs"]
    assert rows[code]["from_the_old_index"] + further["samples"] == 200
    assert report["coverage_after_in_the_old_order"] is None
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert f"from sample 700: 200 of {code}" in text
    assert "and 50 of the first epoch of new sources" in text


def test_the_further_epochs_of_a_blend_name_their_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = blend_with_changes(tmp_path, "--more-samples", 1800)
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    added = {row["data_path"]: row["from_the_old_index"] for row in report["sources"]}
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for epoch in report["further_epochs"]:
        added[epoch["source"]] += epoch["samples"]
        said = f"then {epoch['samples']:,} samples of a further epoch of {epoch['source']}, seed"
        assert f"{said} {epoch['seed']}\n" in text
    assert added == {str(tmp_path / "web"): 1620, str(tmp_path / "code"): 180}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--change", "x", 1, "web"], "write the samples consumed, then a weight"),
        (["--change", 10, "web", "code"], "write a weight before every prefix"),
        (["--change", 10, 1, "web", 2, "web"], "a prefix is listed twice"),
        (["--change", 10, 1, "w", "--consumed-samples", 9], "--consumed-samples and --change"),
        (["--change", 10, 1, "nowhere"], "neither"),
    ],
)
def test_wrong_changes(
    tmp_path: Path, more: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(blend_with_changes(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
