"""Imports of NumPy token files: raw ones are linked, .npy files are copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.inputs import for_each

from megaindex.corpus.imports.flat import import_pair
from megaindex.corpus.imports.formats import open_numpy
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset


def read(prefix: Path) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


RAGGED = [[7, 8, 9, 0], [0], [1, 2, 0], [5]]
TOKENS = np.array([token for document in RAGGED for token in document])


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64"])
def test_raw_tokens_cut_at_a_separator(tmp_path: Path, dtype: str) -> None:
    TOKENS.astype(dtype).tofile(tmp_path / "raw")
    source = open_numpy(str(tmp_path / "raw"), stored_dtype=dtype, separator=0)
    outcome = import_pair(source, str(tmp_path / "a"))
    assert outcome.how.startswith("hard link")
    assert outcome.dtype == dtype.replace("uint32", "int32")
    assert read(tmp_path / "a") == RAGGED


@for_each("ends", [[4, 5, 8, 9], [0, 4, 5, 8, 9]])
@for_each("dtype", ["int64", "uint64", "int32"])
def test_npy_is_copied_without_its_header(tmp_path: Path, ends: list[int], dtype: str) -> None:
    np.save(tmp_path / "t.npy", TOKENS.astype(np.uint16))
    np.save(tmp_path / "e.npy", np.array(ends, dtype))
    source = open_numpy(str(tmp_path / "t.npy"), boundaries=str(tmp_path / "e.npy"))
    outcome = import_pair(source, str(tmp_path / "a"))
    assert (outcome.how, outcome.dtype) == ("copied", "uint16")
    assert (tmp_path / "a.bin").read_bytes() == TOKENS.astype(np.uint16).tobytes()
    assert read(tmp_path / "a") == RAGGED


def test_separators_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(5).integers(0, 4, 1000).astype(np.uint16)
    tokens.tofile(tmp_path / "raw")
    monkeypatch.setattr("megaindex.corpus.imports.formats.CHUNK", 7)
    monkeypatch.setattr("megaindex.corpus.imports.flat.CHUNK", 7)
    source = open_numpy(str(tmp_path / "raw"), stored_dtype="uint16", separator=3)
    import_pair(source, str(tmp_path / "a"), dtype="int32")
    ends = [*(np.flatnonzero(tokens == 3) + 1).tolist(), 1000]
    expected = [part.tolist() for part in np.split(tokens, ends) if part.size]
    assert read(tmp_path / "a") == expected


def test_narrowing_is_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([5, 70_000, 1]))
    np.save(tmp_path / "e.npy", np.array([3]))
    source = open_numpy(str(tmp_path / "t.npy"), boundaries=str(tmp_path / "e.npy"))
    with pytest.raises(InvalidArgument, match=r"t\.npy: tokens\[1\]=70000: does not fit uint16"):
        import_pair(source, str(tmp_path / "a"), dtype="uint16")
    assert names(tmp_path) == ["e.npy", "t.npy"]
    assert import_pair(source, str(tmp_path / "a"), dtype="int32").dtype == "int32"


def test_wrong_numpy_input(tmp_path: Path) -> None:
    path = str(tmp_path / "t.npy")
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(7))
    np.save(path, np.zeros(3, np.int32))
    refusals = [
        (InvalidArgument, {}, "exactly one of separator"),
        (InvalidArgument, {"separator": 0, "boundaries": "e"}, "exactly one of separator"),
        (InvalidArgument, {"separator": 0, "stored_dtype": "int32"}, "has a dtype of its own"),
    ]
    for kind, options, message in refusals:
        with pytest.raises(kind, match=message):
            open_numpy(path, **options)
    for dtype, kind, message in [
        (None, InvalidArgument, "raw: raw tokens need a stored dtype"),
        ("float32", InvalidArgument, "must be a NumPy integer type"),
        ("nonsense", InvalidArgument, "must be a NumPy integer type"),
        ("uint16", FormatError, "a multiple of 2 bytes, a token of uint16, got 7"),
    ]:
        with pytest.raises(kind, match=message):
            open_numpy(str(raw), stored_dtype=dtype, separator=0)
    Path(path).unlink()
    with pytest.raises(MissingFile, match=r"t\.npy: cannot read"):
        open_numpy(path, separator=0)
    for array in (np.zeros((2, 2), int), np.zeros(2), np.zeros(2, ">i4"), np.array([{}])):
        np.save(path, array, allow_pickle=True)
        with pytest.raises(FormatError, match=r"t\.npy: (must hold|not a valid \.npy)"):
            open_numpy(path, separator=0)
    Path(path).write_bytes(b"\x93NUMPY")
    with pytest.raises(FormatError, match=r"t\.npy: not a valid \.npy file"):
        open_numpy(path, separator=0)
    for content in (b"", b"\x93NUMP", bytes(8)):
        Path(path).write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"t\.npy: has no \.npy header; raw tokens need"):
            open_numpy(path, separator=0)


def test_raw_tokens_may_have_the_suffix_of_numpy(tmp_path: Path) -> None:
    """As OLMo and dolma write them, with `numpy.memmap`."""
    TOKENS.astype(np.uint16).tofile(tmp_path / "part-0.npy")
    source = open_numpy(str(tmp_path / "part-0.npy"), stored_dtype="uint16", separator=0)
    assert import_pair(source, str(tmp_path / "a")).how.startswith("hard link")
    assert read(tmp_path / "a") == RAGGED


@pytest.mark.parametrize("stored", [">u2", ">i4", ">u4", ">i8"])
def test_big_endian_tokens_are_converted(tmp_path: Path, stored: str) -> None:
    TOKENS.astype(stored).tofile(tmp_path / "raw")
    source = open_numpy(str(tmp_path / "raw"), stored_dtype=stored, separator=0)
    assert import_pair(source, str(tmp_path / "a")).how == "copied"
    assert read(tmp_path / "a") == RAGGED


@pytest.mark.parametrize(
    ("separator", "message"),
    [(6, "no token is the separator 6"), (-1, "from 0 to 65535, got -1"), (65_536, "got 65536"),
     (65_535, "no token is the separator 65535")],
)  # fmt: skip
def test_an_id_that_no_token_is_separates_nothing(
    tmp_path: Path, separator: int, message: str
) -> None:
    TOKENS.astype(np.uint16).tofile(tmp_path / "raw")
    with pytest.raises(InvalidArgument, match=message):
        import_pair(
            open_numpy(str(tmp_path / "raw"), stored_dtype="uint16", separator=separator),
            str(tmp_path / "a"),
        )
    assert names(tmp_path) == ["raw"]
    (tmp_path / "none").write_bytes(b"")
    empty = open_numpy(str(tmp_path / "none"), stored_dtype="uint16", separator=6)
    assert import_pair(empty, str(tmp_path / "b")).documents == 0


@pytest.mark.parametrize("ends", [[4], [4, 12], [-1, 9], [2**63, 9]])
def test_boundaries_of_another_file(tmp_path: Path, ends: list[int]) -> None:
    TOKENS.astype(np.uint16).tofile(tmp_path / "raw")
    np.save(tmp_path / "e.npy", np.array(ends, np.int64 if min(ends) < 0 else np.uint64))
    source = open_numpy(
        str(tmp_path / "raw"), stored_dtype="uint16", boundaries=str(tmp_path / "e.npy")
    )
    with pytest.raises(FormatError, match=r"raw: .* check .*boundaries"):
        import_pair(source, str(tmp_path / "a"))
    assert names(tmp_path) == ["e.npy", "raw"]
