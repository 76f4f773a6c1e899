"""`megaindex inspect` of pairs and cache entries, including damaged ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.cli import main
from megaindex.corpus.inspect import EntryDescription, PairDescription, inspect
from megaindex.errors import MissingFile


def described(path: Path) -> PairDescription:
    (pair,) = inspect(path)
    assert isinstance(pair, PairDescription)
    return pair


def test_figures_of_a_pair(tmp_path: Path) -> None:
    with megaindex.IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(6), lengths=[1, 2, 3])
        writer.add_document([], lengths=[])
        writer.add_document([])
        writer.add_document(np.arange(1000))
    pair = described(tmp_path / "c")
    assert (pair.sequences, pair.documents, pair.tokens) == (5, 4, 1006)
    assert (pair.empty_documents, pair.empty_sequences) == (1, 1)
    assert (pair.shortest, pair.longest) == (0, 1000)
    assert pair.histogram == ((0, 1), (1, 1), (2, 2), (512, 1))
    assert (pair.bytes_per_token, pair.contiguous, pair.rising) == (2, True, True)
    assert pair.bin_nbytes == 2012
    assert not pair.has_modes
    assert {guess.dtype for guess in pair.dialects} == {"uint16"}
    assert pair.faults == ()


@pytest.mark.parametrize(
    ("writer", "dtype", "possible"),
    [
        ("neox", np.float32, {"megatron": False, "neox": True, "paddlenlp": False}),
        ("megatron", np.float64, {"megatron": True, "neox": False, "paddlenlp": True}),
        ("paddlenlp", np.uint32, {"megatron": False, "neox": False, "paddlenlp": True}),
    ],
)
def test_the_width_of_tokens_determines_the_dialect(
    tmp_path: Path,
    writer: str,
    dtype: type,
    possible: dict[str, bool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with megaindex.IndexedDatasetWriter(tmp_path / "c", dtype, dialect=writer) as out:
        out.add_document(np.arange(10))
        out.add_document(np.arange(3))
    guesses = described(tmp_path / "c").dialects
    assert {guess.dialect: guess.possible for guess in guesses} == possible
    assert all(guess.reason for guess in guesses)
    assert main(["inspect", str(tmp_path / "c")]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    said = dict(line for line in lines if len(line) == 2 and line[0] in possible)
    for guess in guesses:
        found = guess.dtype if guess.possible else "ruled out"
        assert f": {found}; {guess.reason}" in said[guess.dialect]


def test_the_size_of_the_bin_gives_the_width_of_one_sequence(tmp_path: Path) -> None:
    with megaindex.IndexedDatasetWriter(tmp_path / "c", np.float64) as writer:
        writer.add_document(np.arange(10))
    assert [g.possible for g in described(tmp_path / "c").dialects] == [True, False, True]


def test_bounds_that_end_early_imply_neox(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [3, 4])
    with open(tmp_path / "c.idx", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1")
    assert [g.possible for g in described(tmp_path / "c").dialects] == [False, True, False]


@for_each("chunk", [1, 2, 1 << 20])
@for_each(
    ("pointers", "expected"),
    [
        ([0, 4, 6, 12], (True, True)),
        ([0, 6, 6, 16], (False, True)),
        ([4, 4, 6, 12], (False, True)),
        ([0, 6, 4, 12], (False, False)),
        ([0, 4, 12, 6], (False, False)),
        ([4, 0, 6, 12], (False, False)),
    ],
)
def test_pointers_in_any_order(
    tmp_path: Path, pointers: list[int], expected: tuple[bool, bool], chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.modules[inspect.__module__], "_CHUNK", chunk)
    write_corpus(tmp_path / "c", [2, 1, 3, 4], np.uint16)
    with open(tmp_path / "c.idx", "r+b") as file:
        file.seek(34 + 16)
        file.write(np.array(pointers, np.int64).tobytes())
    pair = described(tmp_path / "c")
    assert (pair.contiguous, pair.rising) == expected


def test_modes_and_companions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with megaindex.IndexedDatasetWriter(tmp_path / "c", multimodal=True) as writer:
        writer.add_document([1, 2])
    (tmp_path / "c.lsm").write_bytes(b"\1\1")
    pair = described(tmp_path / "c")
    assert pair.has_modes
    assert pair.companions == (str(tmp_path / "c.lsm"),)
    assert main(["inspect", str(tmp_path / "c")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["companion", str(tmp_path / "c.lsm")] in lines
    assert ["modes", "one", "for", "each", "sequence:", "multimodal"] in lines


def test_inspection_of_a_damaged_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c", [3, 4, 5])
    os.truncate(tmp_path / "c.idx", 34 + 12 + 9)
    os.unlink(tmp_path / "c.bin")
    pair = described(tmp_path / "c")
    assert (pair.sequences, pair.tokens, pair.documents) == (3, 12, 0)
    assert pair.bin_nbytes is None
    assert "header declares 3 sequences" in pair.faults[0]
    for data, name in ((b"TNTIDX\0\0" + bytes(50), "TNTIDX"), (b"", "unknown"), (b"x", "unknown")):
        (tmp_path / "c.idx").write_bytes(data)
        assert described(tmp_path / "c").format == name
        assert main(["inspect", str(tmp_path / "c")]) == 0
    assert "`megaindex import` reads it" in capsys.readouterr().out


@pytest.mark.parametrize("second", [2**62, -(2**62), 100])
def test_pointers_that_no_token_width_explains(tmp_path: Path, second: int) -> None:
    """The distance from -2**62 to 2**62 overflows int64."""
    write_corpus(tmp_path / "c", [1, 1, 1])
    data = bytearray((tmp_path / "c.idx").read_bytes())
    for sequence, pointer in ((0, -second), (1, second)):
        begin = 34 + 12 + 8 * sequence
        data[begin : begin + 8] = np.int64(pointer).tobytes()
    (tmp_path / "c.idx").write_bytes(data)
    pair = described(tmp_path / "c")
    assert pair.bytes_per_token is None
    assert not pair.contiguous


def test_a_bin_that_is_short_or_missing_is_a_fault(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [3, 0, 4], dtype=np.uint16)
    whole = (tmp_path / "a.bin").read_bytes()
    for size, faults in ((14, 0), (15, 0), (13, 1), (0, 1), (None, 1)):
        if size is None:
            (tmp_path / "a.bin").unlink()
        else:
            (tmp_path / "a.bin").write_bytes((whole + b"x")[:size])
        found = [each for each in described(tmp_path / "a").faults if each.startswith(".bin")]
        assert len(found) == faults, size
    assert found == [".bin: is missing"]


def test_a_bin_without_idx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.bin").write_bytes(bytes(8))
    with pytest.raises(MissingFile, match="c.idx: missing"):
        inspect(tmp_path / "c")


def test_a_cache_entry(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [30, 40])
    megaindex.build_index(
        str(tmp_path / "c"), sequence_length=4, seed=9, cache_dir=tmp_path / "cache"
    )
    (entry,) = inspect(tmp_path / "cache")
    assert isinstance(entry, EntryDescription)
    assert entry.parameters["seed"] == 9
    assert entry.arrays["sample_index"] == {"dtype": "int32", "shape": (18, 2), "bytes": 144}
    assert entry.nbytes == sum(array["bytes"] for array in entry.arrays.values())
    assert not entry.durable
    (tmp_path / "cache" / Path(entry.path).name / "manifest.json").write_text("[")
    (damaged,) = inspect(entry.path)
    assert "manifest" in damaged.faults[0]


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c", [3, 4, 100], np.uint16)
    megaindex.build_index(
        str(tmp_path / "c"), sequence_length=4, seed=1, cache_dir=tmp_path / "cache"
    )
    assert main(["inspect", str(tmp_path / "c"), str(tmp_path / "cache")]) == 0
    said = capsys.readouterr().out
    assert "uint16, code 8 in every dialect" in said
    assert "3 documents, 3 sequences, 107 tokens" in said
    assert "64–127" in said
    assert "seed = 1" in said
    assert main(["inspect", str(tmp_path / "c"), "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["descriptions"]
    assert (pair["kind"], pair["longest"]) == ("pair", 100)
