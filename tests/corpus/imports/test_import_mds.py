"""Imports of MDS shards, written by the real MDSWriter of mosaicml-streaming."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.inputs import for_each
from support.mds_writing import write_mds

from megaindex.cli import main
from megaindex.corpus.imports import mds
from megaindex.corpus.imports.flat import import_pair
from megaindex.corpus.imports.mds import open_mds
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format import IndexedDataset
from megaindex.format.provenance import open_provenance

DOCUMENTS = [np.arange(i, i + 1 + 7 * i % 50) % 60_000 for i in range(200)]


def read(prefix: Path) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def expected() -> list[list[int]]:
    return [document.tolist() for document in DOCUMENTS]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("dtype", ["int64", "uint16", "uint32"])
def test_mds_bytes(tmp_path: Path, dtype: str) -> None:
    """The encoding of LLM-Foundry: tobytes() of int64 by default; an only column has any name."""
    name = "tokens" if dtype == "int64" else "ids"
    samples = [{name: document.astype(dtype).tobytes()} for document in DOCUMENTS]
    samples.append({name: b""})
    folder = write_mds(tmp_path / "mds", {name: "bytes"}, samples)
    assert len(names(tmp_path / "mds")) > 2
    stored = None if dtype == "int64" else dtype
    outcome = import_pair(open_mds(folder, stored_dtype=stored), str(tmp_path / "a"))
    assert (outcome.how, outcome.dtype) == ("copied", dtype.replace("uint32", "int32"))
    assert read(tmp_path / "a") == [*expected(), []]


@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray:uint16", "ndarray"])
def test_mds_arrays_between_other_columns(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are sorted by name; some have a fixed size, some a size in each sample."""
    dtype = encoding.partition(":")[2] or "int32"
    samples = [
        {"a": 7, "b": np.uint8(i), "id": f"{i}" * (i % 5), "tokens": document.astype(dtype),
         "z": i / 2, "zz": b"x"}
        for i, document in enumerate(DOCUMENTS)
    ]  # fmt: skip
    columns = {"a": "int", "b": "uint8", "id": "str", "tokens": encoding, "z": "float64",
               "zz": "bytes"}  # fmt: skip
    folder = write_mds(tmp_path / "mds", columns, [{**s, "z": np.float64(s["z"])} for s in samples])
    monkeypatch.setattr(mds, "_BATCH_TOKENS", 100)
    stored = None if ":" in encoding else dtype
    outcome = import_pair(open_mds(folder, "tokens", stored), str(tmp_path / "a"))
    assert outcome.dtype == dtype
    assert read(tmp_path / "a") == expected()


def test_mds_arrays_of_one_shape(tmp_path: Path) -> None:
    blocks = np.arange(60, dtype=np.int64).reshape(10, 6)
    columns = {"input_ids": "ndarray:int64:6", "n": "uint8"}
    samples = [{"input_ids": block, "n": np.uint8(3)} for block in blocks]
    folder = write_mds(tmp_path / "mds", columns, samples)
    assert import_pair(open_mds(folder), str(tmp_path / "a"), dtype="uint16").dtype == "uint16"
    assert read(tmp_path / "a") == blocks.tolist()
    columns["input_ids"] = "ndarray:int64:2,3"
    samples = [{"input_ids": block.reshape(2, 3), "n": np.uint8(3)} for block in blocks]
    with pytest.raises(InvalidArgument, match=r"with one axis, .* got 'ndarray:int64:2,3'"):
        open_mds(write_mds(tmp_path / "square", columns, samples))


@pytest.mark.parametrize("compression", ["zstd:7", "gz", "bz2"])
def test_mds_compressed(tmp_path: Path, compression: str) -> None:
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples, compression=compression)
    import_pair(open_mds(folder), str(tmp_path / "a"))
    assert read(tmp_path / "a") == expected()
    shard = next((tmp_path / "mds").glob("shard.00000.*"))
    raw = shard.read_bytes()
    damaged = [raw[:-20], bytes(20) + raw[20:]]
    if compression == "gz":
        damaged.append(raw[:-8] + bytes(8))  # its checksum, read at the very end
    for data in damaged:
        shard.write_bytes(data)
        with pytest.raises(FormatError, match=r"shard\.00000\.mds\.\w+: (cannot be|ends before)"):
            import_pair(open_mds(folder), str(tmp_path / "b"))
    if compression == "gz":  # the shard itself, if it is there
        shard.with_suffix("").write_bytes(gzip.decompress(raw))
        import_pair(open_mds(folder), str(tmp_path / "a"), overwrite=True)
        assert read(tmp_path / "a") == expected()
    assert names(tmp_path) == ["a.bin", "a.idx", "a.provenance", "mds"]


def test_mds_compression_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples, compression="zstd")
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(InvalidArgument, match=r"with zstd; pip install 'megaindex\[zstd\]'"):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    index = tmp_path / "mds/index.json"
    index.write_text(index.read_text().replace('"compression": "zstd"', '"compression": "br:3"'))
    with pytest.raises(InvalidArgument, match="compression must be zstd, gz or bz2"):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    assert names(tmp_path) == ["mds"]


@for_each(
    ("columns", "column", "stored", "message"),
    [
        ({"a": "str", "b": "bytes"}, None, None, "no column of tokens; choose one of a, b"),
        ({"a": "str", "b": "bytes"}, "c", None, "no column c; choose one of a, b"),
        ({"tokens": "str"}, None, None, "column 'tokens': encoding must be bytes .* got 'str'"),
        ({"tokens": "bytes"}, None, "float32", "must be a NumPy integer type"),
        ({"tokens": "ndarray"}, None, None, "arrays may differ in type; give the stored dtype"),
        ({"tokens": "ndarray:int32"}, None, "int64", "must be int32, got int64"),
    ],
)
def test_mds_columns_that_do_not_fit(
    tmp_path: Path, columns: dict[str, str], column: str | None, stored: str | None, message: str
) -> None:
    value = {"str": "x", "bytes": b"12345678", "ndarray": np.ones(1, np.int32)}
    sample = {name: value[encoding.partition(":")[0]] for name, encoding in columns.items()}
    folder = write_mds(tmp_path / "mds", columns, [sample])
    with pytest.raises(InvalidArgument, match=message):
        open_mds(folder, column, stored)


def test_damaged_mds_samples(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", {"tokens": "bytes"}, [{"tokens": b"1234567"}])
    with pytest.raises(FormatError, match="not whole tokens of int64"):
        import_pair(open_mds(folder), str(tmp_path / "x"))
    square = {"tokens": np.ones((2, 2), np.int32)}
    folder = write_mds(tmp_path / "b", {"tokens": "ndarray:int32"}, [square])
    with pytest.raises(FormatError, match="an array has 2 axes"):
        import_pair(open_mds(folder), str(tmp_path / "x"))
    folder = write_mds(tmp_path / "c", {"tokens": "ndarray"}, [square])
    with pytest.raises(FormatError, match="an array has type code 21"):
        import_pair(open_mds(folder, stored_dtype="int64"), str(tmp_path / "x"))
    folder = write_mds(
        tmp_path / "d", {"tokens": "ndarray:int32"}, [{"tokens": square["tokens"][0]}]
    )
    shard = tmp_path / "d/shard.00000.mds"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-9] + b"\1" + raw[-8:])  # the length, before eight bytes of tokens
    with pytest.raises(FormatError, match="an array has 1 axes, length 1 and 8 bytes"):
        import_pair(open_mds(folder), str(tmp_path / "x"))
    assert names(tmp_path) == ["a", "b", "c", "d"]


def test_rows_of_shards_have_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds, "_BATCH_TOKENS", 100)
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples)
    import_pair(open_mds(folder), str(tmp_path / "a"))
    found = open_provenance(str(tmp_path / "a"))
    assert found is not None
    assert found.num_documents == len(DOCUMENTS)
    assert not any(file.has_bytes for file in found.files)
    shards = json.loads((tmp_path / "mds/index.json").read_text())["shards"]
    rows = [row for shard in shards for row in range(shard["samples"])]
    assert found.locate(np.arange(len(DOCUMENTS))).row.tolist() == rows


def test_mds_tokens_that_do_not_fit(tmp_path: Path) -> None:
    samples = [{"tokens": np.array([5, 70_000])}]
    folder = write_mds(tmp_path / "mds", {"tokens": "ndarray:int64"}, samples)
    with pytest.raises(
        InvalidArgument, match=r"shard\.00000\.mds: from row 0 on, tokens\[1\]=70000"
    ):
        import_pair(open_mds(folder), str(tmp_path / "a"), dtype="uint16")
    assert names(tmp_path) == ["mds"]


def with_size(raw: bytes, size: int) -> bytes:
    """Return the shard with another size of the column in its first sample."""
    (begin,) = struct.unpack_from("<I", raw, 4)
    return raw[:begin] + struct.pack("<I", size) + raw[begin + 4 :]


@for_each(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], "ends before byte \\d+"),
        (lambda raw: raw[:2], "ends before byte"),
        (lambda raw: b"\1" + raw[1:], r"must hold \d+ samples, got 1"),
        (
            lambda raw: raw[:4] + bytes(4) + raw[8:],
            r"offsets of samples must rise .* got 0 to",
        ),
        (lambda raw: raw[:8] + b"\xff\xff\xff\xff" + raw[12:], "offsets of samples must rise"),
        (
            lambda raw: raw.replace(*(struct.pack("<I", len(raw) - k) for k in (0, 1)), 1),
            "offsets of samples must rise",
        ),
        (lambda raw: raw + b"\0", r"must end at byte \d+"),
        (lambda raw: raw[:8] + raw[4:8] + raw[12:], "column 'tokens': a sample has 0 bytes"),
        (lambda raw: with_size(raw, 2**31), r"column 'tokens': has \d+ of 2147483648 bytes"),
    ],
)
def test_damaged_mds_shards(tmp_path: Path, damage: Any, message: str) -> None:
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples)
    shard = tmp_path / "mds/shard.00001.mds"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(FormatError, match=rf"shard\.00001\.mds: {message}"):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    assert names(tmp_path) == ["mds"]


def changed(index: str, **values: str) -> str:
    """Return the index with other values for these keys."""
    for name, value in values.items():
        index, count = re.subn(rf'"{name}": \d+', f'"{name}": {value}', index)
        assert count
    return index


def test_damaged_mds_folders(tmp_path: Path) -> None:
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples, compression="gz")
    index = tmp_path / "mds/index.json"
    good = index.read_text()
    for text, message in [
        ("{}", "not an index of MDS shards: KeyError 'shards'"),
        ("[", "not an index of MDS shards"),
        ("[" * 100_000, "not an index of MDS shards: it is nested too deeply"),
        ("[]", "not an index of MDS shards: it is not a JSON object"),
        ('{"shards": "text"}', "not an index of MDS shards: TypeError"),
        (changed(good, samples=9 * "9" * 600), "not an index of MDS shards"),
        (changed(good, bytes='"x"'), "bytes must be a size, found 'x'"),
        (changed(good, bytes="1e400"), "bytes must be a size, found inf"),
        (changed(good, samples="-1"), "samples must be a size, found -1"),
        (good.replace('"shard.00000', r'"shard\u0000'), "basename must be the name of a file"),
        (good.replace('["bytes"]', '["bytes", "int"]'), "column_encodings must be a list, one of"),
        (good.replace('["bytes"]', "[7]"), "column_encodings cannot be"),
        (good.replace("[null]", "[-7]"), "column_sizes cannot be"),
        ('{"shards": [3]}', "not an index of MDS shards: TypeError"),
        (
            good.replace('["bytes"]', '["ndarray:int32"]', 1),
            "all shards must have one token type, got int32 and int64",
        ),
        ('{"shards": []}', "all shards must have one token type, got no shards"),
        (
            good.replace('"format": "mds"', '"format": "csv"'),
            "shards must be of format mds version 2, got csv version 2",
        ),
        (good.replace('"shard.00000', '"../shard.00000'), "a shard must lie in its folder"),
        (good.replace('"shard.00000', '"/etc/shard.00000'), "a shard must lie in its folder"),
    ]:
        assert text != good
        index.write_text(text)
        with pytest.raises(FormatError, match=message):
            open_mds(folder)
    index.write_bytes(b'{"shards": "\xff"}')
    with pytest.raises(FormatError, match="not an index of MDS shards"):
        open_mds(folder)
    index.write_text(good)
    shard = tmp_path / "mds/shard.00000.mds.gz"
    shard.write_bytes(b"no gzip at all")
    with pytest.raises(FormatError, match="cannot be decompressed"):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    shard.unlink()
    os.mkfifo(shard)
    pipe = os.open(shard, os.O_RDWR)  # with a writer, so that reading it would not wait
    os.write(pipe, b"no gzip")
    with pytest.raises(StorageError, match=r"shard\.00000\.mds\.gz: .* not a regular file"):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    os.close(pipe)
    shard.unlink()
    with pytest.raises(MissingFile, match=r"shard\.00000\.mds\.gz: cannot read"):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    with pytest.raises(MissingFile, match=r"nowhere/index\.json: cannot read"):
        open_mds(str(tmp_path / "nowhere"))
    assert names(tmp_path) == ["mds"]


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (MemoryError(), MemoryError),
        (EOFError("Compressed file ended"), FormatError),
    ],
)
def test_a_failing_disk_does_not_damage_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, refused: type[Exception]
) -> None:
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples)
    stream = Mock()
    stream.read.side_effect = error
    monkeypatch.setattr(mds, "_open", lambda _: contextlib.nullcontext(stream))
    with pytest.raises(refused):
        import_pair(open_mds(folder), str(tmp_path / "a"))
    assert names(tmp_path) == ["mds"]


def test_mds_memory_does_not_depend_on_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds, "_BATCH_TOKENS", 1 << 14)
    peaks = []
    for count in (100, 400):
        samples = [{"tokens": np.full(1 << 12, 3).tobytes()}] * count
        folder = write_mds(tmp_path / str(count), {"tokens": "bytes"}, samples, size_limit=None)
        tracemalloc.start()
        import_pair(open_mds(folder), str(tmp_path / f"{count}-pair"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 17) < 1 << 23


def test_the_verb_for_mds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples)
    assert main(["import", "mds", folder, str(tmp_path / "a"), "--dtype", "uint16"]) == 0
    assert "200 documents, 5,100 tokens, uint16, copied" in capsys.readouterr().out
    assert main(["import", "mds", folder, str(tmp_path / "a")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_index_has_the_written_documents(tmp_path: Path) -> None:
    """The stubs for the writer do not change its documented files."""
    samples = [{"tokens": document.tobytes()} for document in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, samples)
    shards = json.loads((tmp_path / "mds/index.json").read_text())["shards"]
    assert sum(shard["samples"] for shard in shards) == len(DOCUMENTS)
    stream = open_mds(folder)
    assert stream.nbytes == sum(path.stat().st_size for path in Path(folder).glob("*.mds"))
