"""`megaindex verify --repair`: certain data are rebuilt bit by bit, other damage is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

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
from megaindex.format.provenance import open_provenance

EOD = 60_000
LENGTHS = [5, 4, 7, 9, 3]
COUNT = len(LENGTHS)
POINTERS = 34 + 4 * COUNT
BOUNDS = POINTERS + 8 * COUNT


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


@pytest.mark.parametrize("bad", [0, 2**60, -8, 3])
def test_pointers_follow_from_lengths(
    prefix: str, original: bytes, tmp_path: Path, bad: int
) -> None:
    pointers = np.array([0, bad, 18, bad, 50], np.int64).tobytes()
    damage(prefix, original[:POINTERS] + pointers + original[BOUNDS:])
    made = repair(prefix, tmp_path / "out")
    assert (tmp_path / "out.idx").read_bytes() == original
    assert os.path.samefile(tmp_path / "out.bin", prefix + ".bin")
    assert "pointers: 3 are intact and agree with the lengths, 2 are computed" in made.certain[1]
    assert Path(prefix + ".idx").read_bytes() != original  # untouched


def test_bytes_behind_the_arrays_are_left_out(prefix: str, original: bytes, tmp_path: Path) -> None:
    damage(prefix, original + b"garbage")
    made = repair(prefix, tmp_path / "out")
    assert (tmp_path / "out.idx").read_bytes() == original
    assert made.lost == ("7 bytes after the arrays that are not modes",)


def test_an_index_cut_inside_pointers_or_bounds_needs_the_end_of_document(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
    for size in range(POINTERS, len(original)):
        out = tmp_path / f"out{size}"
        damage(prefix, original[:size])
        with pytest.raises(InvalidArgument, match="add --eod"):
            repair(prefix, out)
        made = repair(prefix, out, eod=EOD)
        assert out.with_suffix(".idx").read_bytes() == original
        assert made.lost == ("modes of sequences, if there were any",)


def test_an_end_of_document_that_does_not_fit_the_count_is_refused(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
    damage(prefix, original[:BOUNDS])
    with pytest.raises(InvalidArgument, match="0 sequences end with token 9, and the header"):
        repair(prefix, tmp_path / "out", eod=9)


def test_lengths_that_are_cut_off_or_damaged_are_refused(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
    damage(prefix, original[: POINTERS - 1])
    with pytest.raises(InvalidArgument, match="holds 4 of 5 lengths"):
        repair(prefix, tmp_path / "out", eod=EOD)
    damage(prefix, original[:34] + np.int32(-5).tobytes() + original[38:])
    with pytest.raises(InvalidArgument, match="sequence 0 has length -5"):
        repair(prefix, tmp_path / "out", eod=EOD)
    damage(prefix, original[:34] + np.int32(4).tobytes() + original[38:])
    with pytest.raises(InvalidArgument, match="a pointer or a length is damaged"):
        repair(prefix, tmp_path / "out", eod=EOD)
    damage(prefix, original[: POINTERS - 4] + np.int32(2).tobytes() + original[POINTERS:])
    with pytest.raises(InvalidArgument, match="lengths add up to 54 bytes and the .bin has 56"):
        repair(prefix, tmp_path / "out", eod=EOD)
    assert not list(tmp_path.glob("out*"))


def test_a_bin_cut_short_keeps_its_whole_documents(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
    tokens = np.fromfile(prefix + ".bin", np.uint16)
    tokens[:20].tofile(prefix + ".bin")
    made = repair(prefix, tmp_path / "out")
    dataset = megaindex.IndexedDataset(tmp_path / "out")
    assert [len(sequence) for sequence in dataset] == [5, 4, 7]
    np.testing.assert_array_equal(np.concatenate(dataset[:]), tokens[:16])
    assert made.lost == ("2 documents beyond the end of the .bin",)
    damage(prefix, original[:POINTERS])  # with pointers gone too, either could be wrong
    with pytest.raises(InvalidArgument, match="whole documents cannot be determined"):
        repair(prefix, tmp_path / "other", eod=EOD)


def test_a_lost_index_is_cut_at_the_end_of_document(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
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


def test_tokens_after_the_last_document_are_reported_lost(prefix: str, tmp_path: Path) -> None:
    os.unlink(prefix + ".idx")
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\1\0\2\0\3")
    made = repair(prefix, tmp_path / "out", dtype="uint16", eod=EOD)
    assert made.documents == 5
    assert made.lost[1].startswith("5 bytes after the last token 60000")


def test_the_provenance_is_carried_on_or_named_as_lost(
    prefix: str, original: bytes, tmp_path: Path
) -> None:
    write_provenance(Path(prefix))
    recorded = Path(f"{prefix}.provenance").read_bytes()
    damage(prefix, original[: POINTERS + 8] + bytes(8) + original[POINTERS + 16 :])
    made = repair(prefix, tmp_path / "same")
    assert made.certain[-1].startswith("provenance of 5 documents: the new .idx is the one")
    assert (tmp_path / "same.provenance").read_bytes() == recorded
    write_provenance(Path(prefix))  # of the pair as it was written, with a wrong pointer
    made = repair(prefix, tmp_path / "wrong")
    assert made.certain[-1] == "provenance of 5 documents, the first of those of the damaged pair"
    Path(f"{prefix}.provenance").write_bytes(recorded)
    damage(prefix, original)
    os.truncate(f"{prefix}.bin", 40)
    made = repair(prefix, tmp_path / "cut")
    assert made.certain[-1] == "provenance of 3 documents, the first of those of the damaged pair"
    origins = open_provenance(str(tmp_path / "cut"))
    assert origins is not None
    origins.check_columns()
    assert origins.locate(np.arange(3)).row.tolist() == [0, 1, 2]
    os.truncate(f"{prefix}.bin", 42)
    os.unlink(f"{prefix}.idx")
    made = repair(prefix, tmp_path / "other", dtype="uint16", eod=EOD)
    assert "provenance of 3 documents: the new .idx is not the one that" in made.lost[-1]
    Path(f"{prefix}.provenance").write_bytes(recorded[:-1] + b"x")
    made = repair(prefix, tmp_path / "again", dtype="uint16", eod=EOD)
    assert "provenance of 3 documents: " in made.lost[-1]
    assert "is damaged" in made.lost[-1]
    assert not list(tmp_path.glob("other.prov*")) + list(tmp_path.glob("again.prov*"))


def test_outputs_are_never_replaced(prefix: str, original: bytes, tmp_path: Path) -> None:
    damage(prefix, original + b"x")
    with pytest.raises(StorageError, match="already exists"):
        repair(prefix, prefix)
    with pytest.raises(InvalidArgument, match="must be the common prefix"):
        repair(prefix, tmp_path / "out.idx")
    os.unlink(prefix + ".bin")
    with pytest.raises(MissingFile, match="tokens cannot be rebuilt"):
        repair(prefix, tmp_path / "out")


@given(data=st.data())
def test_a_repair_restores_the_original_or_refuses(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped and cut bytes after the lengths: the result never differs from the lost index."""
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    folder.mkdir()
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    write_corpus(folder / "c", lengths, np.uint16, eod=EOD)
    path = folder / "c.idx"
    original = path.read_bytes()
    raw = bytearray(original)
    pointers = 34 + 4 * len(lengths)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(pointers, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(pointers, len(raw) + 4))
    path.write_bytes(bytes(raw[:cut]) + bytes(max(0, cut - len(raw))))
    try:
        repair(folder / "c", folder / "out", eod=EOD)
    except MegaIndexError:
        return
    # as many surplus bytes as sequences cannot be told from modes, and are kept
    made = (folder / "out.idx").read_bytes()[: len(original)]
    begin = pointers + 8 * len(lengths)
    assert made[:begin] == original[:begin]
    # bounds that still rise from 0 to the number of sequences cannot be told from sound ones
    assert made[begin:] in (original[begin:], bytes(raw[begin:]))


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
