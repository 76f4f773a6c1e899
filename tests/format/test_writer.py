"""Arguments of the writer, and its constant memory."""

from __future__ import annotations

import contextlib
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.corpus.outputs import check_outputs
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError, StorageError
from megaindex.format import sink as sink_module
from megaindex.format.header import HEADER_BYTES, integer_array

RawPair = Callable[..., str]


class Unreadable:
    """Values of another library that NumPy cannot convert."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it is closed")


@for_each(
    ("arguments", "rule"),
    [
        (([1, 2, 3], [1, 1]), r"lengths must sum to 3, the number of tokens, got 2"),
        (([1, 2, 3], []), r"lengths must sum to 3, the number of tokens, got 0"),
        (([1], [2, -1]), r"lengths\[1\] must be from 0 to 2147483647, .*got -1"),
        (([1], [2**31]), r"lengths\[0\] must be from 0 to 2147483647, .*got 2147483648"),
        (([1], [1.0]), r"lengths must be a list of integers"),
        (([1], 1), r"lengths must be a list of integers, got shape \(\)"),
        (
            ([1], [[1], [0, 0]]),
            r"^lengths must be a list of integers: setting an array element with ",
        ),
        (([1], Unreadable()), r"^lengths must be a list of integers: it is closed$"),
        (([1], None, [0]), r"modes cannot be stored in .*; pass multimodal=True"),
    ],
)
def test_refused_arguments_leave_the_writer_usable(
    tmp_path: Path, arguments: Any, rule: str
) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint8) as writer:
        writer.add_document([1])
        with pytest.raises(InvalidArgument, match=rule):
            writer.add_document(*arguments)
        with pytest.raises(InvalidArgument, match=r"tokens\[0\]=-5"):
            writer.add_documents([-5], [1])
        writer.add_document([2])
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[1], [2]]


def test_modes(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", multimodal=True) as writer:
        writer.add_document([1, 2, 3], lengths=[2, 1], modes=[-128, 127])
        writer.add_document([4])
        writer.add_documents([5, 6], [1, 1], modes=[1, 2])
        with pytest.raises(InvalidArgument, match=r"modes must be 2, one for each"):
            writer.add_document([1, 2], lengths=[1, 1], modes=[0])
        with pytest.raises(InvalidArgument, match=r"modes\[0\] must be from -128 to 127"):
            writer.add_document([1], modes=[128])
    dataset = IndexedDataset(tmp_path / "a", multimodal=True)
    assert dataset.sequence_modes is not None
    assert dataset.sequence_modes.tolist() == [-128, 127, 0, 1, 2]
    assert dataset.document_indices.tolist() == [0, 2, 3, 4, 5]


def test_documents_without_sequences_and_sequences_without_tokens(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a") as writer:
        writer.add_document([], lengths=[])
        writer.add_document([])
        writer.add_documents([], [])
        writer.add_documents([], [0, 0])
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.sequence_lengths.tolist() == [0, 0, 0]
    assert dataset.document_indices.tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_pointers_are_exact_beyond_every_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(sink_module, "_CHUNK", chunk)
    lengths = np.full(100, 2**31 - 1)
    lengths[::3] = 5
    with contextlib.closing(sink_module.IndexSpool(str(tmp_path), multimodal=False)) as spool:
        spool.open()
        spool.add_sequences(lengths, None)
        out = io.BytesIO()
        spool.assemble(sink_module._HashedFile(out), 5, 8)
    begins = 8 * np.cumsum(lengths) - 8 * lengths
    assert begins[-1] > 2**40
    pointers = out.getvalue()[HEADER_BYTES + 4 * 100 :][: 8 * 100]
    np.testing.assert_array_equal(np.frombuffer(pointers, np.int64), begins)


@pytest.mark.parametrize(("size", "nbytes"), [(8, 8), (16, 12), (12, 16)])
def test_a_source_that_changes_while_it_is_copied_is_refused(
    tmp_path: Path, size: int, nbytes: int
) -> None:
    """Also one that grew: its .idx was read before."""
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(12))
    sink = sink_module.PairSink(
        str(tmp_path / "a.bin"), str(tmp_path / "a.idx"), np.dtype(np.uint8), multimodal=False,
        overwrite=False,
    )  # fmt: skip
    try:
        sink.open()
        message = f"changed while it was copied: it had {size} bytes, has 12, and "
        with pytest.raises(StorageError, match=message):
            sink.copy_bytes(str(source), size, 0, nbytes, lambda _: None)
    finally:
        sink.discard()


def test_an_empty_corpus(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a"):
        pass
    dataset = IndexedDataset(tmp_path / "a")
    assert (len(dataset), dataset.document_indices.tolist()) == (0, [0])


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"dtype": np.uint32}, "dtype uint32 has no code in the megatron dialect.*8 uint16"),
        ({"dtype": np.float16}, "dtype float16"),
        ({"dtype": "tokens"}, "dtype must be a NumPy dtype .*'tokens'"),
        ({"dialect": "fairseq"}, "dialect must be one of"),
    ],
)
def test_unknown_types(tmp_path: Path, options: Any, rule: str) -> None:
    with pytest.raises(InvalidArgument, match=rule):
        IndexedDatasetWriter(tmp_path / "a", **options)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_prefix_has_no_suffix(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(InvalidArgument, match=r"must be the common prefix of .bin and .idx, .*a"):
        IndexedDatasetWriter(str(tmp_path / "a") + suffix)


@pytest.mark.parametrize("prefix", ["", "folder/", "/"])
def test_a_prefix_has_a_name(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(InvalidArgument, match="must end with the name of the pair, got"):
        IndexedDatasetWriter(f"{tmp_path}/{prefix}" if prefix == "folder/" else prefix)
    with pytest.raises(InvalidArgument, match="must end with the name of the pair, got"):
        check_outputs([prefix], [], overwrite=True)


def test_a_provenance_of_another_pair_is_not_left_beside_one(tmp_path: Path) -> None:
    (tmp_path / "p.provenance").write_bytes(b"old")
    with (
        pytest.raises(StorageError, match=r"p\.provenance: already exists"),
        IndexedDatasetWriter(tmp_path / "p"),
    ):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["p.provenance"]
    with IndexedDatasetWriter(tmp_path / "p", overwrite=True) as writer:
        writer.add_document([1])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_a_writer_is_used_once_and_inside_with(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "a")
    with pytest.raises(InvalidArgument, match=r"the writer must be used inside"):
        writer.add_document([1])
    with writer, pytest.raises(InvalidArgument, match="the writer is already entered"):
        writer.__enter__()
    with pytest.raises(InvalidArgument, match="must be used inside"):
        writer.add_document([1])


def test_add_index_follows_the_pointers(raw_pair: RawPair, tmp_path: Path) -> None:
    source = raw_pair([2, 2, 1], pointers=[12, 0, 16], bounds=[0, 2, 3])
    with IndexedDatasetWriter(tmp_path / "a") as writer:
        writer.add_document([9])
        writer.add_index(source)
        writer.add_index(raw_pair([], name="empty"))
    dataset = IndexedDataset(tmp_path / "a")
    assert [s.tolist() for s in dataset] == [[9], [103, 104], [100, 101], [104]]
    assert dataset.sequence_pointers.tolist() == [0, 4, 12, 20]
    assert dataset.document_indices.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("change", "options", "kind", "rule"),
    [
        ({}, {"dtype": np.uint16}, InvalidArgument, "must hold uint16, as"),
        ({}, {"multimodal": True}, InvalidArgument, "has no sequence modes.*multimodal=False"),
        ({"modes": [1, 2, 3]}, {}, InvalidArgument, "has sequence modes.*multimodal=True"),
        (
            {"bounds": [0]},
            {"dialect": "neox"},
            FormatError,
            "its documents must end at sequence 3",
        ),
        ({"bounds": [0, 2, 1, 3]}, {}, FormatError, "document bound 2 must be from 2"),
    ],
)
def test_add_index_refuses_what_does_not_match(
    raw_pair: RawPair, tmp_path: Path, change: Any, options: Any, kind: type, rule: str
) -> None:
    source = raw_pair([3, 0, 2], **change)
    with IndexedDatasetWriter(tmp_path / "a", **options) as writer:
        with pytest.raises(MegaIndexError, match=rule) as caught:
            writer.add_index(source)
        assert type(caught.value) is kind
        writer.add_document([7])
    dialect = options.get("dialect", "megatron")
    assert IndexedDataset(tmp_path / "a", dialect=dialect)[0].tolist() == [7]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """60,000 documents of 20 tokens: 4.8 MB of tokens and 1.2 MB of index."""
    document = np.arange(20, dtype=np.int32)
    tracemalloc.start()
    try:
        with IndexedDatasetWriter(tmp_path / "a") as writer:
            writer.add_document(document)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for _ in range(60_000):
                writer.add_document(document)
            grown = tracemalloc.get_traced_memory()[1] - before
            assert grown < 100_000
        # Assembling the .idx holds a chunk of lengths and of pointers, never all of them.
        assert tracemalloc.get_traced_memory()[1] - before < 4_000_000
    finally:
        tracemalloc.stop()
    assert IndexedDataset(tmp_path / "a").num_tokens == 20 * 60_001


def test_the_first_value_beyond_the_bounds_is_named() -> None:
    for values, message in (
        ([3, 8, 9, 2], r"sizes\[2\] must be from 3 to 8, .* got 9"),
        ([8, 3, 2, 9], r"sizes\[2\] must be from 3 to 8, .* got 2"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            integer_array(values, "sizes", 3, 8)
    assert integer_array([3, 8], "sizes", 3, 8).tolist() == [3, 8]
