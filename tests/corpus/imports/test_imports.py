"""Imports of files written by the programs that define their formats."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaindex.cli import main
from megaindex.corpus.imports.flat import import_pair
from megaindex.corpus.imports.formats import open_nanotron, open_tntidx
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format import IndexedDataset
from megaindex.format.provenance import open_provenance

GOLDEN = Path(__file__).parents[2] / "golden" / "token_files"
MADE_BY = json.loads((GOLDEN / "made_by.json").read_text())
DOCUMENTS: list[list[list[int]]] = MADE_BY["documents"]
WIDE: int = MADE_BY["added_to_wide_ids"]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Copy the files, since imports link to them."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def flat(documents: list[list[list[int]]], added: int = 0) -> list[list[int]]:
    """Return tokens with one sequence for each document."""
    return [
        [token + added for sequence in document for token in sequence] for document in documents
    ]


def read(prefix: Path, **options: Any) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix, **options)]


def same_file(left: Path, right: Path) -> bool:
    return os.stat(left).st_ino == os.stat(right).st_ino


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_ds_of_two_bytes_is_linked(golden: Path, tmp_path: Path) -> None:
    outcome = import_pair(open_nanotron(str(golden / "datatrove_2.ds")), str(tmp_path / "a"))
    assert (outcome.documents, outcome.tokens, outcome.dtype) == (4, 20, "uint16")
    assert outcome.how == "hard link"
    assert same_file(tmp_path / "a.bin", golden / "datatrove_2.ds")
    assert read(tmp_path / "a") == flat(DOCUMENTS)


def test_ds_of_four_bytes_is_read_as_int32(golden: Path, tmp_path: Path) -> None:
    source = golden / "datatrove_4.ds"
    outcome = import_pair(open_nanotron(str(source)), str(tmp_path / "a"))
    assert outcome.how == "hard link, uint32 ids below 2^31 read as int32"
    assert same_file(tmp_path / "a.bin", source)
    assert IndexedDataset(tmp_path / "a").dtype == np.int32
    assert read(tmp_path / "a") == flat(DOCUMENTS, WIDE)
    outcome = import_pair(open_nanotron(str(source)), str(tmp_path / "p"), dialect="paddlenlp")
    assert (outcome.how, outcome.dtype) == ("hard link", "uint32")


@pytest.mark.parametrize("asked", [None, "int32"])
def test_ids_that_int32_cannot_hold(golden: Path, tmp_path: Path, asked: str | None) -> None:
    source = golden / "datatrove_4.ds"
    with open(source, "r+b") as stream:
        stream.seek(4 * 7)
        stream.write((2**31).to_bytes(4, "little"))
    with pytest.raises(InvalidArgument, match=r"4\.ds: token 7 is 2147483648"):
        import_pair(open_nanotron(str(source)), str(tmp_path / "a"), dtype=asked)
    assert names(tmp_path) == ["golden"]
    outcome = import_pair(open_nanotron(str(source)), str(tmp_path / "a"), dtype="int64")
    assert (outcome.how, outcome.dtype) == ("copied", "int64")
    assert IndexedDataset(tmp_path / "a").tokens[7] == 2**31


def test_ds_and_index_that_do_not_belong_together(golden: Path, tmp_path: Path) -> None:
    source = golden / "datatrove_2.ds"
    source.write_bytes(source.read_bytes()[:-2])
    with pytest.raises(FormatError, match=r"2 or 4 bytes for each of the 20 tokens"):
        open_nanotron(str(source))
    (golden / "datatrove_2.ds.index").unlink()
    with pytest.raises(MissingFile, match=r"2\.ds\.index: cannot open"):
        open_nanotron(str(source))
    ends = np.array([8, 5, 20], np.uint64)
    ends.tofile(golden / "datatrove_4.ds.index")
    with pytest.raises(FormatError, match=r"4\.ds: sequence 1 ends at token 5: lengths"):
        import_pair(open_nanotron(str(golden / "datatrove_4.ds")), str(tmp_path / "a"))
    assert names(tmp_path) == ["golden"]


@pytest.mark.parametrize("there", [True, False])
def test_a_loss_mask_is_left_out_with_a_warning(
    golden: Path, there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if there:
        (golden / "datatrove_2.ds.loss").touch()
    open_nanotron(str(golden / "datatrove_2.ds"))
    assert ("2.ds.loss: the loss mask is not imported" in caplog.text) == there


def test_documents_of_tntidx_cover_its_sequences(golden: Path) -> None:
    path, count = golden / "tntidx_int32.idx", sum(map(len, DOCUMENTS))
    data = path.read_bytes()
    assert data[-8:] == np.int64(count).tobytes()
    path.write_bytes(data[:-8] + np.int64(count - 1).tobytes())
    with pytest.raises(FormatError, match=f"must end at sequence {count}, got {count - 1}, as aft"):
        open_tntidx(str(golden / "tntidx_int32"), "megatron")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tntidx_keeps_sequences_and_documents(golden: Path, tmp_path: Path, dtype: str) -> None:
    source = open_tntidx(str(golden / f"tntidx_{dtype}"), "megatron")
    outcome = import_pair(source, str(tmp_path / "a"))
    assert (outcome.how, outcome.dtype, outcome.documents) == ("hard link", dtype, 4)
    sequences = [[token + WIDE for token in s] for document in DOCUMENTS for s in document]
    assert read(tmp_path / "a") == sequences
    bounds = np.cumsum([0, *map(len, DOCUMENTS)])
    assert IndexedDataset(tmp_path / "a").document_indices.tolist() == bounds.tolist()
    provenance = open_provenance(str(tmp_path / "a"))
    assert provenance is not None
    assert not any(file.has_bytes for file in provenance.files)


def test_a_symbolic_link_where_no_hard_link_is_possible(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.chdir(golden)
    outcome = import_pair(open_nanotron("datatrove_2.ds"), str(tmp_path / "a"))
    assert outcome.how == "symbolic link"
    assert os.readlink(tmp_path / "a.bin") == str(golden / "datatrove_2.ds")
    assert read(tmp_path / "a") == flat(DOCUMENTS)
    assert names(tmp_path) == ["a.bin", "a.idx", "a.provenance", "golden"]


def test_copy_on_demand(golden: Path, tmp_path: Path) -> None:
    source = open_nanotron(str(golden / "datatrove_4.ds"))
    outcome = import_pair(source, str(tmp_path / "a"), copy=True)
    assert (outcome.how, outcome.dtype) == ("copied", "int32")
    assert not same_file(tmp_path / "a.bin", golden / "datatrove_4.ds")
    assert read(tmp_path / "a") == flat(DOCUMENTS, WIDE)


@pytest.mark.parametrize("copy", [False, True])
def test_existing_pairs(golden: Path, tmp_path: Path, copy: bool) -> None:
    """Also a link to the imported file, which a rename would not replace."""
    source = open_nanotron(str(golden / "datatrove_2.ds"))
    import_pair(source, str(tmp_path / "a"))
    with pytest.raises(StorageError, match=r"a\.bin: already exists"):
        import_pair(source, str(tmp_path / "a"), copy=copy)
    import_pair(source, str(tmp_path / "a"), copy=copy, overwrite=True)
    assert names(tmp_path) == ["a.bin", "a.idx", "a.provenance", "golden"]
    assert read(tmp_path / "a") == flat(DOCUMENTS)
    before = names(golden)
    tntidx = open_tntidx(str(golden / "tntidx_int32"), "megatron")
    with pytest.raises(InvalidArgument, match="is also an input"):
        import_pair(tntidx, str(golden / "tntidx_int32"), overwrite=True)
    assert names(golden) == before


@pytest.mark.parametrize("call", ["fsync", "link"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_leaves_nothing(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    real, calls = getattr(os, call), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="No space left on device"):
        import_pair(open_nanotron(str(golden / "datatrove_2.ds")), str(tmp_path / "a"))
    assert names(tmp_path) == ["golden"]


def test_the_verb(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "a")
    source = str(golden / "datatrove_2.ds")
    assert main(["import", "nanotron", source, out]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{out}: 4 documents, 20 tokens, uint16, hard link, 0.0 MB in ")
    assert (printed.out.count("\n"), printed.err) == (1, "")
    assert main(["import", "nanotron", source, out]) == 2
    assert "already exists" in capsys.readouterr().err
    tntidx = str(golden / "tntidx_int32")
    assert main(["import", "tntidx", tntidx, out, "--overwrite", "--copy"]) == 0
    assert "4 documents, 20 tokens, int32, copied" in capsys.readouterr().out
    np.array([5, 0, 6, 7, 0], np.uint32).tofile(tmp_path / "raw")
    raw = ["import", "numpy", str(tmp_path / "raw"), str(tmp_path / "b"), "--separator", "0"]
    assert main([*raw, "--stored-dtype", "uint32"]) == 0
    assert "uint32 ids below 2^31 read as int32" in capsys.readouterr().out
