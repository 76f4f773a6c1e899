"""Order ``packed`` of real corpora: complete epochs of whole documents, through build_index."""

from __future__ import annotations

import itertools
import multiprocessing
import operator
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import PackedOrder
from megaindex.format import IndexedDataset
from megaindex.index.orders import keyed, packed
from megaindex.index.orders.packed import PackedIndex, most_documents
from megaindex.index.spans import Spans
from megaindex.kernels import load

NUMBERS = itertools.count()
RULES = ("split", "truncate", "skip")


def used_lengths(lengths: np.ndarray, sequence_length: int, long_documents: str) -> np.ndarray:
    """Return the tokens of each document that an epoch has as input."""
    if long_documents == "truncate":
        return np.minimum(lengths, sequence_length)
    if long_documents == "skip":
        return np.where(lengths > sequence_length, 0, lengths)
    return lengths


def check_epochs(index: PackedIndex, lengths: np.ndarray) -> None:
    """Count every token of every epoch: an input as often as its document is in the epoch."""
    size, per_epoch = index.sequence_length, index.samples_per_epoch
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    documents = np.asarray(index.documents)
    copies = np.bincount(documents, minlength=lengths.size)
    used = used_lengths(lengths, size, index.long_documents)
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths) < np.repeat(used, lengths)
    expected = np.repeat(copies, lengths) * inside
    inputs = int(expected.sum())
    assert index.num_samples == index.num_epochs * per_epoch
    assert index.tokens_per_epoch == int(lengths[documents].sum())
    assert index.cut_tokens == index.tokens_per_epoch - inputs
    assert index.tokens_left_over == index.num_epochs * index.cut_tokens
    assert index.packing.num_samples == per_epoch
    assert index.packing.input_tokens == inputs
    assert index.packing.padding == per_epoch * size - inputs
    pieces, samples = index.packing.pieces
    counted = []
    for epoch in range(index.num_epochs):
        spans = index.locate(np.arange(epoch * per_epoch, (epoch + 1) * per_epoch))
        input_lengths = spans.input_lengths(size)
        assert (input_lengths >= 1).all()
        # only a document that goes on has a token that is a label alone, and only with extra
        more = spans.length - input_lengths
        ends = spans.offset + input_lengths
        goes_on = (ends < lengths[spans.document]) & (input_lengths == size)
        np.testing.assert_array_equal(more, index.add_extra_token * goes_on)
        assert (np.diff(spans.row_splits) >= 1).all()
        per_sample = np.add.reduceat(input_lengths, spans.row_splits[:-1])
        counted.append(per_sample)
        assert (per_sample <= size).all()
        assert per_epoch * size - per_sample.sum() == index.packing.padding
        found = np.unique(np.diff(spans.row_splits), return_counts=True)
        np.testing.assert_array_equal(found[0], pieces)
        np.testing.assert_array_equal(found[1], samples)
        # pieces begin at multiples of a sample: whatever fits into one is whole
        assert (spans.offset % size == 0).all()
        np.testing.assert_array_equal(
            input_lengths, np.minimum(used[spans.document] - spans.offset, size)
        )
        times = np.zeros(starts[-1] + 1, np.int64)
        np.add.at(times, starts[spans.document] + spans.offset, 1)
        np.add.at(times, starts[spans.document] + ends, -1)
        np.testing.assert_array_equal(np.cumsum(times)[:-1], expected)
    before = np.concatenate(([0], np.cumsum(np.concatenate(counted))))
    total = index.num_samples
    for begin, end in ((0, total), (0, 1), (1, total), (total // 3, total // 2), (total, total),
                       (per_epoch - 1, total), (total // 4, total - total // 5)):  # fmt: skip
        assert index.count_inputs(begin, end) == before[end] - before[begin]
    with pytest.raises(megaindex.OutOfRange):
        index.count_inputs(0, total + 1)


def same(one: Spans, other: Spans) -> bool:
    pairs = zip((*one, one.row_splits), (*other, other.row_splits), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> IndexedDataset:
    """700 documents, of which some are empty and some are longer than several samples."""
    rng = np.random.default_rng(11)
    lengths = (rng.lognormal(2.5, 1.3, 700) * (np.arange(700) % 9 > 0)).astype(np.int64)
    return write_corpus(folder / "corpus", lengths)


def build(corpus: Any, **settings: Any) -> Any:
    return megaindex.build_index(
        corpus, **{"order": "packed", "sequence_length": 32, "seed": 5, "epochs": 3, **settings}
    )


@given(
    lengths=st.lists(st.integers(0, 30) | st.sampled_from([0, 8, 16, 17, 200]), min_size=1,
                     max_size=60).filter(any),
    sequence_length=st.integers(1, 40),
    epochs=st.integers(1, 3),
    extra=st.integers(0, 1),
    limit=st.sampled_from([None, 1, 2, 5]),
    rule=st.sampled_from(RULES),
    data=st.data(),
)  # fmt: skip
def test_every_epoch_of_any_corpus_is_complete(
    folder: Path,
    lengths: list[int],
    sequence_length: int,
    epochs: int,
    extra: int,
    limit: int | None,
    rule: Any,
    data: st.DataObject,
) -> None:
    sizes = np.array(lengths, np.int64)
    ids = st.integers(0, len(lengths) - 1)
    chosen = data.draw(st.none() | st.lists(ids, min_size=1, max_size=80), label="documents")
    dataset = write_corpus(folder / f"any-{next(NUMBERS)}", lengths)
    settings: dict[str, Any] = {
        "sequence_length": sequence_length,
        "epochs": epochs,
        "add_extra_token": extra,
        "documents": chosen,
        "order": PackedOrder(max_documents=limit, long_documents=rule),
    }
    taken = sizes if chosen is None else sizes[chosen]
    if not used_lengths(taken, sequence_length, rule).any():
        with pytest.raises(megaindex.InvalidArgument, match="no document gives a sample"):
            build(dataset, **settings)
        return
    index = build(dataset, **settings)
    check_epochs(index, sizes)
    most = most_documents(limit, sequence_length)
    assert index.packing.pieces[0].max() <= most


@for_each("rule", RULES)
@for_each("extra", [0, 1])
def test_the_parts_of_a_split_are_complete(corpus: Any, rule: Any, extra: int) -> None:
    lengths = corpus.sequence_lengths.astype(np.int64)
    served: list[int] = []
    for subset in ("train", "valid", "test"):
        index = build(
            corpus, split="8,3,1", subset=subset, add_extra_token=extra, epochs=4,
            order=PackedOrder(long_documents=rule),
        )  # fmt: skip
        check_epochs(index, lengths)
        served += index.documents
    assert served == list(range(lengths.size))


@pytest.mark.slow_cases("reference")
@for_each("rule", RULES)
def test_every_backend_has_the_same_order(
    corpus: Any, backend: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "order": PackedOrder(long_documents=rule),
        "documents": [*range(90, 400), 7, 7, 3, 699],
    }
    expected = build(corpus, **settings)
    for module in (packed, keyed):
        monkeypatch.setattr(module, "active", lambda: backend)
    index = build(corpus, **settings)
    for name, array in expected.arrays.items():
        assert array.dtype == index.arrays[name].dtype
        np.testing.assert_array_equal(index.arrays[name], array)
    check_epochs(index, corpus.sequence_lengths.astype(np.int64))
    ids = np.random.default_rng(0).permutation(index.num_samples)
    monkeypatch.undo()
    assert same(index.locate(ids), expected.locate(ids))


@pytest.mark.parametrize("documents", [None, [5, 600, 600, 3, 8, 444]])
def test_arrays_of_the_cache_are_those_in_memory(
    corpus: Any, tmp_path: Path, documents: Any
) -> None:
    in_memory = build(corpus, documents=documents)
    ids = np.random.default_rng(1).permutation(in_memory.num_samples)
    for attempt in ("built", "found"):
        index = build(corpus, documents=documents, cache_dir=tmp_path / "cache")
        assert same(index.locate(ids), in_memory.locate(ids)), attempt
        check_epochs(index, corpus.sequence_lengths.astype(np.int64))
    assert not index.arrays["piece_documents"].flags.writeable
    # the entry is that of any seed, name, number of epochs and extra token
    entries = sorted(path.name for path in (tmp_path / "cache").iterdir())
    other: dict[str, Any] = {"seed": 6, "epochs": 9, "source_name": "web", "add_extra_token": 0}
    again = build(corpus, documents=documents, cache_dir=tmp_path / "cache", **other)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == entries
    assert same(again.locate(ids), build(corpus, documents=documents, **other).locate(ids))
    # another packing is another entry
    for change in ({"sequence_length": 31}, {"order": PackedOrder(max_documents=3)},
                   {"order": PackedOrder(long_documents="skip")}, {"split": "1,1"}):  # fmt: skip
        if "split" in change and documents is not None:
            continue
        before = len(list((tmp_path / "cache").iterdir()))
        settings: dict[str, Any] = {"documents": documents, **change}
        index = build(corpus, cache_dir=tmp_path / "cache", **settings)
        assert len(list((tmp_path / "cache").iterdir())) > before
        assert same(index.locate([0, 1]), build(corpus, **settings).locate([0, 1]))


@pytest.mark.slow_cases("True")
@pytest.mark.not_quick
@pytest.mark.parametrize("cached", [False, True])
def test_another_process_continues_where_this_one_stopped(
    corpus: Any, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build(corpus, cache_dir=tmp_path / "cache" if cached else None)
    ids = np.arange(index.num_samples // 3, index.num_samples)
    expected = index.locate(ids)
    assert same(pickle.loads(pickle.dumps(index)).locate(ids), expected)
    monkeypatch.setenv("PYTHONPATH", str(Path(megaindex.__file__).parents[1]))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        rest = pool.submit(operator.methodcaller("locate", ids), index)
        assert same(rest.result(), expected)


def test_more_epochs_change_nothing_before(corpus: Any) -> None:
    index = build(corpus, epochs=2)
    ids = np.arange(index.num_samples)
    for longer in (index.extend(5), build(corpus, epochs=7)):
        assert longer.num_samples > index.num_samples
        assert same(longer.locate(ids), index.locate(ids))
    first, second = (index.locate(ids[e * index.samples_per_epoch :][:9]) for e in (0, 1))
    assert not same(first, second)


@pytest.mark.parametrize("change", [{"seed": 6}, {"source_name": "web"}])
def test_seed_and_name_each_give_another_order(corpus: Any, change: dict[str, Any]) -> None:
    one, other = build(corpus), build(corpus, **change)
    assert one.num_samples == other.num_samples
    ids = np.arange(one.samples_per_epoch)
    assert not same(one.locate(ids), other.locate(ids))


def test_the_index_has_the_samples_asked_for_and_no_epoch_more(corpus: Any) -> None:
    per_epoch = build(corpus).samples_per_epoch
    for asked, epochs in ((1, 1), (per_epoch, 1), (per_epoch + 1, 2), (5 * per_epoch, 5)):
        assert build(corpus, epochs=None, num_samples=asked).num_epochs == epochs
    assert build(corpus, epochs="1.5").num_epochs == 2


def test_samples_of_one_token(corpus: Any) -> None:
    lengths = corpus.sequence_lengths.astype(np.int64)
    index = build(corpus, sequence_length=1)
    assert index.samples_per_epoch == lengths.sum()
    assert index.packing.padding == index.cut_tokens == 0
    check_epochs(index, lengths)
    for rule, samples in (("truncate", lengths > 0), ("skip", lengths == 1)):
        index = build(corpus, sequence_length=1, order=PackedOrder(long_documents=rule))
        assert index.samples_per_epoch == np.count_nonzero(samples)
        check_epochs(index, lengths)


@for_each(("lengths", "rule"), [([0, 0, 0], "split"), ([0, 0], "truncate"), ([9, 40, 0], "skip")])
@for_each("cached", [False, True])
def test_no_document_gives_a_sample(
    tmp_path: Path, lengths: list[int], rule: Any, cached: bool
) -> None:
    dataset = write_corpus(tmp_path / "empty", lengths)
    with pytest.raises(megaindex.InvalidArgument, match=r"empty: no document gives a sample"):
        build(
            dataset, sequence_length=8, order=PackedOrder(long_documents=rule),
            cache_dir=tmp_path / "cache" if cached else None,
        )  # fmt: skip


@for_each(
    ("settings", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be"),
        ({"sequence_length": 2**24 + 1}, r"sequence_length must be at most 16777216 .*16777217; "),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": 2**62}, "epochs must be"),
        ({"documents": [700]}, "700"),
        ({"drop_last_partial": False}, "drop_last_partial is a setting of order"),
    ],
)
def test_settings_out_of_range(corpus: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(megaindex.InvalidArgument, match=message):
        build(corpus, **settings)


@for_each(
    ("settings", "message"),
    [
        ({"max_documents": 0}, "max_documents must be at least 1, got 0"),
        ({"max_documents": -3}, "max_documents must be at least 1, got -3"),
        ({"max_documents": 1.5}, "max_documents must be"),
        ({"max_documents": "many"}, "max_documents must be"),
        ({"long_documents": "drop"}, "long_documents must be"),
        ({"long_documents": None}, "long_documents must be"),
    ],
)
def test_settings_of_the_order_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(megaindex.InvalidArgument, match=message):
        PackedOrder(**settings)


@pytest.mark.slow
def test_the_longest_sample(folder: Path) -> None:
    if os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
        pytest.skip("2**24 lengths take seconds without the native core")
    assert load("native")
    lengths = np.array([5, 9, 1])
    index = build(write_corpus(folder / "longest", lengths), sequence_length=2**24, epochs=2)
    assert index.num_samples == 2
    check_epochs(index, lengths)


@for_each(
    ("sequence_length", "most"), [(8, 16), (543, 16), (544, 17), (575, 17), (1000, 31), (4096, 128)]
)
def test_the_default_number_of_documents(sequence_length: int, most: int) -> None:
    """It is in the key of every run without a number of its own: another one is another order."""
    assert most_documents(None, sequence_length) == most
    assert most_documents(5, sequence_length) == 5


def test_tokens_of_lengths_that_are_rare() -> None:
    """Three pieces of a length meet others; one or two meet the same ones in every epoch."""
    counts = np.zeros(17, np.int64)
    counts[[3, 7, 9, 16]] = 3, 2, 1, 1  # 16: a whole sample
    tokens = int(counts @ np.arange(17))
    packing = packed.Cutting(sequence_length=16).pack(counts, tokens, None)
    assert packing.rare_tokens == 2 * 7 + 9


@for_each(
    ("lengths", "likeness"),
    [([10, 6], 6 / 10), ([8, 8], 1), ([12, 3, 1], 1 / 12), ([16, 9], 1),
     ([10, 6, 9, 5], (6 / 10 + 5 / 9) / 2), ([10, 6, 16], 6 / 10)],
)  # fmt: skip
def test_likeness_is_that_of_samples_of_several_pieces(lengths: list[int], likeness: float) -> None:
    packing = packed.Cutting(sequence_length=16).pack_lengths(np.array(lengths, np.int32), None)
    assert packing.likeness == pytest.approx(likeness)
