"""Runs that go past their planned end: the past as it was, then what was seen least."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus

import megaindex
from megaindex import InvalidArgument, MegatronOrder, NeoxOrder
from megaindex.format import IndexedDataset
from megaindex.index import extension as module
from megaindex.index.extension import (
    derived_seed,
    extend_index,
    least_seen_samples,
    times_served,
)
from megaindex.index.receipts import fingerprint_keys, planned_receipt
from megaindex.index.spans import Index, Spans
from megaindex.index.stretches import StretchedIndex

ORDERS = ("megatron", "neox", "megatron-legacy", "paddlenlp")
LENGTH = 16
KEYS = fingerprint_keys(["0123456789abcdef" * 2])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(8).integers(0, 90, 60)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths)


def build(corpus: IndexedDataset, order: Any, seed: int, **length: Any) -> Any:
    return megaindex.build_index(corpus, sequence_length=LENGTH, seed=seed, order=order, **length)


def extend(corpus: IndexedDataset, order: str, old: Index, consumed: int, more: int) -> Any:
    return extend_index(
        old,
        consumed_samples=consumed,
        more_samples=more,
        seed=5,
        further=lambda seed: build(corpus, order, seed, epochs=1),
    )


def rows(spans: Spans) -> list[list[tuple[int, ...]]]:
    parts = list(zip(*(part.tolist() for part in spans), strict=True))
    bounds = spans.row_splits.tolist()
    return [parts[a:b] for a, b in itertools.pairwise(bounds)]


def token_counts(corpus: IndexedDataset, index: Index, samples: Any) -> np.ndarray:
    """How often each token of the corpus is among the first S of these samples, token by token."""
    times = np.zeros(corpus.num_tokens, np.int64)
    begin_of = np.concatenate(([0], np.cumsum(corpus.sequence_lengths)))
    for runs in rows(index.locate(samples)):
        tokens = [t for _, d, o, n in runs for t in range(begin_of[d] + o, begin_of[d] + o + n)]
        assert len(tokens) == LENGTH + 1
        times[tokens[:LENGTH]] += 1
    return times


def of_the_old(index: StretchedIndex) -> np.ndarray:
    """The samples of the old index that an extension serves, in its order."""
    (first, *_), begun = index.stretches, index.stretches[0].index
    if not isinstance(begun, StretchedIndex):
        return np.asarray(first.samples)
    return np.concatenate([each.samples for each in begun.stretches])


@given(
    order=st.sampled_from(ORDERS),
    planned=st.integers(1, 500),
    share=st.floats(0, 1),
    more=st.integers(1, 700),
)
def test_the_past_is_as_it_was(
    corpus: IndexedDataset, order: str, planned: int, share: float, more: int
) -> None:
    old = build(corpus, order, 5, num_samples=planned)
    consumed = int(share * old.num_samples)
    index = extend(corpus, order, old, consumed, more)
    assert index.num_samples == consumed + more
    past = np.arange(consumed)
    assert rows(index.locate(past)) == rows(old.locate(past))
    assert planned_receipt(index, 0, consumed, KEYS) == planned_receipt(old, 0, consumed, KEYS)
    # every old sample is served once before any further epoch begins
    served = consumed + min(more, old.num_samples - consumed)
    ids = of_the_old(index)
    assert len(set(ids.tolist())) == served
    if served == old.num_samples:
        np.testing.assert_array_equal(np.sort(ids), np.arange(served))


@given(order=st.sampled_from(ORDERS), consumed=st.integers(0, 300), more=st.integers(1, 400))
def test_a_longer_extension_begins_with_a_shorter_one(
    corpus: IndexedDataset, order: str, consumed: int, more: int
) -> None:
    old = build(corpus, order, 5, epochs=2)
    short = extend(corpus, order, old, consumed, more)
    long = extend(corpus, order, old, consumed, more + 250)
    everything = np.arange(short.num_samples)
    assert rows(long.locate(everything)) == rows(short.locate(everything))
    assert long.further_seeds[: len(short.further_seeds)] == short.further_seeds


@pytest.mark.parametrize("order", ORDERS)
def test_each_step_serves_what_was_seen_least(corpus: IndexedDataset, order: str) -> None:
    """Brute force: no sample left had tokens seen less often, nor as often and came earlier."""
    old = build(corpus, _together(order), 5, epochs=2)
    consumed = old.num_samples // 2
    index = extend(corpus, order, old, consumed, 60)
    times = token_counts(corpus, old, np.arange(consumed))
    of_sample = {k: token_counts(corpus, old, [k]) for k in range(consumed, old.num_samples)}
    for chosen in of_the_old(index)[consumed:].tolist():
        scores = {k: int((times * tokens).sum()) for k, tokens in of_sample.items()}
        least = min(scores.values())
        assert chosen == min(k for k, score in scores.items() if score == least)
        times += of_sample.pop(chosen)


def _together(order: str) -> NeoxOrder | MegatronOrder:
    return NeoxOrder() if order == "neox" else MegatronOrder(separate_final_epoch="never")


def test_a_neox_run_sees_the_quarter_it_never_saw(tmp_path: Any) -> None:
    """One epoch's worth of two shuffled together leaves a quarter unseen, a quarter seen twice."""
    lengths = np.random.default_rng(1).integers(1, 200, 1500)
    corpus = write_corpus(tmp_path / "c", lengths)
    per_epoch = (corpus.num_tokens - 1) // LENGTH
    old = build(corpus, "neox", 5, num_samples=per_epoch + 1)
    assert old.num_epochs == 2
    before = np.array(times_served(old, per_epoch)) / corpus.num_tokens
    np.testing.assert_allclose(before, [0.25, 0.5, 0.25], atol=0.02)

    quarter = per_epoch // 4
    index = extend(corpus, "neox", old, per_epoch, quarter)
    counts = times_served(index, per_epoch + quarter)
    expected = np.bincount(token_counts(corpus, index, np.arange(index.num_samples)))
    assert counts == expected.tolist()
    gained = before[0] - counts[0] / corpus.num_tokens
    in_order = before[0] - times_served(old, per_epoch + quarter)[0] / corpus.num_tokens
    assert gained > 0.22  # of the 0.25 that were never seen; whole samples cannot give all
    assert in_order < 0.13


@given(end=st.integers(0, 330), order=st.sampled_from(ORDERS))
def test_times_served_are_those_of_brute_force(
    corpus: IndexedDataset, end: int, order: str
) -> None:
    index = build(corpus, order, 5, epochs=2)
    end = min(end, index.num_samples)
    expected = np.bincount(token_counts(corpus, index, np.arange(end)))
    assert times_served(index, end) == expected.tolist()


@pytest.mark.slow_cases("numba")
def test_every_backend_extends_alike(
    corpus: IndexedDataset, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build(corpus, "neox", 5, epochs=2)
    expected = least_seen_samples(old, 100, 150)
    monkeypatch.setattr(module, "active", lambda: backend)
    np.testing.assert_array_equal(least_seen_samples(old, 100, 150), expected)


def test_any_mixture_of_ids_is_located(corpus: IndexedDataset) -> None:
    old = build(corpus, "megatron", 5, epochs=1)
    index = extend(corpus, "megatron", old, 100, 3 * old.num_samples)
    assert len(index.further_seeds) == 3
    assert index.num_epochs == 4
    assert len(set(index.further_seeds)) == 3
    assert index.further_seeds[0] == derived_seed(5, old.num_samples, 0)
    ids = np.random.default_rng(0).integers(0, index.num_samples, 300)
    one_by_one = [row for k in ids for row in rows(index.locate([k]))]
    assert rows(index.locate(ids)) == one_by_one
    assert index.locate([]).row_splits.tolist() == [0]
    with pytest.raises(megaindex.OutOfRange, match=f"sample {index.num_samples} does not exist"):
        index.locate([index.num_samples])


def test_an_extension_can_be_extended(corpus: IndexedDataset) -> None:
    old = build(corpus, "neox", 5, epochs=2)
    once = extend(corpus, "neox", old, 100, 200)
    twice = extend(corpus, "neox", once, 250, 400)
    past = np.arange(250)
    assert rows(twice.locate(past)) == rows(once.locate(past))
    assert isinstance(twice, StretchedIndex)
    assert twice.num_samples == 650


@pytest.mark.parametrize(
    ("consumed", "more", "message"),
    [
        (-1, 5, "consumed_samples must be from 0 to"),
        (10**6, 5, "consumed_samples must be from 0 to"),
        (5, 0, "more_samples must be at least 1"),
    ],
)
def test_bad_numbers_are_refused(
    corpus: IndexedDataset, consumed: int, more: int, message: str
) -> None:
    old = build(corpus, "neox", 5, epochs=1)
    with pytest.raises(megaindex.InvalidArgument, match=message):
        extend(corpus, "neox", old, consumed, more)


def test_a_further_epoch_without_a_sample_is_refused(corpus: IndexedDataset) -> None:
    """It would be drawn without end."""
    from megaindex.index.array_index import ArrayIndex

    old = build(corpus, "neox", 5, epochs=1)
    assert isinstance(old, ArrayIndex)

    def without_samples(_: int) -> ArrayIndex:
        return replace(old, shuffle_index=old.shuffle_index[:0], sample_index=old.sample_index[:1])

    with pytest.raises(megaindex.InvalidArgument, match="must have at least"):
        extend_index(
            old, consumed_samples=0, more_samples=old.num_samples + 1, seed=5,
            further=without_samples,
        )  # fmt: skip


def test_further_epochs_of_other_documents_are_refused(corpus: IndexedDataset) -> None:
    old = build(corpus, "neox", 5, epochs=1)
    with pytest.raises(megaindex.InvalidArgument, match="further epoch must have tokens_per_epoch"):
        extend_index(
            old, consumed_samples=0, more_samples=old.num_samples + 1, seed=5,
            further=lambda seed: build(corpus, "neox", seed, epochs=1, documents=range(50)),
        )  # fmt: skip


def test_cursors_end_where_an_order_of_its_own_begins(corpus: IndexedDataset) -> None:
    old = build(corpus, NeoxOrder(), 5, epochs=2)
    consumed = old.num_samples // 2
    index = extend(corpus, NeoxOrder(), old, consumed, old.num_samples)
    assert index.cursors(consumed) == {(0, LENGTH): consumed}
    for position in (consumed + 1, index.num_samples):
        with pytest.raises(InvalidArgument, match=f"position {position} has no next samples"):
            index.cursors(position)
