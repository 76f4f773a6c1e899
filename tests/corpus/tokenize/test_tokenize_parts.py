"""Equal results for all divisions of the inputs and all engines."""

from __future__ import annotations

import codecs
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import one_in, times
from support.inputs import for_each
from support.tokenizing import (
    TEXTS,
    encoder_of,
    names,
    packed,
    pair,
    run,
    train_bpe,
    write_as_megatron,
    write_jsonl,
)

from megaindex.corpus.tokenize import encode, work_folder
from megaindex.corpus.tokenize.inputs import InputFile, check_settings, find_sources
from megaindex.corpus.tokenize.parts import Piece, cut, row_groups
from megaindex.corpus.tokenize.reading import Lines, lines_before
from megaindex.errors import FormatError
from megaindex.format.tokenizers import find_tokenizer

# characters of one to four bytes, and those that could be taken for the end of a line
CHARACTERS = st.sampled_from('ab \\"\t\r\v\x0b\x1c\x85\u2028éß漢🎉')
LINES = st.lists(
    st.tuples(st.text(CHARACTERS, max_size=12), st.sampled_from(["\n", "\r\n", "\r"])), max_size=8
)


def pieces_of(path: Path, size: int) -> list[Piece]:
    status = path.stat()
    source = InputFile(
        path=str(path), format="lines", compression="", size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )  # fmt: skip
    return [
        Piece(source=source, begin=begin, end=min(begin + size, status.st_size), nbytes=size)
        for begin in range(0, status.st_size, size)
    ]


@given(
    lines=LINES, mark=st.booleans(), final=st.booleans(), size=st.integers(1, 40),
    block=st.integers(1, 9),
)  # fmt: skip
@times(4)
def test_every_line_belongs_to_one_piece(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]], mark: bool, final: bool,
    size: int, block: int,
) -> None:  # fmt: skip
    """Compare with Python's text mode, with and without a byte order mark."""
    for name in ("_BLOCK", "_SHORT"):
        monkeypatch.setattr(sys.modules["megaindex.corpus.tokenize.reading"], name, block)
    data = "".join(text + end for text, end in lines).encode()
    data = codecs.BOM_UTF8 * mark + (data if final else data.removesuffix(b"\n"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_bytes(data)
        found = []
        for piece in pieces_of(path, size):
            reading = Lines(piece)
            own = [line for _, line in reading]
            if own:
                assert lines_before(piece.source, reading.first_byte) == len(found)
            assert 0 <= reading.done <= piece.end - piece.begin
            found += own
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig")
    expected = [line.removesuffix("\n").encode() for line in text]
    # a mark alone is an empty line
    assert found == (expected or [b""] * (mark and not lines_of(data)))


def lines_of(data: bytes) -> list[bytes]:
    return data.removeprefix(codecs.BOM_UTF8).splitlines()


@pytest.mark.slow
@for_each("suffix", ["", ".gz", ".zst"])
@for_each("end", ["\r", "\n", "\r\n"])
@for_each("size", [311, 1 << 20])
def test_lines_and_byte_order_marks_are_those_of_text_mode(
    tmp_path: Path, suffix: str, end: str, size: int
) -> None:
    """Compare with the calls of Megatron's tool: `open(path, "r")`, `gzip.open(path, "rt")`."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    run(tmp_path / "plain", [write_jsonl(tmp_path / "plain.jsonl", TEXTS)])
    data = codecs.BOM_UTF8 + end.join([*lines, ""]).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed(data, suffix))
    made = run(tmp_path / "ours", [path], part_bytes=size)
    assert (made.documents, made.blank_lines) == (len(TEXTS), 0)
    assert pair(tmp_path / "ours") == pair(tmp_path / "plain")
    path.write_bytes(packed(data + b"{" + end.encode(), suffix))
    with pytest.raises(FormatError, match=f"line {len(TEXTS) + 1}: is not valid JSON"):
        run(tmp_path / "bad", [path], part_bytes=size)
    made = run(tmp_path / "bad", [path], part_bytes=size, on_bad_line="skip")
    assert made.bad is not None
    assert (made.bad.count, made.bad.first[0].number) == (1, len(TEXTS) + 1)
    assert pair(tmp_path / "bad") == pair(tmp_path / "plain")


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    for name, data in (("a", b"one\ntwo"), ("b", codecs.BOM_UTF8 + b"one\ntwo")):
        (tmp_path / f"{name}.txt").write_bytes(data)
        for form in ("lines", "files"):
            run(tmp_path / f"{name}-{form}", [tmp_path / f"{name}.txt"], format=form)
    for form in ("lines", "files"):
        assert pair(tmp_path / f"a-{form}") == pair(tmp_path / f"b-{form}")


def test_a_byte_order_mark_inside_a_file_is_text(tmp_path: Path) -> None:
    marked = codecs.BOM_UTF8 + b"two"
    (tmp_path / "a.txt").write_bytes(b"one\n" + marked)
    for size in (4, 100):
        pieces = pieces_of(tmp_path / "a.txt", size)
        assert [line for piece in pieces for line in Lines(piece)] == [(0, b"one"), (4, marked)]


@pytest.mark.parametrize("form", ["lines", "files"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_file_that_was_read_is_done(tmp_path: Path, suffix: str, form: str) -> None:
    """In bytes of the file, packed or not."""
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(packed(b"one\ntwo\n" * 50, suffix))
    (source,) = find_sources([path], form)
    reading = Lines(Piece(source=source, begin=0, end=source.size, nbytes=source.size))
    assert len(list(reading)) == (100 if form == "lines" else 1)
    assert reading.done == path.stat().st_size


@pytest.mark.parametrize("short", [1, 16])
def test_a_long_line_is_skipped_in_blocks(tmp_path: Path, monkeypatch: Any, short: int) -> None:
    monkeypatch.setattr(sys.modules["megaindex.corpus.tokenize.reading"], "_SHORT", short)
    data = [b"x" * 1000, b"y" * 500, b"", b"z"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(data))
    for size in (1, 7, 499, 1001, 5000):
        pieces = pieces_of(tmp_path / "a.txt", size)
        found = [line for piece in pieces for _, line in Lines(piece)]
        assert found == data


@one_in(2)  # each writes and opens files
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=6),
    plain=st.booleans(),
    final=st.booleans(),
    size=st.integers(8, 200),
    batch=st.integers(1, 50),
)
def test_the_result_is_independent_of_parts_and_batches(
    megatron_datasets: Any,
    bpe: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    plain: bool,
    final: bool,
    size: int,
    batch: int,
) -> None:
    monkeypatch.setattr(encode, "_BATCH_BYTES", batch)
    lines = [json.dumps({"text": text}, ensure_ascii=not plain) for text in texts]
    ends = ["\r\n\n" if i % 3 == 1 else "\n" for i in range(len(lines))]
    data = "".join(line + end for line, end in zip(lines, ends, strict=True)).encode()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.jsonl").write_bytes(data if final else data.rstrip())
        run(folder / "ours", [folder / "a.jsonl"], tokenizer=bpe, eod="<eos>", part_bytes=size)
        write_as_megatron(megatron_datasets, folder / "theirs", texts, encoder_of(bpe), eod=1)
        assert pair(folder / "ours") == pair(folder / "theirs")
        assert not (folder / "ours.parts").exists()


def test_a_part_ends_with_the_piece_that_reaches_its_bytes(tmp_path: Path) -> None:
    """Pieces of lines have the bytes of a part at most, those of Parquet are whole row groups."""
    for name, size in (("a", 100), ("b", 30), ("c", 40), ("d", 39), ("e", 1)):
        (tmp_path / f"{name}.txt").write_bytes(b"x" * size)
    table = pa.table({"text": ["row"] * 5})
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=1, use_dictionary=False)
    settings = check_settings(
        find_tokenizer("bytes", add_special_tokens=True), ["text"], eod=None, append_eod=False,
        dtype=None,
    )  # fmt: skip
    texts = find_sources([tmp_path / f"{name}.txt" for name in "abcde"], "lines")
    assert [
        [(Path(piece.source.path).stem, piece.begin, piece.end) for piece in part.pieces]
        for part in cut(texts, settings, 40)
    ] == [
        [("a", 0, 40)],
        [("a", 40, 80)],
        [("a", 80, 100), ("b", 0, 30)],
        [("c", 0, 40)],
        [("d", 0, 39), ("e", 0, 1)],
    ]
    groups = find_sources([tmp_path / "f.parquet"], "parquet")
    (size,) = set(row_groups(groups[0], ["text"]))
    parts = [part.pieces for part in cut(groups, settings, 2 * size)]
    assert [[(piece.begin, piece.end) for piece in part] for part in parts] == [
        [(0, 2)], [(2, 4)], [(4, 5)]
    ]  # fmt: skip


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.mark.slow
def test_processes_at_once_write_what_one_writes(tmp_path: Path, bpe: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", TEXTS * 50)
    second = write_jsonl(tmp_path / "b.jsonl.gz", TEXTS * 9)
    made = run(tmp_path / "one", [first, second, first], tokenizer=bpe, part_bytes=1 << 30)
    assert made.parts == 1
    made = run(tmp_path / "many", [first, second, first], tokenizer=bpe, part_bytes=2500, workers=3)
    assert made.parts > 50
    assert pair(tmp_path / "one") == pair(tmp_path / "many")


def test_two_attempts_at_a_part_leave_one_result(tmp_path: Path) -> None:
    """Two workers on one part, as after a worker was considered lost."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    tasks = []
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(
            sys.modules["megaindex.corpus.tokenize.run"],
            "encode_part",
            lambda task: (tasks.append(task), encode.encode_part(task))[1],
        )
        run(tmp_path / "o", [source])
    (task,) = tasks
    folder = work_folder.WorkFolder(task.folder)
    Path(folder.path).mkdir()
    with monkey.context() as patch:
        patch.setattr(work_folder.WorkFolder, "read_done", lambda *_: None)
        first, second = encode.encode_part(task), encode.encode_part(task)
    assert first.attempt != second.attempt
    for done in (first, second):
        assert pair(Path(folder.pair(done.name, 0))) == pair(tmp_path / "o")
    assert folder.read_done(task.part.key, 1) == second
    assert encode.encode_part(task) == second
    assert not [name for name in names(Path(folder.path)) if ".tmp." in name or "pulse" in name]
