"""Escape sequences, ends of lines and marks of direction from outside: shown escaped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import Terminal, cli
from support.corpora import write_corpus

from megaindex.cache.claim import Claim, this_process
from megaindex.console import FittedTable, TableColumn, print_lines, print_view, warning
from megaindex.errors import InvalidArgument, visible

RAW = "a\x1b[31m\nOK \u202eb\u2066\x9b\u2028\udcff"
SHOWN = r"a\x1b[31m\nOK \u202eb\u2066\x9b\u2028\udcff"


def is_safe(text: str) -> bool:
    """No raw character but the ends of lines of the program itself."""
    return visible(text.replace("\n", "")) == text.replace("\n", "")


def test_what_is_escaped() -> None:
    assert visible(RAW) == SHOWN
    assert visible("é 漢 \u200d 🙂 ~ \\x1b") == "é 漢 \u200d 🙂 ~ \\x1b"
    for first, last in ((0x1F, 0x20), (0x7E, 0x7F), (0x9F, 0xA0), (0x202E, 0x202F)):
        assert (visible(chr(first)) == chr(first)) != (visible(chr(last)) == chr(last))
    assert str(InvalidArgument(f"{RAW}: no")) == f"{SHOWN}: no"
    assert InvalidArgument(RAW).args == (RAW,)


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megaindex"):
        logging.getLogger("megaindex").info("%s: %d of %.1f in %r", RAW, 3, 0.5, Path("b"))
        logging.getLogger("megaindex").info(RAW)
    assert [record.getMessage() for record in caplog.records] == [
        f"{SHOWN}: 3 of 0.5 in 'b'", SHOWN
    ]  # fmt: skip


def test_a_forged_claim_forges_no_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import json

    text = json.dumps({**this_process(), "host": RAW, "pid": "1\nb", "token": "x"})
    (tmp_path / "key.claim").write_text(text)
    claim = Claim(tmp_path, "key")
    with caplog.at_level(logging.INFO, "megaindex"), pytest.raises(Exception, match="builds it"):
        claim.wait(0)
    assert caplog.messages
    assert all(map(is_safe, caplog.messages))
    assert not any("\n" in message for message in caplog.messages)


@pytest.mark.parametrize("stream", [Terminal, None])
def test_tables_and_lines(
    stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    table = FittedTable(TableColumn("name", "name"), "count")
    table.add_row(RAW, "1")
    print_view(table)
    print_view(warning(f"{RAW} is not there"))
    print_lines([RAW])
    out = capsys.readouterr().out
    assert is_safe(out)
    assert "\nOK" not in out
    assert r"\x1b" in out


def test_verbs_with_names_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose names hold raw characters, and YAML whose keys do."""
    monkeypatch.chdir(tmp_path)
    name = RAW.replace("\udcff", "")
    write_corpus(tmp_path / name, np.full(30, 40))
    write_corpus(tmp_path / "b", np.full(30, 40))
    (tmp_path / "text\x1b.jsonl").write_text('{"text": "x"}\n{"no": 1}\n')
    (tmp_path / "bad.yaml").write_text('"a\\e[31m\\nOK \\u202e": 1\nsources: {}\n')
    (tmp_path / "good.yaml").write_text(
        'sequence_length: 8\nbatch: {global_batch_size: 2}\nsources: {"w\\e\\nOK": {path: b}}\n'
        'stages: {"s\\e\\nOK": {steps: 3, mix: {"w\\e\\nOK": 1}}}\n'
    )
    batch = ("--seq-length", 8, "--micro-batch-size", 1, "--data-parallel-size", 1)
    run = (*batch, "--gradient-accumulation-steps", 1, "--train-iters", 4, "--order", "epoch")
    both = ("--data-path", 0.5, name, 0.5, "b")
    for words in (
        ("plan", *both, *run[:-2], "--order", "megatron"),
        ("plan", "--data-path", name, *run),
        ("plan", "--recipe", "bad.yaml"), ("plan", "--recipe", "good.yaml"),
        ("plan", "--neox-config", "bad.yaml"), ("plan", "--nanotron-config", "bad.yaml"),
        ("plan", "--data-path", f"{name}gone", *run), ("plan", "--order", RAW, *run),
        ("plan", "--no\x1b\n", *run), ("plan", "--seq-length", RAW), (RAW,),
        ("inspect", name), ("verify", name), ("verify", name, "--repair", "c\x1b\n"),
        ("audit", "--data-path", name, *run), ("audit", "--recipe", "good.yaml"),
        ("trace", "--data-path", name, *run, "--step", 1),
        ("lock", "--data-path", name, *run, "--out", "run\x1b\n.lock"),
        ("verify", "run\x1b\n.lock"), ("report", "run\x1b\n.lock"),
        ("build", "--data-path", name, "b", "--seq-length", 8, "--cache-dir", "c\x1b\n",
         "--workers", 1),
        ("build", "--data-path", name, "--seq-length", 8, "--cache-dir", "c\x1b\n"),
        ("build", "--recipe", "good.yaml"),
        ("merge", "merged\x1b\n", name, "b"), ("split", name, "--parts", "x\x1b\n=1", "y=1"),
        ("diff-order", f"order=epoch,data_path={name}", "bad.yaml"),
        ("tokenize", "out\x1b\n", "text\x1b.jsonl", "--tokenizer", "bytes",
         "--on-bad-line", "skip"),
        ("export", "--to", "neox", "--data-path", name, *run[:-2]),
    ):  # fmt: skip
        _, out, err = cli(*words)
        assert is_safe(out + err), words
        assert not any(line.startswith("OK") for line in (out + err).splitlines()), words
        assert "Traceback" not in err
