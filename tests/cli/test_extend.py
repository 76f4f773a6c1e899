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
    assert "the old order would give 0x" in text


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
