"""The index format before mmap: real files, and each rule that a file can break."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import legacy
from megaindex.format.legacy import open_legacy

GOLDEN = Path(__file__).parents[1] / "golden" / "token_files"


@pytest.fixture(autouse=True, params=[1 << 17, 3])
def checked_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of files of one chunk, and of several."""
    monkeypatch.setattr(legacy, "_CHUNK", request.param)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return str(tmp_path / "golden" / "tntidx_int32")


def patch(prefix: str, at: int, value: int) -> None:
    """Overwrite one 64-bit number of the .idx."""
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(at)
        stream.write(struct.pack("<q", value))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_files_of_gpt_neox(dtype: type) -> None:
    made_by = json.loads((GOLDEN / "made_by.json").read_text())
    pair = open_legacy(str(GOLDEN / f"tntidx_{np.dtype(dtype)}"))
    documents = made_by["documents"]
    sequences = [sequence for document in documents for sequence in document]
    assert pair.dtype == dtype
    assert pair.sizes.tolist() == [len(sequence) for sequence in sequences]
    assert pair.bounds.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    assert pair.byte_offsets.tolist() == (pair.token_offsets[:-1] * pair.dtype.itemsize).tolist()
    for i, sequence in enumerate(sequences):
        tokens = pair.tokens[pair.token_offsets[i] : pair.token_offsets[i + 1]]
        assert tokens.tolist() == [token + made_by["added_to_wide_ids"] for token in sequence]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0, "must begin with b'TNTIDX"),
        (8, 2, "must have version 1"),
        (16, 11, "dtype code must be one of"),
        (24, 8, "must have 4 bytes per token, since dtype code 4 is int32"),
        (32, 7, "must have one size for each of its 7 sequences"),
        (48, 4, "header declares 8 sequences and 4 document bounds .296 bytes., file has 304"),
        (56 + 8, 2, "sequence 0 must have one dimension .*got size 3 and tokens 0 to 3"),
        (128 + 8, 4, "sequence 0 .*got size 3 and tokens 0 to 4"),
        (128, 1, "sequences must begin at token 0 .* 20 tokens of the .bin, got 1 to 20"),
        (128 + 64, 21, "sequences must begin at token 0 .* 20 tokens of the .bin, got 0 to 21"),
        (200 + 24, -1, "sequence 3 .*got size -1"),
        (264, 1, "document bound 0 must be 0"),
        (264 + 8, 9, "document bound 1 must be from 0"),
    ],
)
def test_broken_rules(prefix: str, at: int, value: int, message: str) -> None:
    patch(prefix, at, value)
    with pytest.raises(FormatError, match=rf"tntidx_int32\.idx: {message}"):
        open_legacy(prefix)


@pytest.mark.parametrize("size", [0, 8, 55, 303])
def test_truncated_index(prefix: str, size: int) -> None:
    idx = Path(f"{prefix}.idx")
    idx.write_bytes(idx.read_bytes()[:size])
    with pytest.raises(FormatError, match=r"\.idx: (must begin with|header declares)"):
        open_legacy(prefix)


def test_counts_that_no_file_can_hold(prefix: str) -> None:
    patch(prefix, 32, -1)
    patch(prefix, 40, -1)
    with pytest.raises(FormatError, match="declares 18446744073709551615 sequences"):
        open_legacy(prefix)


def test_missing_files(prefix: str) -> None:
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(MissingFile, match=r"tntidx_int32\.bin"):
        open_legacy(prefix)
    with pytest.raises(MissingFile, match=r"nothing\.idx"):
        open_legacy(f"{prefix}-nothing")
    with pytest.raises(InvalidArgument, match="path_prefix must be the common prefix"):
        open_legacy(f"{prefix}.idx")
