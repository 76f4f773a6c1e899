"""Bad input: messages name file, line, rule, value and remedy; nothing is half-written."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.inputs import for_each
from support.tokenizing import (
    InThisProcess,
    names,
    pair,
    run,
    train_bpe,
    train_sentencepiece,
    write_jsonl,
)

from megaindex.corpus import tokenize
from megaindex.corpus.tokenize import parts, reading
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError, MissingFile, StorageError
from megaindex.format.tokenizers import Bytes, find_tokenizer, load

GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "missing-key": (b'{"body": "x"}', "has no key 'text'; it has 'body'"),
    "missing-key-of-none": (b"{}", "has no key 'text'; it has nothing"),
    "type": (b'{"text": 12}', "key 'text' must hold a string or a list of strings, got 12"),
    "type-null": (b'{"text": null}', "key 'text' must hold a string .* got None"),
    "type-in-list": (b'{"text": ["a", 3]}', r"key 'text' must .* got \['a', 3\]"),
    "utf-8": (b'{"text": "a\xff"}', "is not valid UTF-8: byte 0xff at 11"),
    "json": (b'{"text": "a', "is not valid JSON: Unterminated string starting at character 9; it"),
    "json-of-two": (b'{"text": "a"} {"text": "b"}', "is not valid JSON: Extra data"),
    "json-depth": (b"[" * 100_000, "is not valid JSON: maximum recursion depth"),
    "object": (b'["text"]', r"must be a JSON object, got \['text'\]"),
    "surrogate": (b'{"text": "a\\ud800"}', r"a lone surrogate, U\+D800, at 1"),
}


@for_each("part_bytes", [3, 1 << 20])
@for_each("name", BAD_LINES)
def test_a_bad_line_stops_or_is_counted(tmp_path: Path, name: str, part_bytes: int) -> None:
    line, message = BAD_LINES[name]
    part_bytes = max(part_bytes, len(line) // 10)
    source = tmp_path / "a.jsonl"
    source.write_bytes(2 * GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(FormatError, match=rf"a\.jsonl: line 4: .*{message}.*--on-bad-line"):
        run(tmp_path / "o", [source], part_bytes=part_bytes)
    assert not {"o.bin", "o.idx"} & names(tmp_path)
    made = run(tmp_path / "o", [source], part_bytes=part_bytes, on_bad_line="skip")
    assert made.bad is not None
    assert (made.documents, made.bad.count, made.blank_lines) == (3, 1, 1)
    report = json.loads((tmp_path / "o.bad.jsonl").read_text())
    assert (report["file"], report["line"]) == (str(source), 4)
    assert name.startswith(report["rule"])
    source.write_bytes(3 * GOOD)
    run(tmp_path / "fresh", [source])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")
    run(tmp_path / "o", [source], overwrite=True)
    assert not (tmp_path / "o.bad.jsonl").exists()  # there are none now


def test_bad_lines_of_all_inputs_are_in_one_report(tmp_path: Path) -> None:
    inputs, expected = [], []
    for number, suffix in enumerate(["", ".gz", ""]):
        lines = [b"bad" if i % 7 == number else GOOD[:-1] for i in range(40)]
        source = tmp_path / f"{number}.jsonl{suffix}"
        data = b"\n".join(lines)
        source.write_bytes(gzip.compress(data) if suffix else data)
        inputs.append(source)
        expected += [(str(source), i + 1) for i in range(40) if i % 7 == number]
    table = pa.table({"text": ["a", None, "b", None]})
    pq.write_table(table, tmp_path / "r.parquet", row_group_size=1)
    made = run(tmp_path / "o", [*inputs, tmp_path / "r.parquet"], part_bytes=50, on_bad_line="skip")
    report = [json.loads(line) for line in (tmp_path / "o.bad.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"]) for r in report[:-2]] == expected
    assert [(r["row"], r["detail"]) for r in report[-2:]] == [
        (1, "column 'text' is null"),
        (3, "column 'text' is null"),
    ]
    assert made.bad is not None
    assert made.bad.count == len(report)
    assert len(made.bad.first) == 10
    with pytest.raises(FormatError, match=r"r\.parquet: row 1: column 'text' is null"):
        run(tmp_path / "p", [tmp_path / "r.parquet"], part_bytes=1)


def test_invalid_utf8_in_a_column_is_one_bad_row(tmp_path: Path) -> None:
    values = pa.array([b"good", b"\xff", b"too"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(FormatError, match=r"a\.parquet: row 1: is not valid UTF-8: byte 0xff at 0"):
        run(tmp_path / "o", [tmp_path / "a.parquet"])
    assert run(tmp_path / "o", [tmp_path / "a.parquet"], on_bad_line="skip").documents == 2


def test_a_text_that_the_library_refuses(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a b", "a c", "b"])
    options: dict[str, Any] = {"tokenizer": tmp_path / "words.json"}
    with pytest.raises(FormatError, match=r"a\.jsonl: line 2: cannot be tokenized: "):
        run(tmp_path / "o", [source], **options)
    made = run(tmp_path / "o", [source], on_bad_line="skip", **options)
    assert made.bad is not None
    assert (made.documents, made.bad.count, made.pairs[0].tokens) == (2, 1, 3)


@pytest.mark.parametrize("error", ["panic", "interrupt"])
def test_a_text_at_which_the_library_panics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """PyO3's PanicException is a BaseException, which no process could send to another."""
    panic = type("PanicException", (BaseException,), {}) if error == "panic" else KeyboardInterrupt
    encode = Bytes.encode

    def encode_or_panic(self: Bytes, texts: Sequence[str]) -> Any:
        if "bad" in texts:
            raise panic("bad split")
        return encode(self, texts)

    monkeypatch.setattr(Bytes, "encode", encode_or_panic)
    source = write_jsonl(tmp_path / "a.jsonl", ["good", "bad"])
    expected = FormatError if error == "panic" else KeyboardInterrupt
    with pytest.raises(expected, match="bad split"):
        tokenize(tmp_path / "o", [source], tokenizer="bytes", engine=InThisProcess())
    assert not (tmp_path / "o.bin").exists()


@pytest.mark.parametrize("part_bytes", [30, 1 << 20])
def test_the_report_is_in_the_order_of_lines(tmp_path: Path, part_bytes: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    source = tmp_path / "a.jsonl"
    lines = ['{"text": "unknown"}', "{}", '{"text": "a"}', "nonsense"] * 3
    source.write_text("\n".join(lines))
    options: dict[str, Any] = {"tokenizer": tmp_path / "words.json", "part_bytes": part_bytes}
    with pytest.raises(FormatError, match="line 1: cannot be tokenized"):
        run(tmp_path / "o", [source], **options)
    made = run(tmp_path / "o", [source], on_bad_line="skip", **options)
    assert made.documents == 3
    report = [json.loads(line) for line in (tmp_path / "o.bad.jsonl").read_text().splitlines()]
    assert [(r["line"], r["rule"]) for r in report] == [
        (4 * i + j, rule)
        for i in range(3)
        for j, rule in ((1, "tokenizer"), (2, "missing-key"), (4, "json"))
    ]


def holding(name: str, content: bytes | pa.Table) -> Callable[[Path], Path]:
    """Return a function that writes a file of this name."""

    def make(folder: Path) -> Path:
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            pq.write_table(content, path)
        return path

    return make


truncated_gzip = holding("a.jsonl.gz", gzip.compress(GOOD * 5000)[:-20])
truncated_zstd = holding("a.jsonl.zst", zstandard.ZstdCompressor().compress(GOOD * 50_000)[:-20])
packed_parquet = holding("a.parquet.gz", gzip.compress(b"PAR1"))
damaged_gzip = holding("a.jsonl.gz", gzip.compress(GOOD) + b"garbage behind it")
damaged_zstd = holding(
    "a.jsonl.zst", zstandard.ZstdCompressor().compress(GOOD) + b"garbage behind it"
)
packed_nothing = holding("a.jsonl.gz", gzip.compress(b""))
named_gzip = holding("a.jsonl.gz", GOOD)
empty = holding("a.jsonl", b"")
blank = holding("a.jsonl", b"\n \n")
unknown = holding("a.csv", GOOD)
no_parquet = holding("a.parquet", GOOD)
no_rows = holding("a.parquet", pa.table({"text": pa.array([], pa.string())}))
no_column = holding("a.parquet", pa.table({"body": ["x"]}))
numbers = holding("a.parquet", pa.table({"text": [1]}))


def cut_parquet(folder: Path) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"text": [str(i) * 100 for i in range(5000)]}), path)
    data = path.read_bytes()
    path.write_bytes(data[:1000] + bytes(20_000) + data[21_000:])
    return path


def missing(folder: Path) -> Path:
    return folder / "nowhere.jsonl"


def no_files(folder: Path) -> Path:
    (folder / "in").mkdir()
    return folder / "in"


@for_each("on_bad_line", ["stop", "skip"])
@for_each(
    ("make", "kind", "message"),
    [
        (
            truncated_gzip,
            FormatError,
            r"a\.jsonl\.gz: the gzip stream is truncated .* after line \d+",
        ),
        (truncated_zstd, FormatError, r"a\.jsonl\.zst: the zstd stream is truncated .* line \d+"),
        (damaged_gzip, FormatError, r"a\.jsonl\.gz: .* or damaged after line 0: "),
        (damaged_zstd, FormatError, r"a\.jsonl\.zst: .* or damaged after line 1: "),
        (packed_nothing, FormatError, r"a\.jsonl\.gz: the gzip stream holds 0 bytes"),
        (
            named_gzip,
            FormatError,
            r"a\.jsonl\.gz: its suffix is that of gzip, but .* 7b 22",
        ),
        (empty, FormatError, r"a\.jsonl: is empty \(0 bytes\)"),
        (blank, FormatError, r"a\.jsonl: no document in 2 lines, of which 2 are blank"),
        (unknown, InvalidArgument, r"a\.csv: its suffix must be one of"),
        (no_parquet, FormatError, r"a\.parquet: cannot be read as Parquet"),
        (packed_parquet, FormatError, r"a\.parquet\.gz: is Parquet inside gzip"),
        (cut_parquet, FormatError, r"a\.parquet: cannot be read as Parquet: "),
        (no_rows, FormatError, r"a\.parquet: has 0 rows"),
        (no_column, InvalidArgument, r"a\.parquet: has no column 'text'"),
        (numbers, FormatError, r"a\.parquet: column 'text' must hold text"),
        (missing, MissingFile, r"nowhere\.jsonl: cannot open the input: No such file"),
        (no_files, MissingFile, r"in: the folder holds no file that ends in \.jsonl"),
    ],
)
def test_a_bad_file_always_stops(
    tmp_path: Path,
    make: Callable[[Path], Path],
    kind: type[MegaIndexError],
    message: str,
    on_bad_line: str,
) -> None:
    source = make(tmp_path)
    before = names(tmp_path)
    with pytest.raises(kind, match=message):
        run(tmp_path / "o", [source], on_bad_line=on_bad_line)
    assert names(tmp_path) - {"o.parts"} == before


@pytest.mark.parametrize("form", ["lines", "files"])
def test_a_packed_file_without_text(tmp_path: Path, form: str) -> None:
    """An empty file that is not packed is refused before."""
    source = tmp_path / "a.txt.gz"
    source.write_bytes(gzip.compress(b"x"))
    assert run(tmp_path / "o", [source], format=form).documents == 1
    source.write_bytes(gzip.compress(b""))
    with pytest.raises(FormatError, match=r"a\.txt\.gz: the gzip stream holds 0 bytes; leave it"):
        run(tmp_path / "p", [source], format=form)


@pytest.mark.parametrize("form", ["lines", "files"])
def test_the_longest_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 10)
    monkeypatch.setattr(reading, "_SHORT", 1)
    source = tmp_path / "a.txt"
    source.write_text("x" * 10)
    assert run(tmp_path / "o", [source], format=form).documents == 1
    source.write_text("x" * 11)
    with pytest.raises(FormatError, match=r"a\.txt: line 1: must have at most 10 bytes; divide th"):
        run(tmp_path / "p", [source], format=form)


@pytest.mark.parametrize(
    ("library", "name", "message"),
    [
        ("pyarrow", "a.parquet", r"Parquet files need pyarrow; pip install 'megaindex\[parquet\]'"),
        ("zstandard", "a.jsonl.zst", r"the library zstandard; pip install 'megaindex\[zstd\]'"),
    ],
)
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str, message: str
) -> None:
    source = tmp_path / name
    if library == "pyarrow":
        pq.write_table(pa.table({"text": ["x"]}), source)
    else:
        source.write_bytes(zstandard.ZstdCompressor().compress(GOOD))
    reading._zstandard.cache_clear()
    assert reading.zstd_error() is zstandard.ZstdError
    reading._zstandard.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidArgument, match=message):
        run(tmp_path / "o", [source])
    if library == "zstandard":
        assert reading.zstd_error() is EOFError


def test_errors_of_the_disk_are_not_those_of_a_parquet_file() -> None:
    for error, kind, message in (
        (OSError(5, "Input/output error"), StorageError, "a: cannot read: Input/output error"),
        (OSError("no footer"), FormatError, "a: cannot be read as Parquet: no footer; write the"),
        (pa.ArrowInvalid("no page"), FormatError, "a: cannot be read as Parquet: no page; write"),
    ):
        found = parts._unreadable("a", error)
        assert type(found) is kind
        assert str(found).startswith(message)


def test_inputs_without_a_document_are_counted(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text("\n")
    (tmp_path / "two.jsonl").write_text(" \n")
    message = r"one\.jsonl and 1 other inputs: no document in 2 lines, of which 2 are blank"
    with pytest.raises(FormatError, match=message):
        run(tmp_path / "o", [tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    # nothing is kept to resume from
    assert sorted(os.listdir(tmp_path)) == ["one.jsonl", "two.jsonl"]


@for_each(
    ("options", "kind", "message"),
    [
        ({"eod": "<none>"}, InvalidArgument, "--eod must be a token of .*json.*, got '<none>'"),
        ({"eod": 400}, InvalidArgument, "--eod must .* or an id from 0 to .*, got 400"),
        ({"eod": -1}, InvalidArgument, "--eod must be a token of .*, got -1"),
        (
            {"append_eod": True},
            InvalidArgument,
            r"defines no end token; .*--eod; its special tokens are '<eos>' \(\d+\)",
        ),
        (
            {"dtype": "uint8"},
            InvalidArgument,
            "--dtype uint8 holds ids up to 255, and those of .* up to",
        ),
        ({"dtype": "float32"}, InvalidArgument, "dtype must be an integer type, got float32"),
        ({"dtype": "uint32"}, InvalidArgument, "dtype uint32 has no code in the megatron dialect"),
        ({"tokenizer": "notes.txt"}, FormatError, r"notes\.txt: cannot be read by Sentence"),
        ({"tokenizer": "other.json"}, FormatError, r"other\.json: cannot be read by the token"),
        ({"tokenizer": "."}, InvalidArgument, "the folder holds neither tokenizer.json nor"),
        ({"tokenizer": "gone.json"}, MissingFile, r"gone\.json does not exist"),
        (
            {"tokenizer": "gpt2"},
            MissingFile,
            r"gpt2: no such file .*: hf download gpt2 --include 'tokenizer\*' --local-dir gpt2;",
        ),
        (
            {"tokenizer": "EleutherAI/gpt-neox-20b"},
            MissingFile,
            r"hf download EleutherAI/gpt-neox-20b .* then pass --tokenizer gpt-neox-20b$",
        ),
        ({"keys": []}, InvalidArgument, r"keys must be one or more .* got \[\]"),
        (
            {"keys": ["a", "a"]},
            InvalidArgument,
            r"keys must be .* distinct names, got \['a', 'a'\]",
        ),
        ({"format": "csv"}, InvalidArgument, "format must be one of jsonl, .* got .csv."),
        (
            {"on_bad_line": "warn"},
            InvalidArgument,
            "on_bad_line must be one of stop, skip, got 'warn'",
        ),
        (
            {"part_bytes": 0},
            InvalidArgument,
            r"part_bytes \(--part-size\) must be at least 1, got 0",
        ),
    ],
)
def test_bad_settings(
    tmp_path: Path,
    options: dict[str, Any],
    kind: type[MegaIndexError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    bpe = train_bpe(tmp_path / "bpe")
    Path("notes.txt").write_text("not a tokenizer")
    Path("other.json").write_text('{"version": "1.0"}')
    before = names(tmp_path)
    with pytest.raises(kind, match=message):
        run(tmp_path / "o", [source], **{"tokenizer": bpe, **options})
    assert names(tmp_path) == before


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["own.Own", null]}, "tokenizer_class": "Own"}'
    )
    (folder / "own.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InvalidArgument, match="the folder holds neither tokenizer.json nor"):
        run(tmp_path / "o", [tmp_path / "a.jsonl"], tokenizer=folder)
    assert not (tmp_path / "made").exists()


def test_ids_beyond_the_token_type_are_found_before_anything_is_done(tmp_path: Path) -> None:
    """A small vocabulary with a large id, for which Megatron's rule chooses uint16."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a b"])
    before = names(tmp_path)
    options: dict[str, Any] = {"tokenizer": tmp_path / "words.json"}
    message = (
        r"--dtype uint16 holds ids up to 65535, .*words\.json go up to 70000; pass --dtype int32"
    )
    with pytest.raises(InvalidArgument, match=message):
        run(tmp_path / "o", [source], **options)
    assert names(tmp_path) == before
    assert run(tmp_path / "o", [source], dtype="int32", **options).pairs[0].tokens == 2


def test_outputs_that_must_not_be_written(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(InvalidArgument, match="must be the common prefix"):
        run(tmp_path / "o.bin", [source])
    with pytest.raises(MissingFile, match="check the path"):
        run(tmp_path / "none" / "o", [source])
    (tmp_path / "o.bin").write_bytes(b"precious")
    with pytest.raises(StorageError, match=r"o\.bin: already exists.*--overwrite"):
        run(tmp_path / "o", [source])
    assert names(tmp_path) == {"a.jsonl", "o.bin"}
    assert (tmp_path / "o.bin").read_bytes() == b"precious"


def test_special_tokens_of_every_library_are_named(tmp_path: Path) -> None:
    from megaindex.corpus.tokenize.inputs import check_settings

    for path, named in (
        (train_bpe(tmp_path / "bpe"), r"; its special tokens are '<eos>' \(1\), '<bos>' \(0\)$"),
        (
            train_sentencepiece(tmp_path / "pieces"),
            r"; its special tokens are '</s>' \(2\), '<s>' \(1\)$",
        ),
        ("bytes", r"an id from 0 to 256, got '<\|none\|>'$"),
    ):
        file = find_tokenizer(path, add_special_tokens=True)
        with pytest.raises(InvalidArgument, match=named):
            check_settings(file, ["text"], eod="<|none|>", append_eod=False, dtype=None)
        size = load(file).vocab_size
        with pytest.raises(InvalidArgument, match=f"an id from 0 to {size - 1}"):
            check_settings(file, ["text"], eod=size, append_eod=False, dtype=None)


def test_the_end_token_of_a_sentencepiece_model(tmp_path: Path) -> None:
    """It may be id 0, and a model may have none."""
    from megaindex.corpus.tokenize.inputs import check_settings

    def own_eod(**options: int) -> int | None:
        model = train_sentencepiece(tmp_path / "pieces", **options)
        file = find_tokenizer(model, add_special_tokens=True)
        return check_settings(file, ["text"], eod=None, append_eod=True, dtype=None).eod

    assert own_eod() == 2
    assert own_eod(eos_id=0, unk_id=2) == 0
    with pytest.raises(InvalidArgument, match=r"small\.model: defines no end token; .* --eod; its"):
        own_eod(eos_id=-1)


def test_a_zstd_file_may_begin_with_a_frame_that_is_skipped(tmp_path: Path) -> None:
    """As pzstd writes them, with the size of the frame that follows."""
    text = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "a.jsonl").write_bytes(text)
    packed = zstandard.ZstdCompressor().compress(text)
    size = (4).to_bytes(4, "little")
    for kind in (0x50, 0x5F):
        head = bytes([kind]) + b"\x2a\x4d\x18" + size + len(packed).to_bytes(4, "little")
        (tmp_path / "a.jsonl.zst").write_bytes(head + packed)
        run(tmp_path / f"o{kind}", [tmp_path / "a.jsonl.zst"])
        run(tmp_path / f"p{kind}", [tmp_path / "a.jsonl"])
        assert pair(tmp_path / f"o{kind}") == pair(tmp_path / f"p{kind}")


def test_white_space_before_a_tokenizer_json(tmp_path: Path) -> None:
    path = train_bpe(tmp_path / "bpe")
    plain = find_tokenizer(path, add_special_tokens=True)
    path.write_text(f"\n  {path.read_text()}")
    spaced = find_tokenizer(path, add_special_tokens=True)
    assert spaced.library == plain.library == "tokenizers"
    assert load(spaced).vocab_size > 256


def test_an_input_by_a_url_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InvalidArgument, match=r"is a URL"):
        run(tmp_path / "o", [f"file://{tmp_path}/a.jsonl"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]
