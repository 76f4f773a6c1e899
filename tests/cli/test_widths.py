"""Output at several console widths: no line is too wide, no word or number is broken."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text
from support.command_line import Terminal, cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.cli import main
from megaindex.console import FittedTable, ShortNames, TableColumn, distinct, elided, print_view
from megaindex.lock import make_lock

WIDTHS = (60, 80, 120)
NAMES = (
    "pretraining/web_crawl_2024_text_document",
    "pretraining/code_text_document",
    "math_text_document",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three corpora with long paths, a recipe and a damaged pair."""
    folder = tmp_path_factory.mktemp("widths")
    data = folder / "mnt/lustre/projects/corpora"
    rng = np.random.default_rng(2)
    for name, documents in zip(NAMES, (900, 300, 12), strict=True):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_corpus(data / name, rng.integers(1, 400, documents))
    (folder / "run.yaml").write_text(
        "sequence_length: 128\n"
        "batch: {micro_batch_size: 2, data_parallel_size: 4}\n"
        "sources:\n"
        f"  web_crawl_of_2024_deduplicated: {data / NAMES[0]}\n"
        f"  code: {{path: {data / NAMES[1]}, order: window}}\n"
        f"  instructions: {{path: {data / NAMES[2]}, kind: finetuning}}\n"
        "stages:\n"
        "  stable_phase: {steps: 40, mix: {web_crawl_of_2024_deduplicated: 3, code: 1}}\n"
        "  decay: {epochs: 1, mix: {code: 1, instructions: 1}}\n"
    )
    (folder / "bad").mkdir()
    write_corpus(folder / "bad/pair", rng.integers(1, 90, 50))
    path = folder / "bad/pair.bin"
    path.write_bytes(path.read_bytes()[:-100])
    write_corpus(folder / "bad/locked", rng.integers(1, 90, 50))
    pinned = make_lock(
        data_path=str(folder / "bad/locked"), sequence_length=128, epochs=1, global_batch_size=4
    )
    pinned.write(folder / "bad/run.lock")
    path = folder / "bad/locked.idx"
    text = path.read_bytes()
    path.write_bytes(text[:200] + bytes([text[200] ^ 1]) + text[201:])
    return folder


def blend(folder: Path) -> list[object]:
    data = folder / "mnt/lustre/projects/corpora"
    words = [
        word for name, w in zip(NAMES, (0.7, 0.2, 0.1), strict=True) for word in (w, data / name)
    ]
    return ["--data-path", *words, "--seq-length", 128, "--micro-batch-size", 2,
            "--data-parallel-size", 4]  # fmt: skip


def commands(folder: Path) -> dict[str, list[object]]:
    blended, one = blend(folder), folder / "mnt/lustre/projects/corpora" / NAMES[0]
    run = ["--order", "neox", "--epochs", 1]
    settings = f"data_path={one},seq_length=128,epochs=1"
    return {
        "plan": ["plan", *blended, *run, "--split", "8,1,1", "--eval-iters", 2],
        "plan of tokens": ["plan", "--tokens-per-epoch", 10**15, 3 * 10**14, "--seq-length", 2048,
                           "--global-batch-size", 4096, *run],
        "recipe plan": ["plan", "--recipe", "run.yaml"],
        "audit": ["audit", *blended, *run, "--consumed-samples", 80, "--variance-buffer", 1.5],
        "recipe audit": ["audit", "--recipe", "run.yaml"],
        "look-up": ["audit", *blended, *run, "--step", 3, "--variance-buffer", 1.5],
        "inspect": ["inspect", "bad/pair"],
        "verify": ["verify", "bad/pair"],
        "verify of a lock": ["verify", "bad/run.lock"],
        "diff-order": ["diff-order", f"{settings},seed=1", f"{settings},seed=2"],
    }  # fmt: skip


def shown(words: list[object], width: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in words]) in (0, 1)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_only_what_has_a_style_is_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and paths in a sentence have none."""
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    print_view("built 1,562 samples of '/data/web' in 3.5 s", out)
    assert out.getvalue() == "built 1,562 samples of '/data/web' in 3.5 s\n"
    print_view(Text("3 epochs", "bold"), out)
    assert "\x1b[1m3 epochs\x1b[0m\n" in out.getvalue()


def pieces(text: str) -> set[str]:
    return {word for word in text.split() if not set(word) <= set("─│╭╮╰╯━▁▂▃▄▅▆▇█▏▎▍▌▋▊▉▐")}


@for_each("name", [
    "plan", "plan of tokens", "recipe plan", "audit", "recipe audit", "look-up", "inspect",
    "verify", "verify of a lock", "diff-order",
])  # fmt: skip
def test_output_fits_the_console(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = commands(folder)[name]
    wide = shown(words, 400, folder, monkeypatch)
    for width in WIDTHS:
        check_width(name, width, wide, shown(words, width, folder, monkeypatch), str(folder))


def check_width(name: str, width: int, wide: str, text: str, own: str) -> None:
    """Compare an output with a wide one; a path of `own` in a line stays one word, to be copied."""
    too_wide = [line for line in text.split("\n") if len(line) > width and own not in line]
    assert not too_wide, width
    broken = {word for word in pieces(text) - pieces(wide) if "…" not in word}
    assert not broken, width
    cut = {word for word in pieces(text) if "…" in word and word not in pieces(wide)}
    for word in cut:
        head, tail = re.sub(r"^\d+…", "…", word).rstrip(",;.:").split("…")
        assert any(w.startswith(head) and tail in w for w in pieces(wide)), word
    assert not any(len(word) <= 15 for word in cut)
    numbers = {word for word in pieces(wide) if re.fullmatch(r"[\d,.]+", word)}
    if name != "look-up":
        assert numbers <= pieces(text) | {"0", str(width)}


@pytest.mark.parametrize(
    ("columns", "widest"), [("80", 80), ("60", 60), ("", 110), ("0", 110), ("wide", 110)]
)
def test_piped_output_fits_columns(
    columns: str, widest: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = cli(*commands(folder)["verify of a lock"])
    assert status == 1
    table = out.split("\n")[1:]  # after the line with the path, which can be long
    assert widest - 20 < max(map(len, table)) <= widest
    assert len(re.findall(r"\b[0-9a-f]{16}\b", out)) == 2  # no hash is broken


def test_paths_are_shortened_to_what_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(commands(folder)["plan"], 120, folder, monkeypatch)
    data = f"{folder}/mnt/lustre/projects/corpora/"
    assert re.search(r"train +pretraining/code +0\.2 ", text)
    assert text.count("text_document") == text.count("sources: ") == 1
    assert "such as math (" in text
    status, out, _ = cli(*commands(folder)["plan"], "--json")
    assert (status, f'"path": "{data}math_text_document"' in out) == (0, True)


def test_short_names() -> None:
    names = ShortNames.of(["/a/b/web", "/a/b/c/web", "/a/b/web"])
    assert (names.common, names.name("/a/b/web"), names.name("/a/b/c/web")) == (
        "/a/b/*", "web", "c/web",
    )  # fmt: skip
    assert names.text("of /a/b/web, /a/b/c/web and /a/b/web2") == "of web, c/web and /a/b/web2"
    assert ShortNames.of(["s3://bucket/x/a", "s3://bucket/y/a"]).common == "s3://bucket/*"
    ends = ShortNames.of(["d/x/web_text_document", "d/y/math_0_text_document"])
    assert (ends.common, sorted(ends.names.values())) == (
        "d/*_text_document", ["x/web", "y/math_0"],
    )  # fmt: skip
    assert ShortNames.of(["a_b", "b_b", "_b"]).common == ""
    assert ShortNames.of(["d/x/_b", "d/y/b_b"]).common == "d/*"
    longer = ShortNames.of(["d/web_b", "d/web_b.c_b"])
    assert (longer.common, longer.text("of d/web_b.c_b")) == ("d/*_b", "of web_b.c")
    for paths in (["/a/b/web"], ["/a", "/b"], ["a", "b/c"], [""], []):
        assert ShortNames.of(paths).common == ""


def test_shortened_names_stay_distinct() -> None:
    assert elided("abcdefghij", 10) == "abcdefghij"
    assert elided("abcdefghijk", 10) == "abc…fghijk"
    names = [f"shard_{k}_of_the_corpus_text_document" for k in range(12)]
    cut = distinct(names, 16)
    assert len(set(cut.values())) == 12
    assert [text.partition("…")[0] for text in cut.values()] == ["shard", *map(str, range(2, 13))]
    assert max(map(len, cut.values())) == 16


def printed(table: FittedTable, width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as text:
        console.print(table)
    return [line.rstrip() for line in text.get().rstrip().split("\n")]


@pytest.mark.parametrize("width", [30, 50, 90])
def test_a_table_is_divided_and_then_listed(width: int) -> None:
    table = FittedTable(
        TableColumn(name="split", kind="label"), TableColumn(name="source", kind="name"),
        *(TableColumn(name=f"count {k}") for k in range(4)),
    )  # fmt: skip
    table.add_row("train", "a_rather_long_name_of_a_source", *(f"{10**12 + k:,}" for k in range(4)))
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    assert all(f"{10**12 + k:,}" in "\n".join(lines) for k in range(4))


def test_tables_are_divided_where_their_columns_fit_exactly() -> None:
    """Columns of 5 characters and 3 between them; rows of empty cells are in the first table
    alone, unless a row goes on from the one above."""
    table = FittedTable(TableColumn("split", "label"), "aaaaa", "bbbbb", "ccccc")
    table.add_row("train", "1", "2", "3")
    table.add_row("valid", "4", "", "6")
    heads = {
        width: ["".join(name[0] for name in line.split()) for line in lines if "split" in line]
        for width in (29, 28, 21, 20, 13)
        for lines in [printed(table, width)]
    }
    assert heads[29] == ["sabc"]
    assert heads[28] == heads[21] == ["sab", "sc"]
    assert heads[20] == heads[13] == ["sa", "sb", "sc"]
    assert printed(table, 12)[:2] == ["split  train", "aaaaa  1"]
    for rows in (2, 3):
        assert [line[:5] for line in printed(table, 13)].count("valid") == rows
        table.add_row("", "7", "8", "9")


def test_a_name_in_a_table_has_at_least_16_characters() -> None:
    table = FittedTable(TableColumn("path", "name"), "count")
    table.add_row("abcdefghijklmnopqrst", "12345")
    assert printed(table, 28)[2] == "abcdefghijklmnopqrst   12345"
    assert printed(table, 24)[2] == "abcde…klmnopqrst   12345"
    assert printed(table, 23) == ["path   abcde…klmnopqrst", "count  12345"]


def test_a_table_with_words_is_listed_as_a_whole() -> None:
    """Also where it could be divided."""
    table = FittedTable(TableColumn("split", "label"), TableColumn("found", "words"), "tokens")
    table.add_row("train", "two words", f"{10**12:,}")
    shown = {width: printed(table, width) for width in (33, 32, 25)}
    assert shown[33][2:] == ["train   two     1,000,000,000,000", "        words"]
    assert shown[32] == ["split   train", "found   two words", "tokens  1,000,000,000,000"]
    assert shown[25] == shown[32]
