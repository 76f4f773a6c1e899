"""Iteration: every sample of a range once, with the spans of `locate`, in any order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.examples import one_in
from support.inputs import for_each

import megaindex
from megaindex import EpochOrder, Skip
from megaindex.format import IndexedDataset
from megaindex.index import array_index as arrays
from megaindex.index import blended_index, staged_index
from megaindex.index import receipts as receipts_module
from megaindex.index import spans as spans_module
from megaindex.index.balance import squared_lengths
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.extension import extend_index
from megaindex.index.mixing import Random, Stratified
from megaindex.index.orders import epoch
from megaindex.index.orders import keyed as blocks
from megaindex.index.receipts import (
    Receipt,
    fingerprint_keys,
    planned_block_receipts,
    planned_receipt,
)
from megaindex.index.skips import resolve_skips, with_skips
from megaindex.index.spans import IterableIndex, Spans, iterate_spans, locate_range
from megaindex.index.staged_index import MixedStage, StagedIndex
from megaindex.index.stretches import StretchedIndex, sequence
from megaindex.kernels import load
from megaindex.recipe import BatchSchedule

KEYS = fingerprint_keys(["0123456789abcdef" * 2, "fedcba9876543210" * 2])
LENGTH = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(8).integers(0, 90, 120) * (np.arange(120) % 5 > 0)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spans_module, blocks, arrays):
        monkeypatch.setattr(module, "CHUNK", 37)
    monkeypatch.setattr(arrays, "_PLACED", 101)
    monkeypatch.setattr(staged_index, "_SORTED", 13)
    for name, number in (("WORTH_SORTING", 1), ("WINDOW", 83)):
        for module in (blended_index, staged_index):
            monkeypatch.setattr(module, name, number)


CARRIED = EpochOrder(left_over="carry")


def build(corpus: Any, order: Any, **settings: Any) -> Any:
    return megaindex.build_index(
        corpus, order=order, **{"sequence_length": LENGTH, "seed": 5, "epochs": 3, **settings}
    )


def extended(corpus: IndexedDataset) -> StretchedIndex:
    old = build(corpus, "epoch", epochs=2)
    return extend_index(
        old,
        consumed_samples=old.num_samples // 3,
        more_samples=old.num_samples,
        seed=5,
        further=lambda seed: build(corpus, "neox", seed=seed, epochs=2),
    )


def blended(corpus: IndexedDataset, in_order: bool) -> BlendedIndex:
    """Two thirds of the draws are of the first source; those of the second are in order or not."""
    rng = np.random.default_rng(4)
    indices = (build(corpus, "megatron"), build(corpus, "epoch"))
    which = (rng.random(400) < 0.3).astype(np.int16)
    drawn = np.where(which == 0, np.cumsum(which == 0), np.cumsum(which == 1)) - 1
    if not in_order:
        drawn[which == 1] = rng.integers(0, indices[1].num_samples, int(which.sum()))
    return BlendedIndex(indices=indices, dataset_index=which, dataset_sample_index=drawn)


def staged(corpus: IndexedDataset, sequence_length: int = LENGTH) -> StagedIndex:
    """Two sources that the second stage goes on to read, in the other order."""
    indices = (
        build(corpus, "epoch", sequence_length=sequence_length),
        build(corpus, "window", sequence_length=sequence_length),
    )
    first, second = Stratified(shares=(2, 1)), Random(shares=(1, 3), seed=3, name="s", period=70)
    begins = first.counts(130)[::-1].tolist()
    stages = (
        MixedStage(mixing=first, sources=(0, 1), begins=(0, 0), num_samples=130),
        MixedStage(mixing=second, sources=(1, 0), begins=tuple(begins), num_samples=190),
    )
    return StagedIndex(sources=indices, stages=stages)


SETTINGS: dict[str, dict[str, Any]] = {
    "megatron": {"order": "megatron"},
    "neox": {"order": "neox", "epochs": None, "num_samples": 400},
    "epoch": {"order": "epoch"},
    "epoch, one document a sample": {"order": "epoch", "sequence_length": 3},
    "epoch, long samples": {"order": "epoch", "sequence_length": 700},
    "epoch, chosen documents": {"order": "epoch", "documents": [7, 3, 99, 60, 61, 62, 4]},
    "epoch, carried": {"order": CARRIED},
    "epoch, carried, long": {"order": CARRIED, "sequence_length": 1009},
    "epoch, mixed": {"order": EpochOrder(epochs_mixed=3, left_over="carry"), "epochs": 6},
    "window": {"order": "window"},
    "window, split": {"order": "window", "split": "7,3,0", "sequence_length": 5},
    "packed": {"order": "packed"},
    "packed, chosen documents": {"order": "packed", "documents": [7, 3, 99, 60, 61, 7, 4]},
    "extended": {},
    "blended": {},
    "blended, draws in any order": {},
    "staged": {},
    "staged, two lengths": {},
}


@pytest.fixture(scope="module", params=SETTINGS)
def index(request: pytest.FixtureRequest, corpus: IndexedDataset) -> Any:
    settings = SETTINGS[request.param]
    if request.param.startswith("blended"):
        return blended(corpus, in_order=request.param == "blended")
    if request.param == "staged":
        return staged(corpus)
    if request.param.startswith("staged"):
        return sequence([staged(corpus), staged(corpus, 7)])
    return build(corpus, **settings) if settings else extended(corpus)


def samples(positions: np.ndarray, spans: Spans) -> dict[int, list[tuple[int, ...]]]:
    """The runs of each sample by its position; none is given twice."""
    runs = list(zip(*(part.tolist() for part in spans), strict=True))
    bounds = itertools.pairwise(spans.row_splits.tolist())
    rows = {p: runs[a:b] for p, (a, b) in zip(positions.tolist(), bounds, strict=True)}
    assert len(rows) == positions.size
    return rows


@pytest.mark.slow_cases("staged", "staged, two lengths")
@one_in(5)  # for each of 18 indices
@given(share=st.tuples(st.floats(0, 1), st.floats(0, 1)), parts=st.integers(1, 5))
def test_iteration_agrees_with_locate(index: Any, share: tuple[float, float], parts: int) -> None:
    begin, end = sorted(round(s * index.num_samples) for s in share)
    iterated: dict[int, list[tuple[int, ...]]] = {}
    for part in range(parts):
        for positions, spans in iterate_spans(index, begin, end, part, parts):
            rows = samples(positions, spans)
            assert not iterated.keys() & rows.keys()
            iterated |= rows
    ids = np.arange(begin, end)
    assert iterated == samples(ids, index.locate(ids))
    one_by_one = ids[:: max(1, ids.size // 20)]
    assert all(iterated[i] == samples(np.array([i]), index.locate([i]))[i] for i in one_by_one)


def test_iteration_over_all_gives_every_sample(index: Any) -> None:
    ids = np.arange(index.num_samples)
    for one, other in zip(locate_range(index, 0, ids.size), index.locate(ids), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("order", ["epoch", "window"])
def test_computed_orders_iterate_in_the_order_of_the_tokens(
    corpus: IndexedDataset, order: str
) -> None:
    index = build(corpus, order, epochs=1)
    assert isinstance(index, IterableIndex)
    positions = np.concatenate([p for p, _ in iterate_spans(index, 0, index.num_samples)])
    assert (positions != np.arange(positions.size)).any()
    np.testing.assert_array_equal(index.shuffled_samples(0)[positions], np.arange(positions.size))


def test_arrays_are_iterated_in_the_order_of_cutting(corpus: IndexedDataset) -> None:
    index = build(corpus, "megatron")
    assert isinstance(index, IterableIndex)
    for positions, _ in iterate_spans(index, 0, index.num_samples):
        assert (np.diff(index.shuffle_index[positions].astype(np.int64)) > 0).all()


@for_each("name", ["reference", "numba", "native"])
@for_each("order", ["epoch", "window"])
def test_every_backend_iterates_alike(
    corpus: IndexedDataset, name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "native":
        pytest.importorskip("megaindex.kernels._native")
    index = build(corpus, CARRIED if order == "epoch" else order)
    expected = list(iterate_spans(index, 10, index.num_samples - 10))
    for module in (epoch, blocks):
        monkeypatch.setattr(module, "active", lambda: load(name))
    again = list(iterate_spans(replace(index), 10, index.num_samples - 10))
    for (ours, spans), (theirs, others) in zip(again, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        for one, other in zip(spans, others, strict=True):
            np.testing.assert_array_equal(one, other)


# ---- receipts from iteration -------------------------------------------------------------------


@pytest.mark.slow_cases("staged, two lengths")
@one_in(5)
@given(share=st.tuples(st.floats(0, 1), st.floats(0, 1)), stride=st.sampled_from([1, 16, 1024]))
def test_receipts_are_those_of_the_samples_in_order(
    index: Any, share: tuple[float, float], stride: int
) -> None:
    begin, end = sorted(round(s * index.num_samples) for s in share)
    ids = np.arange(begin, end)
    expected = Receipt.of(ids, index.locate(ids), KEYS) if ids.size else Receipt()
    assert planned_receipt(index, begin, end, KEYS) == expected
    receipts = planned_block_receipts(index, begin, end, KEYS, stride=stride)
    assert receipts.total == expected
    for number, receipt in receipts.blocks.items():
        block = ids[ids // stride == number]
        assert receipt == Receipt.of(block, index.locate(block), KEYS)


@pytest.mark.slow_cases("staged, two lengths")
def test_receipts_do_not_depend_on_threads(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = planned_block_receipts(index, 3, index.num_samples, KEYS, stride=16)
    monkeypatch.setattr(receipts_module, "_WORTH_THREADS", 1)
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("MEGAINDEX_NUM_THREADS", threads)
        found = planned_block_receipts(index, 3, index.num_samples, KEYS, stride=16)
        assert found == expected, f"{threads} threads"


@pytest.fixture(scope="module")
def planned(index: Any) -> Receipt:
    """The receipt of all samples, planned and of what is served."""
    ids = np.arange(index.num_samples)
    receipt = planned_receipt(index, 0, ids.size, KEYS)
    assert Receipt.of(ids, index.locate(ids), KEYS) == receipt
    return receipt


@one_in(5)
@given(data=st.data())
def test_one_swapped_sample_is_caught(index: Any, planned: Receipt, data: st.DataObject) -> None:
    last = index.num_samples - 1
    a, b = data.draw(st.lists(st.integers(0, last), min_size=2, max_size=2, unique=True))
    ids = np.arange(index.num_samples)
    served = ids.copy()
    served[[a, b]] = b, a
    # two epochs may cut the very same sample
    one, other = (samples(ids[:1], index.locate([sample])) for sample in (a, b))
    assert (Receipt.of(ids, index.locate(served), KEYS) == planned) == (one == other)


def test_ranges_outside_the_index_are_refused(index: Any) -> None:
    for begin, end in ((-1, 2), (3, 2), (0, index.num_samples + 1)):
        with pytest.raises(megaindex.OutOfRange, match="the index holds samples 0 to"):
            iterate_spans(index, begin, end)
    assert list(iterate_spans(index, 4, 4)) == []


@pytest.mark.parametrize("wrong", [2, -1])
def test_a_blend_of_a_source_that_does_not_exist_is_not_iterated(
    corpus: IndexedDataset, wrong: int
) -> None:
    index = blended(corpus, in_order=True)
    which = index.dataset_index.copy()
    which[7] = wrong
    damaged = replace(index, dataset_index=which)
    message = f"^dataset_index: an entry is {wrong}, the blend has sources 0 to 1; build it again$"
    for read in (
        lambda: planned_receipt(damaged, 0, damaged.num_samples, KEYS),
        lambda: damaged.locate([6, 7, 8]),
        lambda: locate_range(damaged, 0, 300),
    ):
        with pytest.raises(megaindex.InvalidArgument, match=message):
            read()
    # the part of the iteration without that sample: of the first window in order, else as before
    found, usual = ({}, {})
    for rows, each in ((found, damaged), (usual, index)):
        for positions, spans in iterate_spans(each, 0, index.num_samples, 1, 2):
            rows |= samples(positions, spans)
    later = {k: runs for k, runs in found.items() if k >= 83}
    assert later == {k: runs for k, runs in usual.items() if k >= 83}
    begin = np.arange(41, 83)
    assert {k: runs for k, runs in found.items() if k < 83} == samples(begin, index.locate(begin))


def test_a_damaged_array_is_named(corpus: IndexedDataset, tmp_path: Path) -> None:
    index = build(corpus, "megatron", cache_dir=tmp_path / "cache")
    rows = index.sample_index.copy()
    rows[7, 0] = index.document_index.size
    damaged = replace(index, sample_index=rows)
    with pytest.raises(megaindex.InvalidArgument, match="sample_index.*build the index again"):
        planned_receipt(damaged, 0, damaged.num_samples, KEYS)


@pytest.mark.parametrize(("entry", "rule"), [(0, "samples .* repeat"), (-1, "entry 7 is")])
def test_a_damaged_shuffle_is_named(corpus: IndexedDataset, entry: int, rule: str) -> None:
    """A sample twice, and one that does not exist."""
    index = build(corpus, "megatron")
    shuffle = index.shuffle_index.copy()
    shuffle[7] = shuffle[0] if entry == 0 else shuffle.size
    damaged = replace(index, shuffle_index=shuffle)
    with pytest.raises(megaindex.InvalidArgument, match=f"shuffle_index: {rule}.*build the index"):
        planned_receipt(damaged, 0, damaged.num_samples, KEYS)


def test_the_source_and_the_sample_of_positions(corpus: IndexedDataset) -> None:
    parts = (staged(corpus), staged(corpus, 7))
    index = sequence(parts)
    ids = np.arange(index.num_samples)[::-3]
    source, sample = index.origin(ids)
    assert source.dtype == sample.dtype == np.int64
    for position, number, own in zip(ids.tolist(), source.tolist(), sample.tolist(), strict=True):
        spans = parts[position // 320].sources[number].locate([own])
        numbered = replace(spans, source=np.full(len(spans), number))
        assert samples(ids[:1], numbered) == samples(ids[:1], index.locate([position]))
    assert [each.size for each in index.origin([])] == [0, 0]


def test_rows_of_two_lengths_have_no_common_width(corpus: IndexedDataset) -> None:
    index = sequence([staged(corpus), staged(corpus, 7)])
    for ids in ([3, 319], [320, 500]):
        assert squared_lengths(index, ids).tolist() == [
            int(squared_lengths(index, [one])[0]) for one in ids
        ]
    with pytest.raises(megaindex.InvalidArgument) as caught:
        squared_lengths(index, [319, 320])
    assert str(caught.value) == (
        "balance: the rows must have one sequence length, got [7, 16]; give those of one step"
    )


def test_sources_of_a_stage_have_one_length(corpus: IndexedDataset) -> None:
    sources = (build(corpus, "epoch"), build(corpus, "epoch", sequence_length=7))
    first = MixedStage(mixing=Stratified(shares=(1,)), sources=(1,), begins=(0,), num_samples=5)
    assert StagedIndex(sources=sources, stages=(first,)).sequence_length == 7
    both = MixedStage(
        mixing=Stratified(shares=(1, 1)), sources=(1, 0), begins=(0, 0), num_samples=5
    )
    for stages in ((both,), ()):
        with pytest.raises(megaindex.InvalidArgument) as caught:
            StagedIndex(sources=sources, stages=stages)
        assert str(caught.value) == (
            "all sources must have the same (sequence_length, add_extra_token), got "
            "[(7, 1), (16, 1)]"
        )


def test_a_stage_that_draws_more_than_a_source_has_is_refused(corpus: IndexedDataset) -> None:
    index = build(corpus, "epoch")
    last = index.num_samples - 10
    for drawn in (10, 11):
        stage = MixedStage(
            mixing=Stratified(shares=(1,)), sources=(0,), begins=(last,), num_samples=drawn
        )
        if drawn == 10:
            assert StagedIndex(sources=(index,), stages=(stage,)).num_samples == 10
            continue
        with pytest.raises(megaindex.InvalidArgument) as caught:
            StagedIndex(sources=(index,), stages=(stage,))
        assert str(caught.value) == (
            f"source 0 must have {last + 11} samples for stage 0, got {last + 10}; extend it"
        )


def test_rows_of_more_documents_than_32_bits_count_are_wide(
    corpus: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build(corpus, "epoch", epochs=1)
    expected = arrays.arrays_of(index, corpus.sequence_lengths)
    for most, dtype in ((expected.document_index.size, np.int32), (10, np.int64)):
        monkeypatch.setattr(arrays, "INT32_MAX", most)
        found = arrays.arrays_of(index, corpus.sequence_lengths)
        assert found.sample_index.dtype == dtype
        np.testing.assert_array_equal(found.sample_index, expected.sample_index)


def test_rows_of_an_index_that_skips_samples_are_refused(corpus: IndexedDataset) -> None:
    """The frameworks' arrays have no positions that are not served."""
    index = build(corpus, "epoch", epochs=1)
    skips = resolve_skips([Skip(steps=1)], BatchSchedule.constant(4), num_samples=index.num_samples)
    with pytest.raises(megaindex.InvalidArgument, match="or leaves positions out"):
        arrays.arrays_of(with_skips(index, skips), corpus.sequence_lengths)
