"""Comparison with the bytes of Megatron's tool, for every input format and kind of tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.inputs import for_each
from support.tokenizing import (
    TEXTS,
    encoder_of,
    names,
    packed,
    pair,
    run,
    train_bpe,
    train_sentencepiece,
    write_as_megatron,
    write_jsonl,
)

import megaindex
from megaindex.cli import main
from megaindex.corpus.tokenize.encode import lay_out
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.tokenizers import _readable, find_tokenizer, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def bpe(folder: Path) -> Path:
    return train_bpe(folder / "bpe")


@pytest.fixture(scope="module")
def templated(folder: Path) -> Path:
    return train_bpe(folder / "templated", template=True)


@pytest.fixture(scope="module")
def pieces(folder: Path) -> Path:
    return train_sentencepiece(folder / "pieces")


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["bpe", "templated", "pieces", "bytes"])
def test_jsonl_of_every_packing_with_every_tokenizer(
    tmp_path: Path,
    megatron_datasets: Any,
    request: pytest.FixtureRequest,
    kind: str,
    suffix: str,
    append: bool,
) -> None:
    tokenizer = "bytes" if kind == "bytes" else request.getfixturevalue(kind)
    eod: dict[str, Any] = {"bytes": 256, "pieces": "</s>"}.get(kind, "<eos>")
    source = write_jsonl(tmp_path / f"a.jsonl{suffix}", TEXTS)
    made = run(
        tmp_path / "ours",
        [source],
        tokenizer=tokenizer,
        eod=eod if append else None,
        part_bytes=700,
    )
    # <bos> is 0 and <eos> 1 in what is trained here; </s> is 2 in a SentencePiece model
    ids = {"bytes": 256, "pieces": 2}.get(kind, 1)
    write_as_megatron(
        megatron_datasets, tmp_path / "theirs", TEXTS, encoder_of(tokenizer),
        eod=ids if append else None,
    )  # fmt: skip
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    assert made.documents == len(TEXTS)
    assert made.empty == (0 if kind == "templated" else 1,)
    assert made.pairs[0].dtype == "uint16"
    assert (made.parts > 1) == (suffix == "")
    made_of = {"ours.provenance", *(f"{n}.{s}" for n in ("ours", "theirs") for s in ("bin", "idx"))}
    assert names(tmp_path) == {source.name, *made_of}


def test_without_the_tokens_of_the_template(
    tmp_path: Path, megatron_datasets: Any, templated: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path / "ours", [source], tokenizer=templated, add_special_tokens=False)
    write_as_megatron(
        megatron_datasets, tmp_path / "theirs", TEXTS, encoder_of(templated, special=False)
    )
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    run(tmp_path / "with", [source], tokenizer=templated)
    assert pair(tmp_path / "with") != pair(tmp_path / "ours")


@for_each(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
@for_each("part_bytes", [1, 1 << 20])
def test_parquet(
    tmp_path: Path, megatron_datasets: Any, bpe: Path, kind: Any, part_bytes: int
) -> None:
    table = pa.table({"id": range(len(TEXTS)), "body": pa.array(TEXTS).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    made = run(
        tmp_path / "ours", [tmp_path / "a.parquet"], tokenizer=bpe, keys=["body"],
        part_bytes=part_bytes,
    )  # fmt: skip
    assert made.parts == (4 if part_bytes == 1 else 1)
    write_as_megatron(megatron_datasets, tmp_path / "theirs", TEXTS, encoder_of(bpe))
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.string_view()), pa.list_view(pa.string()), pa.large_list_view(pa.string_view()),
     pa.list_(pa.string(), 2)],
)  # fmt: skip
def test_parquet_lists_of_all_kinds(tmp_path: Path, kind: Any) -> None:
    values = [["a", "b"], ["cd", "e" * 40]]
    pq.write_table(pa.table({"text": pa.array(values, kind)}), tmp_path / "a.parquet")
    run(tmp_path / "ours", [tmp_path / "a.parquet"])
    run(tmp_path / "plain", [write_jsonl(tmp_path / "a.jsonl", values)])
    assert pair(tmp_path / "ours") == pair(tmp_path / "plain")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_files_by_lines_and_whole(tmp_path: Path, megatron_datasets: Any, suffix: str) -> None:
    text = "first line\n\nzweite Zeile: ß\r\n  \nlast, without an end"
    source = tmp_path / f"a.txt{suffix}"
    source.write_bytes(packed(text.encode(), suffix))
    made = run(tmp_path / "lines", [source], part_bytes=5)
    assert made.blank_lines == 2
    run(tmp_path / "files", [source, source], format="files")
    encode = encoder_of("bytes")
    lines = ["first line", "zweite Zeile: ß", "last, without an end"]
    write_as_megatron(megatron_datasets, tmp_path / "t-lines", lines, encode)
    write_as_megatron(megatron_datasets, tmp_path / "t-files", [text, text], encode)
    assert pair(tmp_path / "lines") == pair(tmp_path / "t-lines")
    assert pair(tmp_path / "files") == pair(tmp_path / "t-files")


def test_lists_are_documents_of_several_sequences(
    tmp_path: Path, megatron_datasets: Any, bpe: Path
) -> None:
    values: list[Any] = [["One.", "", "Two."], [], "plain", [""], ["Last.", ""]]
    source = write_jsonl(tmp_path / "a.jsonl", values)
    table = pa.table({"text": [v if isinstance(v, list) else [v] for v in values]})
    pq.write_table(table, tmp_path / "a.parquet")
    write_as_megatron(megatron_datasets, tmp_path / "theirs", values, encoder_of(bpe), eod=1)
    for name, path in (("json", source), ("rows", tmp_path / "a.parquet")):
        made = run(tmp_path / name, [path], tokenizer=bpe, eod="<eos>")
        assert made.empty == (2,)
        assert pair(tmp_path / name) == pair(tmp_path / "theirs")


def test_several_keys_make_pairs_of_megatrons_names(
    tmp_path: Path, megatron_datasets: Any, bpe: Path
) -> None:
    source = tmp_path / "a.jsonl"
    rows = [{"title": text[:5], "text": text, "n": float("nan")} for text in TEXTS]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = run(tmp_path / "o", [source], tokenizer=bpe, keys=["text", "title"], part_bytes=50)
    for key, found in zip(["text", "title"], made.pairs, strict=True):
        assert found.path_prefix == str(tmp_path / f"o_{key}_document")
        theirs = tmp_path / f"theirs_{key}"
        write_as_megatron(megatron_datasets, theirs, [r[key] for r in rows], encoder_of(bpe))
        assert pair(Path(found.path_prefix)) == pair(theirs)
    run(tmp_path / "p", [source], megatron_names=True)
    assert {"p_text_document.bin", "p_text_document.idx"} <= names(tmp_path)


def test_many_files_of_a_folder_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, text in (("b.jsonl.gz", "b"), ("a.jsonl", "a"), ("c.txt", "c")):
        path = tmp_path / "in" / name
        data = text if name == "c.txt" else json.dumps({"text": text})
        path.write_bytes(packed(data.encode(), path.suffix))
    (tmp_path / "in" / "readme.md").write_text("not one of them")
    made = run(tmp_path / "o", [tmp_path / "in"])
    dataset = megaindex.IndexedDataset(str(tmp_path / "o"))
    assert bytes(np.concatenate(list(dataset)).astype(np.uint8)) == b"abc"
    assert made.parts == 1  # small inputs go together


@pytest.mark.parametrize(
    ("form", "documents"),
    [(None, [b"one\ntwo\n", b"three\n\nfour"]), ("lines", [b"one", b"two", b"three", b"four"])],
)
def test_a_text_file_of_a_folder_is_a_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str | None, documents: list[bytes]
) -> None:
    """Unless a format is said, which is then not said again; a file that is named has lines."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"one\ntwo\n")
    (tmp_path / "in" / "b.text.gz").write_bytes(packed(b"three\n\nfour", ".gz"))
    run(tmp_path / "o", [tmp_path / "in"], format=form)
    dataset = megaindex.IndexedDataset(str(tmp_path / "o"))
    assert [bytes(np.asarray(one).astype(np.uint8)) for one in dataset] == documents
    assert caplog.text.count("each file is a document") == (form is None)
    assert run(tmp_path / "p", [tmp_path / "in" / "a.txt"], format=form).documents == 2
    assert caplog.text.count("each line is a document") == (form is None)


def test_text_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\ntwo\n")
    for given in (tmp_path / "in", tmp_path / "in" / "a.txt"):
        with pytest.raises(InvalidArgument, match=r"a\.txt: a text file has no keys"):
            run(tmp_path / "o", [given], keys=["text", "title"])
    run(tmp_path / "o", [tmp_path / "in"], keys=["title"])


def test_the_token_type_is_megatrons(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = write_jsonl(tmp_path / "a.jsonl", ["t1 t3 t2"])
    for size, dtype in ((65_499, "uint16"), (65_500, "int32")):
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(tmp_path / "words.json"))
        made = run(tmp_path / dtype, [source], tokenizer=tmp_path / "words.json")
        assert made.pairs[0].dtype == dtype
        found = megaindex.IndexedDataset(str(tmp_path / dtype))[0]
        assert found.tolist() == [1, 3, 2]
    made = run(tmp_path / "wide", [source], dtype="int64")
    assert made.pairs[0].dtype == "int64"


@pytest.mark.parametrize(
    "entry",
    [
        {"eos_token": "<eos>"},
        {"sep_token": {"content": "<eos>"}},
        {"sep_token": "<bos>", "eos_token": "<eos>"},
    ],
)
def test_the_tokenizers_own_end(tmp_path: Path, bpe: Path, pieces: Path, entry: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(bpe.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(entry))
    for name, tokenizer, last in (("h", folder, 1), ("s", pieces, 2), ("b", "bytes", 256)):
        run(tmp_path / name, [source], tokenizer=tokenizer, append_eod=True)
        assert megaindex.IndexedDataset(str(tmp_path / name))[0][-1] == last


def test_a_tokenizer_without_an_end_wants_one(tmp_path: Path, bpe: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": null}')
    with pytest.raises(InvalidArgument, match=r"defines no end token; name one with --eod; its sp"):
        run(tmp_path / "o", [source], tokenizer=tmp_path / "tokenizer.json", append_eod=True)


def test_ids_are_decoded_to_the_text(pieces: Path) -> None:
    for tokenizer in (pieces, "bytes"):
        loaded = load(find_tokenizer(tokenizer, add_special_tokens=False))
        tokens, _ = loaded.encode(["some words"])
        assert loaded.decode(tokens.tolist()) == "some words"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit, GeneratorExit])
def test_what_ends_a_process_is_no_error_of_a_tokenizer(
    bpe: Path, error: type[BaseException]
) -> None:
    with (
        pytest.raises(error),
        _readable(find_tokenizer(bpe, add_special_tokens=True), "tokenizers"),
    ):
        raise error
    with (
        pytest.raises(FormatError, match="cannot be read by tokenizers: a panic; pass a tokenizer"),
        _readable(find_tokenizer(bpe, add_special_tokens=True), "tokenizers"),
    ):
        raise BaseException("a panic")


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "9" * 5000])
def test_damaged_tokenizer_config(tmp_path: Path, bpe: Path, text: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: must be a JSON object"):
        run(tmp_path / "o", [source], tokenizer=tmp_path / "tokenizer.json", append_eod=True)


def test_layout_of_a_document() -> None:
    tokens, lengths, sequences = lay_out(np.array([5, 6, 7]), np.array([2, 0, 1]), [2, 1], 9)
    assert tokens.tolist() == [5, 6, 9, 7, 9]
    assert lengths.tolist() == [3, 2]
    assert sequences.tolist() == [1, 1]
    tokens, lengths, sequences = lay_out(np.array([], np.int32), np.array([0, 0]), [1, 1], 9)
    assert (tokens.size, lengths.size, sequences.tolist()) == (0, 0, [0, 0])


def test_the_command(
    tmp_path: Path, bpe: Path, megatron_datasets: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"text": "one"}\n\n{"txt": "two"}\n[3]\n{"text": "four"}\n')
    arguments = [
        "tokenize", str(tmp_path / "o"), str(good), str(bad), "--tokenizer", str(bpe),
        "--eod", "1", "--workers", "1", "--part-size", "1k",
    ]  # fmt: skip
    assert main(arguments) == 2
    assert "b.jsonl: line 3: has no key 'text'; it has 'txt'" in capsys.readouterr().err
    assert main([*arguments, "--on-bad-line", "skip", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["documents"] == len(TEXTS) + 2
    assert made["blank_lines"] == 1
    assert [line["number"] for line in made["bad"]["first"]] == [3, 4]
    report = [json.loads(line) for line in (tmp_path / "o.bad.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"], r["rule"]) for r in report] == [
        (str(bad), 3, "missing-key"),
        (str(bad), 4, "object"),
    ]
    write_as_megatron(
        megatron_datasets, tmp_path / "theirs", [*TEXTS, "one", "four"], encoder_of(bpe), eod=1
    )
    assert pair(tmp_path / "o") == pair(tmp_path / "theirs")
    assert main([*arguments, "--on-bad-line", "skip", "--overwrite"]) == 0
    said = capsys.readouterr()
    assert f"{len(TEXTS) + 2} documents" in said.out
    assert "2 bad lines left out, all in" in said.err
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_missing_library_is_named(tmp_path: Path, bpe: Path) -> None:
    """Run in a process in which the import fails."""
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    code = f"""
import importlib.metadata as m, sys
def gone(name): raise m.PackageNotFoundError(name)
m.version = gone
sys.argv = []
from megaindex.cli import main
sys.exit(main(["tokenize", {str(tmp_path / "o")!r}, {str(source)!r}, "--tokenizer", {str(bpe)!r}]))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert found.returncode == 2
    assert "pip install 'megaindex[tokenizers]'" in found.stderr
