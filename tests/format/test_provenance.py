"""The provenance file: its rows, its size, its bytes, and damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.examples import times
from support.inputs import for_each

from megaindex import IndexedDatasetWriter
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import provenance as module
from megaindex.format.provenance import (
    InputRows,
    Provenance,
    ProvenanceSpool,
    RecordedTokenizer,
    RowFile,
    open_provenance,
    provenance_faults,
)
from megaindex.format.sink import PairSink

TOKENIZER = RecordedTokenizer(path="bytes", fingerprint="bytes 1", add_special_tokens=True, eod=256)
FILES = [RowFile(path=f"/data/{n}.jsonl", format="jsonl", tokenizer=TOKENIZER) for n in range(3)]


def written(path: Path, chunks: list[InputRows], checksum: bytes = bytes(16)) -> Path:
    spool = ProvenanceSpool(str(path.parent))
    spool.open()
    for file in FILES:
        spool.number_of(file)
    for rows in chunks:
        spool.add(rows)
    with open(path, "wb") as out:
        spool.assemble(out, checksum)
    spool.close()
    return path


def rows_of(documents: list[tuple[int, int, int, int]]) -> InputRows:
    return InputRows(*np.array(documents, np.int64).reshape(-1, 4).T)


def test_a_pair_is_published_with_its_provenance(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    sink = PairSink(
        f"{prefix}.bin", f"{prefix}.idx", np.dtype(np.uint8), multimodal=False, overwrite=False,
        provenance=True,
    )  # fmt: skip
    try:
        sink.open()
        sink.write_tokens(np.arange(3, dtype=np.uint8))
        assert sink.provenance is not None
        for length in (1, 2):
            sink.index.add_one(length)
        sink.provenance.add_file(FILES[0], np.array([4, 7]), np.array([10, 30]), np.array([20, 40]))
        sink.publish(1)
    finally:
        sink.discard()
    faults, found = provenance_faults(prefix, 2)
    assert faults == []
    assert found is not None
    assert [file.path for file in found.files] == [FILES[0].path]
    assert [column.tolist() for column in found.locate(np.arange(2))] == [
        [0, 0], [4, 7], [10, 30], [20, 40]
    ]  # fmt: skip


def test_a_pair_that_replaces_another_has_not_its_provenance(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    for overwrite in (False, True):
        with IndexedDatasetWriter(prefix, np.uint8, overwrite=overwrite) as writer:
            writer.add_document([1, 2])
        (tmp_path / "a.provenance").write_bytes(b"of the pair before")
    with IndexedDatasetWriter(prefix, np.uint8, overwrite=True) as writer:
        writer.add_document([3])
    assert open_provenance(prefix) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_name_too_long_for_a_provenance_has_none(tmp_path: Path) -> None:
    assert open_provenance(str(tmp_path / ("x" * 250))) is None


# file, steps of row and byte to the next document, and its size
STEPS = st.tuples(
    st.sampled_from([0, 0, 0, 1, 2, -1]),
    st.sampled_from([1, 1, 1, 2, 70_000, -5]),
    st.sampled_from([1, 1, 2, 300, -9, 1 << 33]),
    st.integers(0, 1 << 20),
)


@given(steps=st.lists(STEPS, max_size=60), cut=st.integers(0, 60), most=st.sampled_from([2, 4096]))
@times(2)
def test_every_document_is_found_again(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, int, int, int]],
    cut: int,
    most: int,
) -> None:
    """In any order of files, rows and bytes; and the bytes do not depend on the chunks."""
    folder = tmp_path_factory.mktemp("p")
    row = begin = end = 1 << 20
    documents = []
    for file, further, gap, size in steps:
        row, begin = max(0, row + further), max(0, end + gap)
        end = begin + size
        documents.append((file, row, begin, end))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_IN_BLOCK", most)
        patch.setattr(module, "_AT_ONCE", 7)
        path = written(folder / "a", [rows_of(documents)])
        other = written(folder / "b", [rows_of(documents[:cut]), rows_of(documents[cut:])])
        assert path.read_bytes() == other.read_bytes()
        found = Provenance(str(path), None)
        found.check_columns()
        numbers = np.arange(len(documents))[::-1]
        located = found.locate(numbers)
        expected = rows_of(documents[::-1])
        for column, wanted in zip(located, expected, strict=True):
            np.testing.assert_array_equal(column, wanted)
        assert found.num_unknown == sum(file == -1 for file, *_ in documents)
        for file in (0, 1):
            low, high = 1 << 20, (1 << 20) + 9
            own = [n for n, (f, r, *_) in enumerate(documents) if f == file and low <= r <= high]
            assert found.documents_of(file, low, high).tolist() == own


def test_a_document_takes_seven_bytes(tmp_path: Path) -> None:
    """Of a file of many rows, with blank lines between them."""
    n = 100_000
    sizes = np.random.default_rng(1).integers(1, 9000, n)
    gaps = np.where(np.arange(n) % 7 == 0, 3, 1)
    begins = np.cumsum(sizes + gaps) - sizes
    rows = np.cumsum(gaps)
    path = written(tmp_path / "a", [InputRows(np.zeros(n, np.int64), rows, begins, begins + sizes)])
    assert path.stat().st_size / n < 7.05
    assert Provenance(str(path), None).files == tuple(FILES)


@for_each(
    ("end", "row", "begin", "blocks"),
    [
        (5, 2**16 - 1, 6, 1),
        (5, 2**16, 6, 2),
        (5, 1, 5 + 255, 1),
        (5, 1, 5 + 256, 2),
        (2**32 - 2, 1, 2**32 - 1, 1),
        (2**32 - 2, 1, 2**32, 2),
    ],
)
def test_documents_at_the_limits_of_a_block(
    tmp_path: Path, end: int, row: int, begin: int, blocks: int
) -> None:
    """Rows of 16 bits, bytes of 32 and gaps of 8, from the first document of a block on."""
    documents = [(0, 0, 0, end), (0, row, begin, begin + 1)]
    found = Provenance(str(written(tmp_path / "a", [rows_of(documents)])), None)
    assert len(found.blocks) == blocks
    found.check_columns()
    for column, wanted in zip(found.locate(np.arange(2)), rows_of(documents), strict=True):
        np.testing.assert_array_equal(column, wanted)
    assert found.documents_of(0, row, row).tolist() == [1]
    assert found.documents_of(0, 0, row).tolist() == [0, 1]
    assert found.documents_of(0, 0, row - 1).tolist() == [0]


def test_documents_of_one_row_are_in_order(tmp_path: Path) -> None:
    path = written(tmp_path / "a", [rows_of([(0, 3, 0, 5), (0, 3, 5, 9), (0, 4, 9, 9)])])
    assert Provenance(str(path), None).columns_fault() is None


def small(folder: Path) -> Path:
    idx = folder / "c.idx"
    idx.write_bytes(b"the index")
    rows = rows_of([(0, k, 10 * k, 10 * k + 9) for k in range(5)])
    return written(folder / "c.provenance", [rows], xxhash.xxh3_128_digest(idx.read_bytes()))


def opened(path: Path) -> None:
    Provenance(str(path), str(path.with_suffix(".idx"))).check_columns()


def test_a_flipped_byte_anywhere_is_an_error(tmp_path: Path) -> None:
    path = small(tmp_path)
    opened(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"c\.provenance: "):
            opened(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = small(tmp_path)
    with pytest.raises(MissingFile, match=r"d\.provenance: does not exist"):
        Provenance(str(tmp_path / "d.provenance"), None)
    path.with_suffix(".idx").unlink()
    with pytest.raises(MissingFile, match=r"c\.idx: does not exist"):
        opened(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:96], "truncated"),
        (lambda data: data[:95], "96 bytes or more"),
        (lambda data: data + b"\0", "must have"),
        (lambda data: data[:8] + struct.pack("<I", 2) + data[12:], "install a newer megaindex"),
    ],
)
def test_other_sizes_and_versions(
    tmp_path: Path, change: Callable[[bytes], bytes], text: str
) -> None:
    path = small(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FormatError, match=text):
        opened(path)
    assert len(provenance_faults(str(tmp_path / "c"), 5)[0]) == 1


def test_the_provenance_of_another_pair(tmp_path: Path) -> None:
    path = small(tmp_path)
    (tmp_path / "c.idx").write_bytes(b"the other")
    with pytest.raises(FormatError, match="belongs to another pair"):
        opened(path)
    rules = [fault.rule for fault in provenance_faults(str(tmp_path / "c"), 6)[0]]
    assert rules == ["provenance-pair", "provenance-documents"]


def forged(data: bytes) -> bytes:
    """Return a provenance whose checksums are right for its content."""
    documents, blocks, json_bytes = struct.unpack_from("<QQQ", data, 16)
    assert documents == 5
    end = 96 + json_bytes + 40 * blocks
    columns = xxhash.xxh3_128_digest(data[end:])
    head = data[:56] + columns + bytes(24)
    return head[:72] + xxhash.xxh3_128_digest(head + data[96:end]) + bytes(8) + data[96:]


def test_values_that_a_forged_checksum_lets_through(tmp_path: Path) -> None:
    """Any byte of any part: a typed error, or rows in order."""
    path = small(tmp_path)
    whole = path.read_bytes()
    assert forged(whole) == whole
    (json_bytes,) = struct.unpack_from("<Q", whole, 32)
    rules, refusals = set(), []
    for at in range(96, len(whole)):
        for byte in (0, 0x7F, 0xFF):
            path.write_bytes(forged(whole[:at] + bytes([byte]) + whole[at + 1 :]))
            try:
                found = Provenance(str(path), None)
            except FormatError as error:
                refusals.append((at < 96 + json_bytes, str(error)))
                continue
            fault = found.columns_fault()
            if fault is not None:
                rules.add(fault.rule)
                continue
            rows = found.locate(np.arange(5))
            assert (rows.end >= rows.begin).all()
    assert any("its list of files is damaged" in text for _, text in refusals)
    beyond = {text for is_in_files, text in refusals if not is_in_files}
    assert beyond
    assert all("does not fit the documents and files" in text for text in beyond)
    assert rules == {"provenance-order"}


def test_documents_that_do_not_exist(tmp_path: Path) -> None:
    found = Provenance(str(small(tmp_path)), None)
    for wrong in (-1, 5):
        with pytest.raises(InvalidArgument, match="from 0 to 4"):
            found.locate(np.array([0, wrong]))
