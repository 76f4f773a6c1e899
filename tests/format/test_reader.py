"""Results of IndexedDataset, and their lifetime."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import InvalidArgument, OutOfRange

RawPair = Callable[..., str]


def test_properties(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2], bounds=[0, 2, 2, 3])
    dataset = IndexedDataset(prefix)
    assert dataset.path_prefix == prefix
    assert len(dataset) == 3
    assert dataset.sequence_lengths.dtype == np.int32
    assert dataset.sequence_lengths.tolist() == [3, 0, 2]
    assert dataset.sequence_pointers.dtype == np.int64
    assert dataset.sequence_pointers.tolist() == [0, 12, 12]
    assert dataset.document_indices.dtype == np.int64
    assert dataset.document_indices.tolist() == [0, 2, 2, 3]
    assert dataset.sequence_modes is None
    assert not dataset.has_modes
    assert dataset.dtype == np.int32
    assert dataset.dtype_code == 4
    assert dataset.dialect == "megatron"
    assert dataset.num_tokens == 5
    assert type(dataset.num_tokens) is int
    assert dataset.nbytes == 20
    assert dataset.index_nbytes == Path(prefix + ".idx").stat().st_size
    assert dataset.tokens.tolist() == [100, 101, 102, 103, 104]
    assert "3 sequences, 3 documents, int32" in repr(dataset)


def test_indexing(raw_pair: RawPair) -> None:
    dataset = IndexedDataset(raw_pair([3, 0, 2]))
    assert [s.tolist() for s in dataset] == [[100, 101, 102], [], [103, 104]]
    assert dataset[-3].tolist() == dataset[np.int64(0)].tolist() == [100, 101, 102]
    assert [s.tolist() for s in dataset[1:]] == [[], [103, 104]]
    assert dataset[2:1] == []
    assert dataset[7:9] == []
    assert dataset.get(0, offset=1).tolist() == [101, 102]
    assert dataset.get(0, offset=np.int32(1), length=np.int64(1)).tolist() == [101]
    assert dataset.get(0, offset=3).tolist() == []
    assert dataset.get(-1, length=1).tolist() == [103]


@pytest.mark.parametrize("index", [3, -4, np.int64(3)])
def test_no_such_sequence(raw_pair: RawPair, index: int) -> None:
    prefix = raw_pair([3, 0, 2])
    with pytest.raises(OutOfRange, match=r"train: the number .* from -3 to 2"):
        IndexedDataset(prefix)[index]


@pytest.mark.parametrize(("offset", "length"), [(-1, None), (0, 4), (2, 2), (4, None), (0, -1)])
def test_ranges_stay_inside_the_sequence(
    raw_pair: RawPair, offset: int, length: int | None
) -> None:
    dataset = IndexedDataset(raw_pair([3, 0, 2]))
    with pytest.raises(OutOfRange, match=r"train: tokens of sequence 0 must be within 0 to 3"):
        dataset.get(0, offset, length)


def test_indices_are_integers_and_slices_contiguous(raw_pair: RawPair) -> None:
    dataset = IndexedDataset(raw_pair())
    with pytest.raises(InvalidArgument, match=r"index must be an integer"):
        dataset[1.0]
    with pytest.raises(InvalidArgument, match=r"offset must be an integer"):
        dataset.get(0, "a")
    with pytest.raises(InvalidArgument, match=r"train: slices must have step 1"):
        dataset[0:3:2]


def test_sequences_may_lie_anywhere(raw_pair: RawPair) -> None:
    """Shared, reversed and with gaps, as an index made by a filter or a deduplicator has them."""
    prefix = raw_pair([2, 2, 1], pointers=[12, 0, 16])
    dataset = IndexedDataset(prefix)
    dataset.validate()
    assert [s.tolist() for s in dataset[:]] == [[103, 104], [100, 101], [104]]


def test_modes(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2], modes=[0, -1, 5])
    dataset = IndexedDataset(prefix, multimodal=True)
    assert dataset.sequence_modes is not None
    assert dataset.sequence_modes.dtype == np.int8
    tokens, mode = dataset[2]
    assert (tokens.tolist(), mode) == ([103, 104], 5)
    tokens, mode = dataset.get(0, offset=2)
    assert (tokens.tolist(), mode) == ([102], 0)
    sequences, modes = dataset[1:3]
    assert [s.tolist() for s in sequences] == [[], [103, 104]]
    assert modes.tolist() == [-1, 5]
    sequences, modes = dataset[2:0]
    assert (sequences, modes.tolist()) == ([], [])


def test_modes_may_be_ignored_as_megatron_does(raw_pair: RawPair) -> None:
    dataset = IndexedDataset(raw_pair([3, 0, 2], modes=[0, 1, 2]))
    assert dataset.has_modes
    assert dataset.sequence_modes is None
    assert dataset[2].tolist() == [103, 104]


@pytest.mark.parametrize(
    ("dialect", "code", "dtype"),
    [
        ("megatron", 6, np.float64),
        ("megatron", 7, np.float32),
        ("neox", 6, np.float32),
        ("neox", 7, np.float64),
        ("paddlenlp", 6, np.float64),
        ("paddlenlp", 7, np.float32),
        ("paddlenlp", 9, np.uint32),
        ("paddlenlp", 10, np.uint64),
        *((d, 8, np.uint16) for d in ("megatron", "neox", "paddlenlp")),
    ],
)
def test_dialects(raw_pair: RawPair, dialect: str, code: int, dtype: type) -> None:
    data = np.array([1, 2], dtype=dtype).tobytes()
    dataset = IndexedDataset(raw_pair([2], code=code, data=data), dialect=dialect)
    assert dataset.dtype == dtype
    assert dataset[0].tolist() == [1, 2]


@pytest.mark.parametrize(("dialect", "code"), [("megatron", 7), ("neox", 6)])
def test_the_writer_speaks_the_same_dialects(tmp_path: Path, dialect: str, code: int) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.float32, dialect=dialect) as writer:
        writer.add_document([0.5, 2.0])
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    dataset = IndexedDataset(tmp_path / "a", dialect=dialect)
    assert (dataset.dtype_code, dataset[0].tolist()) == (code, [0.5, 2.0])


def test_files_merged_by_neox_have_bounds_that_stop_short(
    raw_pair: RawPair, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = raw_pair([3, 0, 2], bounds=[0])
    with caplog.at_level(logging.WARNING):
        dataset = IndexedDataset(prefix, dialect="neox")
    assert "train.idx: document bounds end at sequence 0 of 3" in caplog.text
    assert dataset.num_tokens == 5


def test_surplus_bytes_of_the_bin_are_reported(
    raw_pair: RawPair, caplog: pytest.LogCaptureFixture
) -> None:
    data = np.arange(5, dtype=np.int32).tobytes()
    with caplog.at_level(logging.WARNING):
        dataset = IndexedDataset(raw_pair([3, 0, 2], data=data + b"abc"))
    assert "train.bin: the last sequence ends at byte 20 of 23" in caplog.text
    assert dataset[2].tolist() == [3, 4]


def test_a_whole_pair_is_silent(raw_pair: RawPair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        IndexedDataset(raw_pair()).validate()
    assert caplog.text == ""


def test_empty_corpora(raw_pair: RawPair) -> None:
    for lengths in ([], [0], [0, 0]):
        dataset = IndexedDataset(raw_pair(lengths))
        assert len(dataset) == len(lengths)
        assert dataset.num_tokens == 0
        assert [s.tolist() for s in dataset] == [[]] * len(lengths)
    assert IndexedDataset(raw_pair([]), multimodal=True)[:][0] == []


def test_views_outlive_the_dataset_and_the_files(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2])
    dataset = IndexedDataset(prefix)
    views = [dataset[0], dataset.get(2, 1), dataset.sequence_lengths, dataset.document_indices]
    Path(prefix + ".bin").unlink()
    Path(prefix + ".idx").unlink()
    del dataset
    assert [v.tolist() for v in views] == [[100, 101, 102], [104], [3, 0, 2], [0, 1, 2, 3]]


def test_views_cannot_be_written(raw_pair: RawPair) -> None:
    dataset = IndexedDataset(raw_pair())
    for view in (dataset[0], dataset.tokens, dataset.sequence_lengths, dataset.document_indices):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_exists_and_path_objects(raw_pair: RawPair, tmp_path: Path) -> None:
    prefix = raw_pair()
    assert IndexedDataset.exists(prefix)
    assert IndexedDataset.exists(tmp_path / "train")
    assert not IndexedDataset.exists(tmp_path / "other")
    assert IndexedDataset(tmp_path / "train").path_prefix == prefix
    Path(prefix + ".bin").unlink()
    assert not IndexedDataset.exists(prefix)


def test_a_prefix_may_end_like_a_suffix(raw_pair: RawPair) -> None:
    assert len(IndexedDataset(raw_pair(name="old.bin"))) == 3


def test_copies_read_the_same_files(raw_pair: RawPair) -> None:
    dataset = IndexedDataset(raw_pair())
    assert copy.deepcopy(dataset)[0].tolist() == copy.copy(dataset)[0].tolist() == [100, 101, 102]
