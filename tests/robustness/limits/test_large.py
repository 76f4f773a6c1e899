"""The largest blends, and one real build of more entries than 31 bits count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.index.blended_index import MOST_SOURCES
from megaindex.kernels import load

GIB = 1 << 30


def test_the_largest_blend_is_the_references() -> None:
    """32,767 weights: the last number that fits the int16 of dataset_index."""
    weights = np.random.default_rng(1).lognormal(size=MOST_SOURCES)
    weights /= weights.sum()
    size = 300
    drawn = []
    for name in ("reference", "native"):
        if name == "native" and os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
            pytest.skip("installed without the native core")
        counts = np.zeros(MOST_SOURCES, np.int64)
        index, samples = np.empty(size, np.int16), np.empty(size, np.int64)
        load(name).blend_greedy(weights, 0, size, counts, index, samples)
        drawn.append((index.tolist(), samples.tolist(), counts.tolist()))
    assert drawn[0] == drawn[1]


def test_the_number_of_datasets_is_checked_before_they_are_opened(tmp_path: Path) -> None:
    settings: Any = {"weights": [1.0], "num_samples": 1, "sequence_length": 4, "seed": 1}
    for number, message in ((MOST_SOURCES, "weights"), (MOST_SOURCES + 1, "at most 32767 sources")):
        with pytest.raises(megaindex.InvalidArgument, match=message):
            megaindex.build_blend([str(tmp_path / "none")] * number, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_as_many_datasets_as_a_blend_may_have(tmp_path: Path, order: str) -> None:
    corpus = write_corpus(tmp_path / "c", [9, 0, 12])
    blend = megaindex.build_blend(
        [corpus] * MOST_SOURCES,
        weights=[1.0] * MOST_SOURCES,
        num_samples=2 * MOST_SOURCES,
        sequence_length=4,
        seed=1,
        order=order,
    )
    spans = blend.locate(np.arange(2 * MOST_SOURCES))
    sources = spans.source[spans.row_splits[:-1]]
    assert int(sources.max()) == MOST_SOURCES - 1 == 2**15 - 2
    assert np.bincount(sources, minlength=MOST_SOURCES).tolist() == [2] * MOST_SOURCES


def available_memory() -> int:
    """Bytes, as the kernel estimates them."""
    with open("/proc/meminfo") as stream:
        fields = dict(line.split(":") for line in stream)
    return int(fields["MemAvailable"].split()[0]) * 1024


@pytest.mark.slow
def test_a_build_of_more_than_two_to_the_31_documents(tmp_path: Path) -> None:
    """2,049 epochs of 2**20 documents, shuffled together: 8.6 GB, in memory."""
    if available_memory() < 12 * GIB:
        pytest.skip("needs 12 GiB of memory")
    documents, epochs = 2**20, 2**11 + 1
    lengths = np.random.default_rng(1).integers(0, 7, documents)
    corpus = write_pair(tmp_path / "c", lengths)
    index = megaindex.build_index(
        corpus,
        sequence_length=2**18,
        seed=1,
        epochs=epochs,
        order=megaindex.MegatronOrder(separate_final_epoch="never"),
    )
    total = epochs * int(lengths.sum())
    assert index.document_index.size == epochs * documents > 2**31
    assert index.num_samples == (total - 1) // 2**18
    assert total > 2**32
    _check_documents(index.document_index, documents, epochs)
    _check_samples(index.document_index, index.sample_index, lengths, 2**18)
    last = index.locate([int(index.shuffle_index.argmax())])
    assert last.length.sum() == 2**18 + 1


def write_pair(prefix: Path, lengths: np.ndarray) -> megaindex.IndexedDataset:
    with megaindex.IndexedDatasetWriter(prefix, np.uint8) as writer:
        writer.add_documents(np.zeros(int(lengths.sum()), np.uint8), lengths)
    return megaindex.IndexedDataset(prefix)


def _check_documents(document_index: np.ndarray, documents: int, epochs: int) -> None:
    """Every document so many times, counted piece by piece."""
    counts = np.zeros(documents, np.int64)
    for begin in range(0, document_index.size, 1 << 26):
        counts += np.bincount(document_index[begin : begin + (1 << 26)], minlength=documents)
    assert (counts == epochs).all()


def _check_samples(
    document_index: np.ndarray, sample_index: np.ndarray, lengths: np.ndarray, width: int
) -> None:
    """Sample k begins k * width tokens after the first: positions against sums made here."""
    before = 0  # tokens of the documents before `begin`
    for begin in range(0, document_index.size, 1 << 26):
        piece = lengths[document_index[begin : begin + (1 << 26)]]
        ends = np.cumsum(piece) + before
        mine = sample_index[
            (sample_index[:, 0] >= begin) & (sample_index[:, 0] < begin + len(piece))
        ]
        place = mine[:, 0].astype(np.int64) - begin
        starts = ends[place] - piece[place] + mine[:, 1]
        assert (starts % width == 0).all()
        assert (np.diff(starts) == width).all()
        assert (mine[:, 1] < np.maximum(piece[place], 1)).all()
        before = int(ends[-1])
