"""Files of a dataset mapped in one native call: the same arrays as one by one, or none."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.cache import sidecar as sidecar_module
from megaindex.cache.array_files import ArrayFiles, Sidecar, states_of
from megaindex.cache.sidecar import map_arrays
from megaindex.errors import FormatError, MissingFile
from megaindex.format import pair as pair_module
from megaindex.format.header import DIALECTS
from megaindex.kernels import file_mapper

CORE: Any = file_mapper()
pytestmark = pytest.mark.skipif(CORE is None, reason="the native core is not in use")
ARRAYS = {
    "document_index": np.arange(7, dtype=np.int32),
    "sample_index": np.arange(10, dtype=np.int64).reshape(5, 2),
    "shuffle_index": np.arange(4, dtype=np.uint32),
}


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def switch() -> None:
        for module in (sidecar_module, pair_module):
            monkeypatch.setattr(module, "file_mapper", lambda: None)

    return switch


def set_of(folder: Path) -> tuple[ArrayFiles, Sidecar]:
    files = ArrayFiles(
        arrays={name: str(folder / f"s-{name}.npy") for name in ARRAYS},
        sidecar=str(folder / "s-megaindex.json"),
    )
    for name, path in files.arrays.items():
        np.save(path, ARRAYS[name])
    offset = os.path.getsize(files.arrays["shuffle_index"]) - ARRAYS["shuffle_index"].nbytes
    record = Sidecar(
        origin="built",
        settings={},
        corpus="",
        stamp=[],
        facts={},
        arrays={name: (a.dtype.name, a.shape, offset) for name, a in ARRAYS.items()},
        files=states_of(files.arrays),
        checksums=None,
    )
    return files, record


def at_once(files: ArrayFiles, record: Sidecar) -> Any:
    return CORE.map_index_arrays(files.arrays, record.arrays, record.files)


def assert_same(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(ours, theirs)
    assert (ours.dtype, ours.shape, ours.strides) == (theirs.dtype, theirs.shape, theirs.strides)
    for flag in ("writeable", "aligned", "c_contiguous", "owndata"):
        assert getattr(ours.flags, flag) == getattr(theirs.flags, flag), flag


def test_arrays_are_those_mapped_one_by_one(tmp_path: Path, one_by_one: Callable[[], None]) -> None:
    files, record = set_of(tmp_path)
    together = at_once(files, record)
    one_by_one()
    for name, array in map_arrays(files, record).items():
        assert_same(together[name], array)
        np.testing.assert_array_equal(array, ARRAYS[name])
    kept = together.pop("sample_index")[1:]
    together.clear()
    for path in files.arrays.values():
        os.unlink(path)
    np.testing.assert_array_equal(kept, ARRAYS["sample_index"][1:])


def test_files_that_changed_are_refused(tmp_path: Path) -> None:
    files, record = set_of(tmp_path)
    path = files.arrays["sample_index"]
    content = Path(path).read_bytes()
    Path(path).write_bytes(content)
    os.utime(path, ns=(0, record.files["sample_index"][1] + 1))
    assert at_once(files, record) is None
    with pytest.raises(FormatError, match="not the files"):
        map_arrays(files, record)
    os.utime(path, ns=(0, record.files["sample_index"][1]))
    assert at_once(files, record) is not None
    os.rename(path, f"{path}.old")
    Path(path).write_bytes(content)  # another inode
    os.utime(path, ns=(0, record.files["sample_index"][1]))
    assert at_once(files, record) is None
    with pytest.raises(FormatError, match="not the files"):
        map_arrays(files, record)
    os.unlink(path)
    assert at_once(files, record) is None
    with pytest.raises(MissingFile):
        map_arrays(files, record)


@for_each(
    "record",
    [
        ("int32", (5, 2), 128),
        ("float64", (5, 2), 128),
        ("int64", (5, 3), 128),
        ("int64", (-5, -2), 128),
        ("int64", (5, 2), -8),
        ("int64", (1 << 62, 4), 128),
        ("int64", (1 << 70,), 128),
        ("int64", [5, 2], 128),
        (8, (5, 2), 128),
        "int64",
    ],
)
def test_a_damaged_record_maps_nothing(tmp_path: Path, record: Any) -> None:
    files, sidecar = set_of(tmp_path)
    sidecar.arrays = {**sidecar.arrays, "sample_index": record}
    assert at_once(files, sidecar) is None
    sidecar.arrays = {name: r for name, r in sidecar.arrays.items() if name != "sample_index"}
    assert at_once(files, sidecar) is None


def pair_at(folder: Path, *, multimodal: bool = False) -> str:
    prefix = str(folder / "c")
    with IndexedDatasetWriter(prefix, dtype="uint16", multimodal=multimodal) as writer:
        for k in (3, 0, 5):
            modes = {"modes": [k]} if multimodal else {}
            writer.add_document(np.arange(k, dtype=np.uint16), **modes)
    return prefix


def pair_at_once(prefix: str) -> Any:
    dtypes = DIALECTS["megatron"].dtypes
    return CORE.map_pair_files(f"{prefix}.bin", f"{prefix}.idx", dtypes)


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_pair_is_that_mapped_file_by_file(
    tmp_path: Path, one_by_one: Callable[[], None], multimodal: bool
) -> None:
    prefix = pair_at(tmp_path, multimodal=multimodal)
    assert pair_at_once(prefix) is not None
    together = IndexedDataset(prefix, multimodal=multimodal)
    one_by_one()
    single = IndexedDataset(prefix, multimodal=multimodal)
    assert together.identity == single.identity
    names = ["sequence_lengths", "sequence_pointers", "document_indices", "tokens"]
    for name in [*names, *(["sequence_modes"] if multimodal else [])]:
        assert_same(getattr(together, name), getattr(single, name))


@for_each("tokens", [0, 1, 2])
def test_a_bin_of_no_and_of_few_bytes(tmp_path: Path, tokens: int) -> None:
    with IndexedDatasetWriter(tmp_path / "c", np.uint8) as writer:
        writer.add_document(np.arange(7, 7 + tokens, dtype=np.uint8))
    assert os.path.getsize(tmp_path / "c.bin") == tokens
    assert not any(np.zeros(tokens, np.uint8).any() for _ in range(100))  # where they were held
    assert (pair_at_once(str(tmp_path / "c")) is None) == (tokens == 0)
    assert IndexedDataset(tmp_path / "c").tokens.tolist() == [7, 8][:tokens]


# where in the .idx of three sequences, and what is written there
BROKEN = {
    "magic": (0, b"X"),
    "version": (9, struct.pack("<Q", 2)),
    "dtype code": (17, b"\x63"),
    "sequences": (18, struct.pack("<Q", 1 << 63)),
    "bounds": (26, struct.pack("<Q", 1 << 61)),
    "last length": (42, struct.pack("<i", -5)),
    "last pointer": (62, struct.pack("<q", -2)),
    "pointer inside a token": (62, struct.pack("<q", 5)),
    "first bound": (70, struct.pack("<q", 1)),
    "last bound": (94, struct.pack("<q", 2)),
}


@for_each("rule", BROKEN)
def test_a_broken_pair_maps_nothing_and_raises(tmp_path: Path, rule: str) -> None:
    prefix = pair_at(tmp_path)
    offset, content = BROKEN[rule]
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(offset)
        file.write(content)
    assert pair_at_once(prefix) is None
    with pytest.raises(FormatError):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("suffix", "size"), [(".idx", 20), (".idx", 101), (".bin", 14)])
def test_a_pair_cut_short_maps_nothing_and_raises(tmp_path: Path, suffix: str, size: int) -> None:
    prefix = pair_at(tmp_path)
    os.truncate(prefix + suffix, size)
    assert pair_at_once(prefix) is None
    with pytest.raises(FormatError):
        IndexedDataset(prefix)


def test_what_is_not_a_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    prefix = pair_at(tmp_path)
    os.unlink(f"{prefix}.bin")
    os.mkfifo(f"{prefix}.bin")
    assert pair_at_once(prefix) is None
    assert CORE.map_pair_files("c\0.bin", f"{prefix}.idx", DIALECTS["megatron"].dtypes) is None
    assert pair_at_once(str(tmp_path)) is None
