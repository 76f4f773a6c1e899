"""Samples that no document crosses: every document once, within the room, hardly any of it lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megaindex.errors import InvalidArgument
from megaindex.index.bins import BinIndex, Bins, LongDocuments, best_fit, make_bins

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def rooms_left(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each bin when the longest pieces go first, where they leave the least.

    Pieces of one length are placed together: one in each bin of the least room that they fit in.
    """
    rooms: list[int] = []
    for length, count in sorted(Counter(lengths).items(), reverse=True):
        while count:
            fitting = [room for room in rooms if room >= length]
            if not fitting:
                alone = min(count, capacity // length)
                rooms.append(capacity - alone * length)
                count -= alone
                continue
            for k, room in enumerate(rooms):
                if room == min(fitting) and count:
                    rooms[k] -= length
                    count -= 1
    return sorted(rooms)


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60))
@example(lengths=[21, 21, 2, 2])  # not 15 and 19, as where every piece is placed by itself
def test_best_fit_leaves_the_least_room(lengths: list[int]) -> None:
    bins = best_fit(np.array(lengths, np.int64), 40)
    used = np.bincount(bins, weights=lengths).astype(int)
    assert (used > 0).all()
    assert sorted((40 - used).tolist()) == rooms_left(lengths, 40)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("long_documents", ["truncate", "split", "skip"])
@given(lengths=LENGTHS)
def test_every_document_is_in_one_place(
    packed: bool, long_documents: LongDocuments, lengths: list[int]
) -> None:
    capacity, sizes = 16, np.array(lengths, np.int32)
    usable = [n for n in lengths if n >= 2 and (n <= capacity or long_documents != "skip")]
    if not usable:
        with pytest.raises(InvalidArgument, match="no document gives a sample"):
            make_bins(sizes, range(sizes.size), capacity, packed=packed,
                      long_documents=long_documents)  # fmt: skip
        return
    bins = make_bins(sizes, range(sizes.size), capacity, packed=packed,
                     long_documents=long_documents)  # fmt: skip
    filled = np.add.reduceat(np.minimum(bins.length, capacity), bins.starts[:-1])
    assert filled.max() <= capacity
    assert (bins.length >= 2).all()
    if not packed:
        assert (np.diff(bins.starts) == 1).all()
    row = capacity if packed else capacity - 1  # input tokens of a sample
    inputs, targets = ([np.zeros(n, int) for n in lengths] for _ in range(2))
    for document, offset, length in zip(bins.document, bins.offset, bins.length, strict=True):
        inputs[document][offset : offset + min(length, row)] += 1
        targets[document][offset + 1 : offset + length] += 1
    for length, read, learned in zip(lengths, inputs, targets, strict=True):
        kept = length if long_documents == "split" else min(length, capacity)
        if long_documents == "skip" and length > capacity:
            kept = 0
        last = max(0, kept - 1)
        # every token but the last is an input, and every one but the first a target, once
        assert read[:last].tolist() == learned[1 : last + 1].tolist() == [1] * last
        assert not learned[last + 1 :].any()
    used = [(a + b) > 0 for a, b in zip(inputs, targets, strict=True)]
    assert bins.num_tokens == sum(int(each.sum()) for each in used)


def index_of(bins: Bins, epochs: int = 1, seed: int = 3) -> BinIndex:
    return BinIndex(
        bins=bins, tokens_per_epoch=bins.num_tokens, sequence_length=16, seed=seed,
        source_name="chat", num_epochs=epochs,
    )  # fmt: skip


@given(lengths=st.lists(st.integers(2, 30), min_size=2, max_size=60), epochs=st.integers(1, 4))
def test_each_epoch_serves_every_bin_once(lengths: list[int], epochs: int) -> None:
    bins = make_bins(np.array(lengths, np.int32), range(len(lengths)), 16, packed=True)
    index = index_of(bins, epochs)
    assert index.num_samples == epochs * bins.num_bins
    rows = [tuple(part.tolist() for part in index.locate([k])) for k in range(index.num_samples)]
    for epoch in range(epochs):
        pieces = rows[epoch * bins.num_bins : (epoch + 1) * bins.num_bins]
        documents = sorted(document for row in pieces for document in row[1])
        assert documents == sorted(bins.document.tolist())
    together = index.locate(np.arange(index.num_samples))
    assert together.document.tolist() == [d for row in rows for d in row[1]]
    longer = index.extend(epochs + 1).locate(np.arange(index.num_samples))
    assert longer.document.tolist() == together.document.tolist()
    assert index.epochs_for(index.num_samples + 1) == epochs + 1


def test_arrays_are_refused_and_the_seed_counts() -> None:
    bins = make_bins(np.full(50, 9, np.int32), range(50), 16, packed=False)
    orders = [index_of(bins, seed=seed).locate(np.arange(50)).document.tolist() for seed in (1, 2)]
    assert orders[0] != orders[1]
    with pytest.raises(InvalidArgument, match="have no sample_index"):
        _ = index_of(bins).sample_index
    with pytest.raises(InvalidArgument, match="epochs must be at least 1"):
        index_of(bins, 0)
    with pytest.raises(InvalidArgument, match="one of truncate, split, skip, got 'fold'"):
        make_bins(np.full(5, 9, np.int32), range(5), 16, packed=True, long_documents="fold")  # type: ignore[arg-type]


def test_pieces_of_one_length_are_placed_in_the_order_of_documents() -> None:
    """However they lie among the others, so that bins do not depend on a sort's own order."""
    lengths = np.random.default_rng(3).choice([2, 5, 9], 5000)
    by_length = np.lexsort((np.arange(5000), -lengths))
    np.testing.assert_array_equal(
        best_fit(lengths, 16)[by_length], best_fit(lengths[by_length], 16)
    )
