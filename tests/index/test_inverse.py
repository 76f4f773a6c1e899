"""Inverse look-up: the samples of documents are those that a scan finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.examples import one_in
from support.inputs import for_each

from megaindex import build_index
from megaindex.index import array_index
from megaindex.index.array_index import (
    InvertibleIndex,
    cut_in_samples,
    places_of,
    scan,
    served_tokens,
)
from megaindex.index.bins import BinIndex, make_bins
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.mixing import PerStream, Random, Stratified
from megaindex.index.order_settings import EpochOrder, PackedOrder
from megaindex.index.orders.blocks import BlockedIndex, PassBlocks
from megaindex.index.orders.epoch import EpochIndex
from megaindex.index.spans import Index
from megaindex.index.staged_index import MixedStage, StagedIndex
from megaindex.index.stretches import Stretch, StretchedIndex

RNG = np.random.default_rng(7)
ORDERS = [
    "megatron",
    "neox",
    "epoch",
    EpochOrder(epochs_mixed=2),
    EpochOrder(left_over="carry"),
    "window",
    "packed",
    PackedOrder(long_documents="truncate"),
    PackedOrder(long_documents="skip", max_documents=2),
]


def check(index: Index, documents: np.ndarray, source: int = 0) -> None:
    documents = np.unique(documents)
    assert isinstance(index, InvertibleIndex)
    found, expected = served_tokens(index, documents, source), scan(index, documents, source)
    rows = [
        np.stack([np.asarray(column, np.int64) for column in each]) for each in (found, expected)
    ]
    assert rows[0].shape == rows[1].shape
    assert np.array_equal(*(each[:, np.lexsort(each[::-1])] for each in rows))


def choices(count: int) -> list[np.ndarray]:
    some = RNG.integers(0, count, 9)
    return [np.arange(count), some, np.array([0]), np.array([count - 1]), np.array([], np.int64)]


@for_each("order", ORDERS)
@for_each("few", [True, False])
def test_every_order(tmp_path: Path, order: object, few: bool) -> None:
    """With documents of no token, of many samples, a part of the corpus, and four epochs."""
    count = 300 if few else 4200  # from 4096 on, bijections are networks
    lengths = RNG.choice([0, 1, 7, 16, 17, 40, 200], count)
    write_corpus(tmp_path / "c", lengths)
    for documents in (None, range(7, count - 30)) if few else (range(7, count - 30),):
        index = build_index(
            str(tmp_path / "c"), sequence_length=16, epochs=4, documents=documents, order=order
        )
        for chosen in choices(count):
            check(index, chosen)


@for_each("rows", [1, 2, 7, 64, 1 << 18])
def test_rows_are_searched_in_chunks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_index, "_ROWS", rows)
    begins = np.sort(RNG.integers(0, 90, (64, 2), np.int32), axis=0)[:, 0]  # a column
    places = np.arange(-1, 92)
    for found, side in zip(array_index._rows_at(begins, places), ("left", "right"), strict=True):
        assert found.tolist() == np.searchsorted(begins, places, side).tolist()


def test_documents_in_any_order(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", RNG.integers(0, 60, 200))
    documents = RNG.permutation(200)[:90].astype(np.int32)
    for order in ("epoch", "packed"):
        index = build_index(
            str(tmp_path / "c"), sequence_length=16, epochs=2, documents=documents, order=order
        )
        check(index, np.arange(200))


def sources(folder: Path, order: str, epochs: int = 3) -> tuple[Index, ...]:
    for name in "abc":
        write_corpus(folder / name, RNG.integers(0, 90, 150))
    return tuple(
        build_index(str(folder / name), sequence_length=16, epochs=epochs, order=order)
        for name in "abc"
    )


@pytest.mark.parametrize("order", ["megatron", "neox", "window"])
def test_blends(tmp_path: Path, order: str) -> None:
    """Whose samples may repeat, in any order."""
    indices = sources(tmp_path, order)
    which = RNG.integers(0, 3, 900)
    sizes = np.array([index.num_samples for index in indices])
    drawn = RNG.integers(0, sizes[which] * 2 // 3)
    blend = BlendedIndex(
        indices=indices, dataset_index=which.astype(np.int16), dataset_sample_index=drawn
    )
    for source in range(3):
        for chosen in choices(150):
            check(blend, chosen, source)


def test_an_index_that_only_scans(tmp_path: Path) -> None:
    """Samples of whole documents: against every document in every sample."""
    lengths = RNG.integers(2, 30, 60)
    bins = make_bins(lengths, range(60), 16, packed=True, long_documents="split")
    index = BinIndex(
        bins=bins, tokens_per_epoch=int(lengths.sum()), num_epochs=2, sequence_length=15, seed=1,
        source_name="c",
    )  # fmt: skip
    assert not isinstance(index, InvertibleIndex)
    for chosen in (np.arange(60), np.array([3, 50])):
        expected = []
        for sample in range(index.num_samples):
            spans = index.locate([sample])
            rows = zip(spans.document, spans.offset, spans.input_lengths(15), strict=True)
            expected += [(sample, *map(int, row)) for row in rows if row[0] in chosen and row[2]]
        found = served_tokens(index, chosen)
        assert sorted(zip(*(c.tolist() for c in found), strict=True)) == sorted(expected)
        assert found.length.dtype == np.int64


@pytest.mark.parametrize("order", ["epoch", "packed"])
def test_stages(tmp_path: Path, order: str) -> None:
    """Sources that go on in the next stage, in another stream, or not at all."""
    indices = sources(tmp_path, order)
    stages = (
        MixedStage(
            mixing=Stratified(shares=(1, 3)), sources=(0, 2), begins=(0, 0), num_samples=300
        ),
        MixedStage(
            mixing=Random(shares=(2, 1, 1), seed=3, name="s", period=70),
            sources=(2, 0, 1), begins=(225, 75, 0), num_samples=200,
        ),
        MixedStage(
            mixing=PerStream(shares=(1, 1), batch_sizes=(9, 9)),
            sources=(1, 1), begins=(50, 100), num_samples=90,
        ),
    )  # fmt: skip
    staged = StagedIndex(sources=indices, stages=stages)
    for source in range(3):
        for chosen in choices(150):
            check(staged, chosen, source)


@pytest.mark.slow
@for_each("seed", range(8))
def test_blocks_of_epochs_that_end_in_empty_documents(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(-9, 40, 300).clip(0).astype(np.int32)
    epochs = EpochIndex(
        sequence_lengths=lengths, documents=range(300), tokens_per_epoch=int(lengths.sum()),
        sequence_length=16, seed=seed, source_name="a",
    )  # fmt: skip
    index = BlockedIndex(blocks=PassBlocks(epochs, 400), sequence_length=16, num_epochs=3)
    for chosen in (*choices(300), np.flatnonzero(lengths == 0)):
        check(index, chosen)


def test_extensions(tmp_path: Path) -> None:
    index = sources(tmp_path, "megatron")[0]
    again = np.concatenate((np.arange(30, 60), np.arange(40, 50)))
    stretches = (
        Stretch(index=index, samples=range(5, 80)),
        Stretch(index=index, samples=range(80, 90), hole="is left out"),
        Stretch(index=index, samples=again),
        Stretch(index=index, samples=range(50, 70), times=3),
    )
    for chosen in choices(150):
        check(StretchedIndex(stretches=stretches), chosen)


@pytest.mark.slow
@given(
    shares=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    most=st.integers(1, 400_000),
    data=st.data(),
)
@one_in(2)
def test_positions_of_draws(shares: list[int], most: int, data: st.DataObject) -> None:
    kinds = [
        Stratified(shares=tuple(shares)),
        PerStream(
            shares=tuple(shares), batch_sizes=(data.draw(st.integers(1, 3000)),) * len(shares)
        ),
        Random(shares=tuple(shares), seed=1, name="x", period=data.draw(st.integers(1, 9000))),
    ]
    for mixing in kinds:
        chosen = np.unique(RNG.integers(0, most, 20))
        drawn = mixing.lookup(chosen)
        for stream in np.unique(drawn.stream).tolist():
            mine = drawn.stream == stream
            ordinals = np.unique(drawn.ordinal[mine])
            found = mixing.positions(stream, ordinals, most)
            np.testing.assert_array_equal(np.sort(found), chosen[mine])


def test_runs_are_cut_where_samples_end() -> None:
    run, sample, offset, length = cut_in_samples(np.array([6, 8]), np.array([12, 0]), 8)
    assert run.tolist() == [0, 0, 0]
    assert sample.tolist() == [0, 1, 2]
    assert (offset.tolist(), length.tolist()) == ([0, 2, 10], [2, 8, 2])


def test_numbers_that_do_not_exist_take_no_memory() -> None:
    """Ids of another corpus, for which a bitmap up to the largest would be a petabyte."""
    found = places_of(np.array([1, 2, 3, 2], np.int32), np.array([2, 2**53]), 4)
    assert found.tolist() == [1, 3]
