"""Inputs in a bucket against the same inputs on a disk, byte for byte."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.object_server import Proxy, request
from support.tokenizing import TEXTS, pair, run, write_jsonl

from megaindex.cli import main
from megaindex.corpus.tokenize import encode, reading
from megaindex.errors import FormatError, MissingFile, StorageError


def put(proxy: Proxy, bucket: str, path: Path, folder: str = "raw") -> str:
    request(proxy.upstream, "PUT", f"/{bucket}/{folder}/{path.name}", path.read_bytes())
    return f"s3://{bucket}/{folder}/{path.name}"


def write_input(path: Path) -> Path:
    texts = TEXTS * 20
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts, "other": texts}), path, row_group_size=9)
        return path
    if path.suffix == ".txt":
        path.write_text("\n".join(text for text in texts if text))
        return path
    return write_jsonl(path, texts)


@pytest.mark.slow_cases("a.jsonl", "a.txt")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.parquet"])
def test_an_object_gives_what_a_file_gives(
    s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(reading, "_OBJECT_BLOCK", 4096)
    monkeypatch.setattr(reading, "_OBJECT_SHORT", 512)
    path = write_input(tmp_path / name)
    url = put(proxy, s3, path)
    here = run(tmp_path / "here", [path], part_bytes=20_000)
    proxy.seen.clear()
    there = run(tmp_path / "there", [url], part_bytes=20_000)
    assert pair(tmp_path / "there") == pair(tmp_path / "here")
    assert (there.parts, there.input_bytes) == (here.parts, path.stat().st_size)
    gets = proxy.gets(name)
    assert all(seen.if_match for seen in gets)
    if name == "a.parquet":  # row groups are not read one by one
        assert len(gets) < pq.ParquetFile(path).num_row_groups
    if name in ("a.jsonl", "a.txt"):  # no more than the parts and the ends of their last lines
        asked = [re.fullmatch(r"bytes=(\d+)-(\d+)", seen.range or "") for seen in gets]
        nbytes = sum(int(a[2]) - int(a[1]) + 1 for a in asked if a)
        assert nbytes < path.stat().st_size + there.parts * 8 * 1024
    assert not (tmp_path / "cache").exists()
    suffixes = ("bin", "idx", "provenance")
    assert {p.name for p in tmp_path.iterdir()} == {
        name, *(f"{out}.{suffix}" for out in ("here", "there") for suffix in suffixes)
    }  # fmt: skip


def test_folders_files_and_objects_together_by_the_command(
    s3: str, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """In processes of their own."""
    files = [write_input(tmp_path / name) for name in ("b.jsonl", "a.jsonl.gz", "c.parquet")]
    for path in files[:2]:
        put(proxy, s3, path)
    (tmp_path / "notes").write_text("no input")
    put(proxy, s3, tmp_path / "notes")
    run(tmp_path / "here", [files[1], files[0], files[2]])
    arguments = [str(tmp_path / "there"), f"s3://{s3}/raw", str(files[2])]
    status = main(["tokenize", *arguments, "--tokenizer", "bytes", "--part-size", "30000"])
    assert status == 0, capsys.readouterr().err
    assert pair(tmp_path / "there") == pair(tmp_path / "here")
    assert f"s3://{s3}/raw: 1 files and folders in it are skipped, first notes" in caplog.text


@pytest.mark.slow
def test_finished_parts_are_not_read_again(
    s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_OBJECT_BLOCK", 4096)
    path = write_input(tmp_path / "a.jsonl")
    url = put(proxy, s3, path)
    done = encode.encode_part
    count = 0

    def dies(task: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return done(task)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["megaindex.corpus.tokenize.run"], "encode_part", dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "o", [url], part_bytes=20_000)
    proxy.seen.clear()
    made = run(tmp_path / "o", [url], part_bytes=20_000)
    assert made.resumed == 2
    begins = [int((seen.range or "=0-").split("=")[1].split("-")[0]) for seen in proxy.gets()]
    assert sorted(begins)[1] >= 2 * 20_000 - 1  # but for the first bytes, which tell the packing
    run(tmp_path / "here", [path])
    assert pair(tmp_path / "o") == pair(tmp_path / "here")


def test_an_object_that_is_replaced_ends_the_run(
    s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(proxy, s3, write_input(tmp_path / "a.jsonl"))
    done = encode.encode_part

    def replaced(task: Any) -> Any:
        put(proxy, s3, write_jsonl(tmp_path / "a.jsonl", ["another"]))
        return done(task)

    monkeypatch.setattr(sys.modules["megaindex.corpus.tokenize.run"], "encode_part", replaced)
    with pytest.raises(StorageError, match=rf"^{url}: replaced while it was tokenized"):
        run(tmp_path / "o", [url])
    assert not (tmp_path / "o.bin").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_store_that_gives_up_is_named(
    s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = put(proxy, s3, write_input(tmp_path / name))
    done = encode.encode_part

    def denied(task: Any) -> Any:
        proxy.faults += ["403"] * 9
        return done(task)

    monkeypatch.setattr(sys.modules["megaindex.corpus.tokenize.run"], "encode_part", denied)
    with pytest.raises(StorageError, match=rf"^{url}: cannot read .*: access denied \(403"):
        run(tmp_path / "o", [url])


def test_bad_lines_and_objects_are_named(s3: str, proxy: Proxy, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    url = put(proxy, s3, path)
    with pytest.raises(FormatError, match=rf"^{url}: line {len(TEXTS) + 1}: is not valid JSON"):
        run(tmp_path / "o", [url], part_bytes=500)
    made = run(tmp_path / "o", [url], part_bytes=500, on_bad_line="skip")
    assert made.bad is not None
    assert made.bad.first[0].path == url
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(FormatError, match=r"empty\.jsonl: is empty \(0 bytes\)"):
        run(tmp_path / "p", [put(proxy, s3, tmp_path / "empty.jsonl")])
    with pytest.raises(MissingFile, match=rf"^s3://{s3}/nothing: does not exist"):
        run(tmp_path / "p", [f"s3://{s3}/nothing"])
    put(proxy, s3, path.rename(tmp_path / "notes"), "other")
    with pytest.raises(MissingFile, match=r"the folder holds no file that ends in"):
        run(tmp_path / "p", [f"s3://{s3}/other/"])
