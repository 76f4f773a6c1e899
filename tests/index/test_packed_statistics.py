"""Order ``packed``: which documents share a sample, and the order of samples, as in a fair draw.

Which lengths share a sample is the same in every epoch; which documents of these lengths do is
drawn anew. All keys are fixed, so a test passes or fails always. Bounds are quantiles of a normal
or chi-square distribution that a fair draw exceeds once in 100,000 times.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex.index.orders import packed
from megaindex.index.orders.framework import Memory
from megaindex.index.orders.packed import PackedIndex

SIZE = 16
NORMAL = 4.42  # two-sided quantile of 1 - 1e-5


def chi_square_limit(degrees: int) -> float:
    """Return the quantile of 1 - 1e-5, by the formula of Wilson and Hilferty."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + 4.265 * np.sqrt(part)) ** 3)


def index_of(lengths: Any, sequence_length: int = SIZE, seed: int = 1) -> PackedIndex:
    sizes = np.asarray(lengths, np.int32)
    memory = Memory()
    packed.build(sizes, packed.Cutting(sequence_length=sequence_length), None, memory)
    return PackedIndex(
        sequence_lengths=sizes,
        documents=range(sizes.size),
        tokens_per_epoch=int(sizes.sum(dtype=np.int64)),
        sequence_length=sequence_length,
        seed=seed,
        source_name="statistics",
        arrays=memory.arrays,
        max_documents=packed.most_documents(None, sequence_length),
        num_epochs=10**6,
        add_extra_token=0,
    )


def pairs_of(index: PackedIndex, epoch: int) -> np.ndarray:
    """Return the pairs of documents that share a sample, each as smaller * n + larger, sorted."""
    size, n = index.samples_per_epoch, index.sequence_lengths.size
    spans = index.locate(np.arange(epoch * size, (epoch + 1) * size))
    held = np.diff(spans.row_splits)
    place = np.arange(len(spans)) - np.repeat(spans.row_splits[:-1], held)
    found = []
    for apart in range(1, int(held.max())):
        first = np.flatnonzero(place + apart < np.repeat(held, held))
        one, other = spans.document[first], spans.document[first + apart]
        found.append(np.minimum(one, other) * n + np.maximum(one, other))
    return np.sort(np.concatenate(found))


def pairs_by_class(index: PackedIndex, pairs: np.ndarray) -> Counter[tuple[int, int]]:
    lengths = index.sequence_lengths
    classes = np.sort(np.stack([lengths[p] for p in np.divmod(pairs, lengths.size)]), axis=0)
    found, counts = np.unique(classes, axis=1, return_counts=True)
    return Counter({(a, b): n for (a, b), n in zip(found.T.tolist(), counts.tolist(), strict=True)})


def count_again(pairs: list[np.ndarray], lag: int) -> int:
    """Return the pairs of an epoch that are also pairs ``lag`` epochs later, summed."""
    both = zip(pairs, pairs[lag:], strict=False)
    return sum(np.intersect1d(one, other, assume_unique=True).size for one, other in both)


@pytest.mark.slow
@for_each("n", [2, 3, 40, 1000, 4095, 4096, 9000])
def test_two_lengths_meet_again_as_often_as_in_a_fair_draw(n: int) -> None:
    """n samples of 10 and 6 tokens: one pair on average is the same in two epochs."""
    index = index_of([10] * n + [6] * n)
    epochs = 1000 if n < 100 else 80
    pairs = [pairs_of(index, epoch) for epoch in range(epochs)]
    for lag in (1, 2, 7):
        # pairs that stay are the fixed points of a permutation: mean 1 and variance 1, from n = 2
        # on; those of overlapping pairs of epochs are not correlated
        trials = epochs - lag
        assert abs(count_again(pairs, lag) - trials) < NORMAL * np.sqrt(trials)


@pytest.mark.slow
@for_each("n", [4, 6, 50, 1000, 4094, 4096, 9000])
def test_one_length_meets_again_as_often_as_in_a_fair_draw(n: int) -> None:
    """n documents of 8 tokens in n / 2 samples: a pair is one of n * (n - 1) / 2."""
    index = index_of([8] * n)
    epochs = 1000 if n < 100 else 80
    again = count_again([pairs_of(index, epoch) for epoch in range(epochs + 1)], 1)
    expected = epochs * (n / 2) ** 2 / (n * (n - 1) / 2)
    variance = expected * 2  # at most: a matching of four documents stays whole or not at all
    assert abs(again - expected) < NORMAL * np.sqrt(variance)


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 100])
def test_every_pair_of_two_lengths_is_as_likely(n: int) -> None:
    """Chi-square of the partner of each document, over epochs; partners exclude each other."""
    index = index_of([10] * n + [6] * n)
    epochs = 40 * n
    met = np.zeros((n, n), np.int64)
    for epoch in range(epochs):
        one, other = np.divmod(pairs_of(index, epoch), 2 * n)
        met[one, other - n] += 1
    assert met.sum() == n * epochs
    # rows and columns have fixed sums, and the variance of a cell is larger by n / (n - 1)
    statistic = ((met - epochs / n) ** 2).sum() / (epochs / n) * (n - 1) / n
    assert statistic < chi_square_limit((n - 1) ** 2)
    assert (met > 0).all()


def test_many_lengths_meet_again_as_often_as_in_a_fair_draw() -> None:
    """Chi-square over pairs of lengths, of classes from few to thousands of documents.

    If m pairs of documents of lengths a and b share a sample, each does so again with probability
    m / (documents of a * documents of b).
    """
    rng = np.random.default_rng(3)
    lengths = np.concatenate([rng.integers(3, 30, 600), np.full(5000, 21), np.full(4500, 11),
                              np.full(900, 17), np.full(700, 9), [31, 31, 30]])  # fmt: skip
    index = index_of(rng.permutation(lengths), 32)
    held = Counter(lengths.tolist())
    epochs = 60
    pairs = [pairs_of(index, epoch) for epoch in range(epochs)]
    shared = pairs_by_class(index, pairs[0])
    assert all(pairs_by_class(index, p) == shared for p in pairs[:5])
    again: Counter[tuple[int, int]] = Counter()
    rounds = 0
    for lag in (1, 2, 3, 4):
        for one, other in zip(pairs, pairs[lag:], strict=False):
            both = np.intersect1d(one, other, assume_unique=True)
            again += pairs_by_class(index, both)
            rounds += 1
    statistic, degrees, rest, rest_expected = 0.0, 0, 0, 0.0
    for (a, b), m in shared.items():
        ways = held[a] * held[b] if a != b else held[a] * (held[a] - 1) // 2
        expected = rounds * m * m / ways
        if expected >= 10 and ways > 400:  # else pairs are so few that they are not independent
            statistic += (again[a, b] - expected) ** 2 / expected
            degrees += 1
        elif ways > 400:
            rest, rest_expected = rest + again[a, b], rest_expected + expected
    assert degrees >= 10
    assert rest_expected > 30
    assert statistic < chi_square_limit(degrees)
    assert abs(rest - rest_expected) < NORMAL * np.sqrt(rest_expected)
    assert sum(n >= 4096 for n in held.values()) == 2


@pytest.mark.parametrize("n", [60, 4095, 4096, 20_000])
def test_documents_come_at_any_place_of_the_next_epoch(n: int) -> None:
    """Chi-square of a table of 8 by 8: place in one epoch and in the next, in eighths."""
    index = index_of([10] * n + [6] * n)
    epochs = max(4, 60_000 // n)
    eighths = np.arange(n) * 8 // n
    places = []
    for epoch in range(epochs):
        spans = index.locate(np.arange(epoch * n, (epoch + 1) * n))
        where = np.empty(2 * n, np.int64)
        where[spans.document] = np.repeat(eighths, np.diff(spans.row_splits))
        places.append(where)
    for documents in (slice(0, n), slice(n, 2 * n)):
        table = np.zeros((8, 8), np.int64)
        for one, other in itertools.pairwise(places):
            np.add.at(table, (one[documents], other[documents]), 1)
        shares = np.bincount(eighths, minlength=8) / n
        expected = np.outer(shares, shares) * n * (epochs - 1)
        statistic = ((table - expected) ** 2 / expected).sum() * (n - 1) / n
        assert statistic < chi_square_limit(49)


def test_samples_come_in_another_order_in_every_epoch() -> None:
    """Displacements of bins of one document, which packing alone cannot tell apart."""
    n, epochs = 5000, 40
    index = index_of(np.full(n, SIZE))  # whole samples: bin k is document k in every epoch
    orders = np.stack([index.locate(np.arange(e * n, (e + 1) * n)).document for e in range(epochs)])
    assert (np.sort(orders, axis=1) == np.arange(n)).all()
    places = np.argsort(orders, axis=1)
    for lag in (1, 3):
        moved = np.bincount((places[lag:] - places[:-lag]).ravel() % n * 50 // n, minlength=50)
        expected = moved.sum() / 50
        assert ((moved - expected) ** 2 / expected).sum() < chi_square_limit(49)
    neighbours = np.diff(orders, axis=1)
    follow = np.count_nonzero(neighbours == 1)  # a document after the one before it: once an epoch
    assert abs(follow - epochs) < NORMAL * np.sqrt(epochs)
    correlation = np.corrcoef(places)[np.triu_indices(epochs, 1)] * np.sqrt(n - 1)
    assert (correlation**2).sum() < chi_square_limit(correlation.size)


def test_the_seed_decides_as_the_epoch_does() -> None:
    n = 3000
    pairs = [pairs_of(index_of([10] * n + [6] * n, seed=seed), 0) for seed in range(100)]
    assert abs(count_again(pairs, 1) - 99) < NORMAL * np.sqrt(99)
