"""The demo as a user runs it, on a small corpus."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.cli import demo, main
from megaindex.cli.demo import ServedCounts, read_all_ranks
from megaindex.format.findings import Report


def text_tree(root: Path) -> None:
    for k in range(40):
        path = root / f"package{k % 3}" / f"module{k}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# module {k}\n" + "x = 1\n" * (50 * k % 700))


def test_demo_checks_one_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    clock = SimpleNamespace(perf_counter=itertools.count(0, 0.04).__next__)
    monkeypatch.setattr(demo, "time", clock)
    text_tree(tmp_path / "text")
    for length in ("32", "64"):  # a second run replaces what the first one left
        status = main(
            ["demo", "--dir", str(tmp_path / "demo"), "--root", str(tmp_path / "text"),
             "--seq-length", length]
        )  # fmt: skip
        out, err = capsys.readouterr()
        assert status == 0, err
        assert "train_iters" in out
        assert "check of one epoch" in out
        assert "tokens served twice or more" in out
        assert "built by" in out
        assert "from the cache" in out
        assert "is what the lock says" in out
        said = " ".join(out.split())
        assert "2 plan 40.0 ms one epoch on 8 ranks" in said
        assert f"4 read 0.12 s 8 ranks read {73_728 // int(length):,} samples" in said
        assert "counted every token, 2 M tokens/s" in said  # 73,728 in 0.04 s
        spans = out.partition("rank 0 reads")[2]
        assert "document" in spans
        assert spans.count(".py") == 3
        assert out.count("tokens of …/") == 3
        assert len(list((tmp_path / "demo/cache").iterdir())) == 1
        boxes = [line.rstrip() for line in out.splitlines() if line.strip()[:1] in {*"╭│╰"}]
        assert 60 <= max(map(len, boxes)) <= 80


def test_demo_ends_where_a_check_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text_tree(tmp_path / "text")
    words = ["demo", "--dir", str(tmp_path / "demo"), "--root", str(tmp_path / "text"),
             "--seq-length", "32"]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Report, "is_clean", False)
        assert main(words) == 2
        assert re.search("the check of step [0-9]+ of .*run.lock failed", capsys.readouterr().err)
    monkeypatch.setattr(ServedCounts, "matches", lambda *_: False)
    assert main(words) == 2
    said = "the check of one epoch failed: token counts that differ from the corpus"
    assert said in capsys.readouterr().err


def test_counts_show_repeats_and_other_tokens(tmp_path: Path) -> None:
    dataset = write_corpus(tmp_path / "c", [30, 50, 9], np.uint16)
    index = megaindex.build_index(dataset, sequence_length=8, seed=1, epochs=2)
    common = {"micro_batch_size": 1, "data_parallel_size": 2, "vocabulary": 100}
    one = megaindex.build_index(dataset, sequence_length=8, seed=1)
    served = read_all_ranks(one, dataset, num_samples=10, **common)
    assert served.matches(dataset)
    assert served.times_token.max() == 1
    assert served.times_token.sum() == 80
    twice = read_all_ranks(index, dataset, num_samples=22, **common)
    assert twice.times_token.max() == 2  # two epochs repeat tokens
    other = write_corpus(tmp_path / "d", [50, 30, 9], np.uint16)
    served.times_token[:] = 0
    assert not served.matches(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown verb 'nonsense'"),
        (["demo", "--seq-length", "100000000"], "one sample"),
        (["build", "--data-path", "no/such", "--seq-length", "8", "--cache-dir", "c"], "no/such"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "demo":
        text_tree(tmp_path / "text")
        arguments = [*arguments, "--root", "text"]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_build_reports_what_it_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write_corpus(tmp_path / "c", [300, 50], np.uint16)
    arguments = ["build", "--data-path", dataset.path_prefix, "--seq-length", "8"]
    assert main([*arguments, "--epochs", "3/2", "--cache-dir", str(tmp_path / "cache")]) == 0
    said = capsys.readouterr().out
    assert "order megatron: 87 samples of 8 tokens, 2 epochs" in said
    assert f"in {tmp_path / 'cache'}" in said
    for order in ("epoch", "window"):
        assert main([*arguments, "--order", order, "--cache-dir", str(tmp_path / order)]) == 0
        assert "samples computed on access, nothing stored" in capsys.readouterr().out
        assert not (tmp_path / order).exists()
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out
