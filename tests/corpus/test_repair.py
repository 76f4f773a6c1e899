"""`megaindex verify --repair`: certain data are rebuilt bit by bit, other damage is refused."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus, write_provenance

import megaindex
from megaindex.cli import main
from megaindex.corpus.repair import repair
from megaindex.errors import (
    FormatError,
    InvalidArgument,
    MegaIndexError,
    MissingFile,
    StorageError,
)
from megaindex.format import IndexedDataset

EOD = 60_000
LENGTHS = [5, 4, 7, 9, 3]
COUNT = len(LENGTHS)
POINTERS = 34 + 4 * COUNT


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_corpus(tmp_path / "c", LENGTHS, np.uint16, eod=EOD)
    return str(tmp_path / "c")


@pytest.fixture
def original(prefix: str) -> bytes:
    return Path(prefix + ".idx").read_bytes()


def damage(prefix: str, data: bytes) -> None:
    Path(prefix + ".idx").write_bytes(data)


def test_an_intact_pair_is_not_repaired(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no damage"):
        repair(prefix, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("given", [{"eod": EOD}, {"eod": EOD, "dtype": "uint16"}])
def test_a_damaged_index_is_rebuilt_from_the_bin(
    prefix: str, original: bytes, tmp_path: Path, given: dict[str, Any]
) -> None:
    """Cut after the header, wrong in any array, or with bytes behind them."""
    damaged = [original[:size] for size in range(34, len(original), 5)]
    damaged += [original + b"garbage", original[:34] + b"\xff" * 8 + original[42:]]
    damaged += [original[: POINTERS + 8] + b"\x7f" * 8 + original[POINTERS + 16 :]]
    for number, data in enumerate(damaged):
        out = tmp_path / f"out{number}"
        damage(prefix, data)
        made = repair(prefix, out, **given)
        assert out.with_suffix(".idx").read_bytes() == original
        assert os.path.samefile(out.with_suffix(".bin"), prefix + ".bin")
        assert (made.documents, made.sequences) == (COUNT, COUNT)
        assert Path(prefix + ".idx").read_bytes() == data  # untouched


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "without a header"])
def test_without_a_header_the_type_is_needed(
    prefix: str, original: bytes, tmp_path: Path, lost: bool
) -> None:
    damage(prefix, original[:20])
    if lost:
        os.unlink(prefix + ".idx")
    for settings in ({}, {"eod": EOD}, {"dtype": "uint16"}):
        with pytest.raises(InvalidArgument, match="add --dtype and --eod"):
            repair(prefix, tmp_path / "out", **settings)
    made = repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)
    assert (tmp_path / "out.idx").read_bytes() == original
    assert "sequences inside documents" in made.lost[0]
    with pytest.raises(InvalidArgument, match="does not contain token 9999"):
        repair(prefix, tmp_path / "other", dtype="uint16", eod=9999)
    with pytest.raises(InvalidArgument, match="has no code"):
        repair(prefix, tmp_path / "other", dtype="complex64", eod=EOD)


def test_a_header_that_counts_other_documents_is_refused(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
    """Another token, a .bin cut short, and documents of several sequences."""
    damage(prefix, original[:-8])
    with pytest.raises(InvalidArgument, match="--eod or --dtype is wrong"):
        repair(prefix, tmp_path / "out", eod=int(np.fromfile(f"{prefix}.bin", np.uint16)[0]))
    damage(prefix, original)
    os.truncate(f"{prefix}.bin", 40)
    for settings in ({"eod": EOD}, {"eod": EOD, "dtype": "uint16"}):
        with pytest.raises(InvalidArgument, match="5 sequences .* 3 sequences .* is cut short"):
            repair(prefix, tmp_path / "out", **settings)
    with megaindex.IndexedDatasetWriter(tmp_path / "two", dtype=np.uint16) as writer:
        writer.add_document([1, 2, 3, EOD], lengths=[2, 2])
    os.truncate(tmp_path / "two.idx", 60)
    with pytest.raises(InvalidArgument, match="2 sequences .* 1 sequences .* several sequences"):
        repair(tmp_path / "two", tmp_path / "out", eod=EOD)
    assert not list(tmp_path.glob("out*"))
    os.unlink(prefix + ".idx")  # as the refusals say
    made = repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)
    assert (made.documents, len(made.lost)) == (3, 2)


def test_what_is_left_over_and_the_provenance_are_reported_lost(
    prefix: str, tmp_path: Path
) -> None:
    write_provenance(Path(prefix))
    os.unlink(prefix + ".idx")
    made = repair(prefix, tmp_path / "whole", dtype="uint16", eod=EOD)
    assert f"{prefix}.provenance" in made.lost[-1]
    assert len(made.lost) == 2
    os.rename(f"{prefix}.provenance", tmp_path / "whole.provenance")
    assert main(["verify", str(tmp_path / "whole")]) == 0
    assert not list(tmp_path.glob("*.provenance.*"))
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\1\0\2\0\3")
    made = repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)
    assert made.documents == 5
    assert made.lost[1].startswith("5 bytes after the last token 60000")


def test_a_document_beyond_the_largest_length_is_refused(
    prefix: str, original: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[repair.__module__]
    damage(prefix, original[:20])
    monkeypatch.setattr(module, "_LONGEST", max(LENGTHS) - 1)
    with pytest.raises(
        InvalidArgument, match=f"have at most 8 tokens, got 9 between two tokens {EOD}"
    ):
        repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)
    monkeypatch.setattr(module, "_LONGEST", max(LENGTHS))
    repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)


def test_outputs_are_never_replaced(prefix: str, original: bytes, tmp_path: Path) -> None:
    damage(prefix, original + b"x")
    with pytest.raises(StorageError, match="already exists"):
        repair(prefix, prefix, eod=EOD)
    with pytest.raises(InvalidArgument, match="must be the common prefix"):
        repair(prefix, tmp_path / "out.idx")
    os.unlink(prefix + ".bin")
    with pytest.raises(MissingFile, match="tokens cannot be rebuilt"):
        repair(prefix, tmp_path / "out")


@given(data=st.data())
def test_a_repair_restores_the_original_or_refuses(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped and cut bytes anywhere: the result never differs from the lost index."""
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    folder.mkdir()
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    write_corpus(folder / "c", lengths, np.uint16, eod=EOD)
    path = folder / "c.idx"
    original = path.read_bytes()
    raw = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw) + 4))
    path.write_bytes(bytes(raw[:cut]) + bytes(max(0, cut - len(raw))))
    try:
        repair(folder / "c", folder / "out", dtype="uint16", eod=EOD)
    except MegaIndexError:
        return
    assert (folder / "out.idx").read_bytes() == original


def test_the_verb_prints_recovered_and_lost_data(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.unlink(prefix + ".idx")
    out = str(tmp_path / "out")
    assert main(["verify", prefix, "--repair", out, "--dtype", "uint16", "--eod", "60000"]) == 0
    said = capsys.readouterr().out
    assert "out.idx: 5 documents, 5 sequences" in said
    assert "certain  5 documents, each ending with token 60000" in said
    assert "lost     sequences inside documents" in said
    assert main(["verify", prefix, "--repair", out]) == 2


@pytest.mark.parametrize(
    "given", [["--full"], ["--json"], ["--vocab-size", "9"], ["--workers", "2"]], ids=lambda g: g[0]
)
def test_flags_of_the_check_are_refused(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    out = tmp_path / "out"
    assert main(["verify", prefix, "--repair", str(out), *given]) == 2
    assert f"{given[0]}: has no effect with --repair, which takes only" in capsys.readouterr().err
    assert not out.with_suffix(".idx").exists()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # the length of such a name is limited


@pytest.mark.parametrize("make", [Path.mkdir, _pipe, _socket])
@pytest.mark.parametrize("half", [".bin", ".idx"])
def test_irregular_files_are_refused_before_writing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    half: str,
    make: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(prefix + half)
    path.unlink()
    make(path)
    with pytest.raises(StorageError, match=rf"c\{half}: is a .*, not a regular file; check"):
        repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)
    assert not list(tmp_path.glob("out*"))


def test_a_repair_whose_last_check_fails_leaves_nothing(
    prefix: str, original: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: IndexedDataset) -> None:
        raise FormatError("found something")

    damage(prefix, original[:-8])
    monkeypatch.setattr(IndexedDataset, "validate", fail)
    with pytest.raises(FormatError, match="found something"):
        repair(prefix, tmp_path / "out", eod=EOD)
    assert not list(tmp_path.glob("out*"))
    monkeypatch.undo()
    assert repair(prefix, tmp_path / "out", eod=EOD).documents == COUNT
