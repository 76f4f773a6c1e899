"""Against megatron-core itself: the same bytes written, and each reads what the other wrote."""

from __future__ import annotations

import gc
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from support.examples import one_in

from megaindex import IndexedDataset, IndexedDatasetWriter

DTYPES = [
    np.uint8,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.float64,
    np.float32,
    np.uint16,
]
# Documents are lists of sequences, sequences are lists of tokens that every dtype can hold.
SEQUENCES = st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=4)
DOCUMENTS = st.lists(SEQUENCES, max_size=6)
Documents = list[list[list[int]]]


def flat(document: list[list[int]]) -> list[int]:
    return [token for sequence in document for token in sequence]


def modes_of(document: list[list[int]]) -> list[int]:
    return [len(sequence) % 3 for sequence in document]


def write_ours(prefix: str, documents: Documents, dtype: Any, multimodal: bool) -> None:
    with IndexedDatasetWriter(prefix, dtype, multimodal=multimodal) as writer:
        for document in documents:
            modes = modes_of(document) if multimodal else None
            writer.add_document(flat(document), [len(s) for s in document], modes)


def write_theirs(
    megatron: Any, prefix: str, documents: Documents, dtype: Any, multimodal: bool
) -> None:
    builder = megatron.IndexedDatasetBuilder(prefix + ".bin", dtype, multimodal)
    for document in documents:
        tokens = np.array(flat(document), dtype=np.int64)  # a tensor would warn
        builder.add_document(tokens, [len(s) for s in document], modes_of(document))
    builder.finalize(prefix + ".idx")


def same_bytes(left: str, right: str) -> None:
    for suffix in (".bin", ".idx"):
        assert Path(left + suffix).read_bytes() == Path(right + suffix).read_bytes(), suffix


def same_results(ours: Any, theirs: Any) -> None:
    """Two results of reading: an array, or (tokens, mode)."""
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple)
        assert ours[1] == theirs[1]
        assert type(ours[1]) is type(theirs[1])
        ours, theirs = ours[0], theirs[0]
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


@one_in(8)  # of 16 kinds of pairs
@given(documents=DOCUMENTS)
def test_same_bytes_and_same_reads(megatron_datasets: Any, documents: Documents) -> None:
    for dtype, multimodal in itertools.product(DTYPES, (False, True)):
        note(f"{dtype.__name__}, multimodal {multimodal}")
        check_pair(megatron_datasets, dtype, multimodal, documents)


def check_pair(megatron_datasets: Any, dtype: Any, multimodal: bool, documents: Documents) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = f"{directory}/ours", f"{directory}/theirs"
        write_ours(ours, documents, dtype, multimodal)
        write_theirs(megatron_datasets, theirs, documents, dtype, multimodal)
        same_bytes(ours, theirs)

        read = IndexedDataset(theirs, multimodal=multimodal)
        sequences = [sequence for document in documents for sequence in document]
        assert len(read) == len(sequences)
        assert read.num_tokens == sum(map(len, sequences))
        assert read.dtype == dtype
        if not any(map(len, sequences)):  # megatron-core cannot map an empty .bin
            return
        peer = megatron_datasets.IndexedDataset(ours, multimodal=multimodal)
        np.testing.assert_array_equal(read.sequence_lengths, peer.sequence_lengths)
        np.testing.assert_array_equal(read.document_indices, peer.document_indices)
        np.testing.assert_array_equal(read.sequence_pointers, peer.index.sequence_pointers)
        for i, sequence in enumerate(sequences):
            same_results(read[i], peer[i])
            same_results(read[i - len(read)], peer[i])
            if sequence:
                same_results(read.get(i, offset=1), peer.get(i, offset=1))
                length = np.int64(len(sequence) // 2)
                same_results(read.get(i, length=length), peer.get(i, length=length))


@pytest.mark.parametrize("multimodal", [False, True])
def test_slices_agree(megatron_datasets: Any, tmp_path: Path, multimodal: bool) -> None:
    documents: Documents = [[[1, 2, 3], [], [4]], [], [[5, 6]], [[7]]]
    write_ours(str(tmp_path / "a"), documents, np.uint16, multimodal)
    ours = IndexedDataset(tmp_path / "a", multimodal=multimodal)
    theirs = megatron_datasets.IndexedDataset(str(tmp_path / "a"), multimodal=multimodal)
    for cut in (slice(None), slice(1, 3), slice(-2, None), slice(0, 1)):
        got, expected = ours[cut], theirs[cut]
        if multimodal:
            np.testing.assert_array_equal(got[1], expected[1])
            got, expected = got[0], expected[0]
        assert [g.tolist() for g in got] == [e.tolist() for e in expected]


@pytest.mark.parametrize("multimodal", [False, True])
def test_add_index_agrees(
    megatron_datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multimodal: bool
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # the peer's, 0.1 s a file with torch
    first: Documents = [[[1, 2], [3]], [], [[]]]
    second: Documents = [[[4]], [[5, 6], []]]
    write_ours(str(tmp_path / "first"), first, np.int32, multimodal)
    write_ours(str(tmp_path / "second"), second, np.int32, multimodal)
    with IndexedDatasetWriter(tmp_path / "ours", np.int32, multimodal=multimodal) as writer:
        writer.add_index(tmp_path / "first")
        writer.add_index(tmp_path / "second")
    builder = megatron_datasets.IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), np.int32, multimodal
    )
    builder.add_index(str(tmp_path / "first"))
    builder.add_index(str(tmp_path / "second"))
    builder.finalize(str(tmp_path / "theirs.idx"))
    same_bytes(str(tmp_path / "ours"), str(tmp_path / "theirs"))


def test_bulk_call_writes_what_single_calls_write(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(0, 5, 1000)
    tokens = np.arange(lengths.sum())
    with IndexedDatasetWriter(tmp_path / "bulk") as writer:
        writer.add_documents(tokens, lengths)
    with IndexedDatasetWriter(tmp_path / "single") as writer:
        for part in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(part)
    same_bytes(str(tmp_path / "bulk"), str(tmp_path / "single"))


def test_pointers_continue_across_the_chunks_they_are_computed_in(
    megatron_datasets: Any, tmp_path: Path
) -> None:
    count = (1 << 18) + 3
    lengths = np.ones(count, dtype=np.int64)
    with IndexedDatasetWriter(tmp_path / "ours", np.uint8) as writer:
        writer.add_documents(np.zeros(count, dtype=np.uint8), lengths)
    builder = megatron_datasets.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint8)
    builder.data_file.write(bytes(count))
    builder.sequence_lengths = lengths.tolist()
    builder.document_indices = list(range(count + 1))
    builder.finalize(str(tmp_path / "theirs.idx"))
    same_bytes(str(tmp_path / "ours"), str(tmp_path / "theirs"))
