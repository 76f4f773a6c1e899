"""Imports of token lists in Parquet and Arrow files, written by pyarrow."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files import closed
from support.inputs import for_each

from megaindex.corpus.imports.flat import import_pair
from megaindex.corpus.imports.formats import open_columns
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format import IndexedDataset

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

DOCUMENTS = [(np.arange(i, i + 1 + 7 * i % 50) % 60_000).tolist() for i in range(200)]


def test_an_unreadable_folder() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:  # others may enter it
        Path(outer).chmod(0o755)
        folder = Path(outer, "folder")
        folder.mkdir()
        with (
            closed(folder),
            pytest.raises(StorageError, match="folder: cannot list"),
        ):
            open_columns(str(folder))


def test_a_saved_dataset_has_the_files_of_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that `map` cached beside them, nor what is in folders."""
    saved, other = tmp_path / "saved", tmp_path / "other"
    for folder in (saved, other):
        (folder / "train").mkdir(parents=True)
        for name, documents in (("data-1", [[1]]), ("data-0", [[2, 3]]), ("cache-9f", [[4]])):
            write_columns(folder / f"{name}.arrow", pa.list_(pa.int32()), documents)
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}]}
    (saved / "state.json").write_text(json.dumps(state))
    for folder, expected in ((saved, [[1], [2, 3]]), (other, [[2, 3], [1]])):
        caplog.clear()
        import_pair(open_columns(str(folder)), str(tmp_path / folder.name))
        assert read(tmp_path / folder.name) == expected
        assert "2 files and folders in it are skipped, first cache-9f.arrow" in caplog.text
    for content in ("[]", "{}", '{"_data_files": []}', '{"_data_files": [{"filename": "../x"}]}',
                    '{"_data_files": [3]}'):  # fmt: skip
        (saved / "state.json").write_text(content)
        with pytest.raises(FormatError, match=r"state\.json: (must list|_data_files must be)"):
            open_columns(str(saved))


def test_an_unreadable_file() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        Path(outer).chmod(0o755)
        path = Path(outer, "c.parquet")
        write_columns(path, pa.list_(pa.int32()), DOCUMENTS)
        with (
            closed(path),
            pytest.raises(StorageError, match=r"c\.parquet: cannot read: Permission denied"),
        ):
            open_columns(str(path))


def read(prefix: Path) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def write_columns(path: Path, kind: Any, documents: list[Any], **more: Any) -> None:
    table = pa.table({"tokens": pa.array(documents, kind), **more})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=37)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=41)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=41)


@for_each("suffix", ["parquet", "arrow", "feather"])
@for_each("item", ["uint16", "int32", "uint32"])
@for_each("lists", ["list_", "large_list"])
def test_columns(tmp_path: Path, suffix: str, item: str, lists: str) -> None:
    kind = getattr(pa, lists)(getattr(pa, item)())
    text = pa.array(["a"] * 201)
    write_columns(tmp_path / f"c.{suffix}", kind, [*DOCUMENTS, []], text=text)
    outcome = import_pair(open_columns(str(tmp_path / f"c.{suffix}")), str(tmp_path / "a"))
    assert outcome.dtype == item.replace("uint32", "int32")
    assert read(tmp_path / "a") == [*DOCUMENTS, []]


def test_a_folder_of_columns(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in (2, 0, 1):
        kind = pa.list_(pa.int64(), 3)
        write_columns(folder / f"part-{number}.parquet", kind, [[number, 1, 2]] * 5)
    (folder / "README").write_text("not one of them")
    import_pair(open_columns(str(folder)), str(tmp_path / "a"), dtype="uint16")
    assert read(tmp_path / "a") == [[number, 1, 2] for number in (0, 1, 2) for _ in range(5)]
    write_columns(folder / "part-1.parquet", pa.list_(pa.int32()), [[1]])
    with pytest.raises(FormatError, match=r"part-1\.parquet: .* lists of int64"):
        import_pair(open_columns(str(folder)), str(tmp_path / "b"))


def test_wrong_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.parquet"
    write_columns(path, pa.list_(pa.int32()), [[1, 2], None])
    with pytest.raises(FormatError, match="column 'tokens' has nulls in rows 0 to 1"):
        import_pair(open_columns(str(path)), str(tmp_path / "a"))
    write_columns(path, pa.list_(pa.int32()), [[1, None]])
    with pytest.raises(FormatError, match="has nulls"):
        import_pair(open_columns(str(path)), str(tmp_path / "a"))
    with pytest.raises(InvalidArgument, match="has no column 'text'"):
        open_columns(str(path), "text")
    write_columns(path, pa.list_(pa.float32()), [[1.0]])
    with pytest.raises(FormatError, match="must hold lists of integers"):
        open_columns(str(path))
    pq.write_table(pa.table({"a": [1], "b": [2]}), path)
    with pytest.raises(InvalidArgument, match="column must be given, one of a, b"):
        open_columns(str(path))
    for name in ("c.parquet", "c.arrow"):
        (tmp_path / name).write_bytes(b"nothing of the kind, and long enough for a footer")
        with pytest.raises(FormatError, match="cannot be read"):
            open_columns(str(tmp_path / name))
    write_columns(path, pa.list_(pa.int32()), DOCUMENTS)
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(2000) + data[2100:])  # pages, not the footer
    with pytest.raises(FormatError, match=r"c\.parquet: cannot be read: .*; write the file again"):
        import_pair(open_columns(str(path)), str(tmp_path / "a"))
    with pytest.raises(MissingFile, match="does not exist"):
        open_columns(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFile, match=r"holds no file that ends in"):
        open_columns(str(tmp_path / "empty"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'megaindex\[parquet\]'"):
        open_columns(str(path))
    assert names(tmp_path) == ["c.arrow", "c.parquet", "empty"]


def test_a_pair_that_is_there_already(tmp_path: Path) -> None:
    write_columns(tmp_path / "c.parquet", pa.list_(pa.int32()), [[1]])
    (tmp_path / "a.idx").write_bytes(b"precious")
    with pytest.raises(StorageError, match=r"a\.idx: already exists"):
        import_pair(open_columns(str(tmp_path / "c.parquet")), str(tmp_path / "a"))
    assert (tmp_path / "a.idx").read_bytes() == b"precious"
