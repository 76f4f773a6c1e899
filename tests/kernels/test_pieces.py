"""Whole documents packed by best-fit decreasing, on every backend."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import load
from megaindex.kernels.reference.packing import SKIP, SPLIT, STRIDE, TRUNCATE, permuted_rank

KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)
RULES = (TRUNCATE, SPLIT, SKIP)
lengths_of = st.lists(st.integers(0, 40) | st.sampled_from([0, 16, 17, 400]), max_size=90)


class Packed:
    """All arrays of a packed corpus, made by one backend."""

    def __init__(
        self, backend: Any, lengths: np.ndarray, capacity: int, rule: int, limit: int = 0
    ) -> None:
        self.backend, self.lengths, self.rule = backend, lengths, rule
        self.counts = backend.count_pieces(lengths, capacity, rule, 2)
        self.documents = np.empty(self.counts[:-1].sum(), np.int32)
        self.starts = np.empty(-(-lengths.size // STRIDE) + 1, np.int64)
        backend.sort_pieces(lengths, capacity, rule, self.counts, self.documents, self.starts, 2)
        self.layers, self.runs = backend.pack_pieces(self.counts, limit, 1, True)

    def spans(self, bins: Any, extra: int = 1, key: np.ndarray = KEY) -> Any:
        ends = np.concatenate(([0], np.cumsum(self.counts[:-1])))
        return self.backend.packed_spans(
            key, self.lengths, self.rule, extra, ends, self.documents, self.starts, self.layers,
            self.runs, np.asarray(bins, np.int64),
        )  # fmt: skip

    @property
    def num_bins(self) -> int:
        return int(self.runs[-1, 2])

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.counts, self.documents, self.starts, self.layers, self.runs]


def best_fit_decreasing(pieces: list[int], capacity: int, limit: int) -> list[tuple[int, int]]:
    """Return (room, pieces) of each bin, packed one piece at a time as in a textbook."""
    bins: list[tuple[int, int]] = []
    for piece in sorted(pieces, reverse=True):
        open_ = [b for b in bins if b[0] >= piece and (not limit or b[1] < limit)]
        if open_:
            room, held = min(open_) if limit else min(open_, key=lambda b: b[0])
            bins.remove((room, held))
        else:
            room, held = capacity, 0
        bins.append((room - piece, held + 1))
    return bins


def rooms_of(layers: np.ndarray, runs: np.ndarray, capacity: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for (layer, _, first), stop in zip(runs[:-1].tolist(), runs[1:, 2].tolist(), strict=True):
        room, held = capacity, 0
        while layer >= 0:
            below, _, length, each, _, _ = layers[layer].tolist()
            room, held, layer = room - length * each, held + each, below
        found += [(room, held)] * (stop - first)
    return found


@given(
    pieces=st.lists(st.integers(1, 24), max_size=120),
    capacity=st.integers(24, 60),
    limit=st.sampled_from([0, 0, 1, 2, 3, 7]),
    scale=st.sampled_from([1, 1, 70, 1001]),  # rooms then lie in words of a set that are apart
)
def test_bins_are_those_of_the_textbook(
    backend: Any, pieces: list[int], capacity: int, limit: int, scale: int
) -> None:
    pieces, capacity = [scale * piece - piece % 3 % scale for piece in pieces], scale * capacity
    counts = np.bincount(pieces, minlength=capacity + 1) if pieces else np.zeros(capacity + 1, int)
    layers, runs = backend.pack_pieces(counts.astype(np.int64), limit, 1, True)
    expected = best_fit_decreasing(pieces, capacity, limit)
    found = rooms_of(layers, runs, capacity)
    if not limit:  # which bin holds more pieces is then arbitrary
        expected, found = [(r, 0) for r, _ in expected], [(r, 0) for r, _ in found]
    assert sorted(found) == sorted(expected)


@given(lengths=lengths_of, capacity=st.integers(1, 24), rule=st.sampled_from(RULES),
       limit=st.sampled_from([0, 1, 3]), extra=st.integers(0, 1))  # fmt: skip
def test_every_token_is_in_one_bin(
    backend: Any, lengths: list[int], capacity: int, rule: int, limit: int, extra: int
) -> None:
    sizes = np.array(lengths, np.int32)
    packed = Packed(backend, sizes, capacity, rule, limit)
    document, offset, length, splits = packed.spans(np.arange(packed.num_bins), extra)
    seen = Counter[tuple[int, int]]()
    for d, o, n in zip(document.tolist(), offset.tolist(), length.tolist(), strict=True):
        goes_on = n > capacity
        assert not goes_on or (extra and o + n <= sizes[d])
        seen.update((d, o + i) for i in range(n - goes_on))
    used = {SPLIT: sizes, TRUNCATE: np.minimum(sizes, capacity),
            SKIP: np.where(sizes > capacity, 0, sizes)}[rule]  # fmt: skip
    expected = [(d, t) for d, n in enumerate(used.tolist()) for t in range(n)]
    assert seen == Counter(expected)
    for first, stop in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True):
        inputs = np.minimum(length[first:stop], capacity)
        assert 1 <= inputs.sum() <= capacity
        assert (np.diff(inputs) <= 0).all(), "longer pieces come first"
        assert not limit or stop - first <= limit
    # a whole sample reads the label of its last token where its document goes on
    reads_more = [n > capacity for n in length.tolist()]
    assert reads_more == [
        bool(extra) and n >= capacity and o + capacity < sizes[d]
        for d, o, n in zip(document.tolist(), offset.tolist(), length.tolist(), strict=True)
    ]


@given(lengths=lengths_of, capacity=st.integers(1, 24), rule=st.sampled_from(RULES),
       limit=st.sampled_from([0, 2]), seed=st.integers(0, 2**32))  # fmt: skip
def test_every_backend_packs_as_the_reference(
    backend: Any, lengths: list[int], capacity: int, rule: int, limit: int, seed: int
) -> None:
    sizes = np.array(lengths, np.int32)
    key = np.random.default_rng(seed).integers(0, 2**64, 2, np.uint64)
    ours = Packed(backend, sizes, capacity, rule, limit)
    theirs = Packed(load("reference"), sizes, capacity, rule, limit)
    for array, expected in zip(ours.arrays, theirs.arrays, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    bins = np.random.default_rng(seed).permutation(ours.num_bins)
    for array, expected in zip(ours.spans(bins, key=key), theirs.spans(bins, key=key), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@functools.cache
def permuted_ranks(count: int) -> list[int]:
    return [permuted_rank(KEY, 5, count, rank) for rank in range(0, count, 211)]


@pytest.mark.slow_cases("reference")
@for_each("count", [4095, 4097])
def test_many_documents_of_a_length(backend: Any, count: int) -> None:
    """From 4096 pieces on, another permutation orders them."""
    packed = Packed(backend, np.full(count, 5, np.int32), 8, SPLIT)
    document, offset, length, _ = packed.spans(np.arange(count))
    assert sorted(document.tolist()) == list(range(count))
    assert (offset == 0).all()
    assert (length == 5).all()
    np.testing.assert_array_equal(document[::211], permuted_ranks(count))


def test_a_large_corpus_does_not_depend_on_threads() -> None:
    native = load("native")
    lengths = np.random.default_rng(0).lognormal(5, 1.5, 300_000).astype(np.int32)
    one, two = (native.count_pieces(lengths, 512, SPLIT, threads) for threads in (1, 5))
    np.testing.assert_array_equal(one, two)
    results = []
    for threads in (1, 5):
        documents = np.empty(one[:-1].sum(), np.int32)
        starts = np.empty(-(-lengths.size // STRIDE) + 1, np.int64)
        native.sort_pieces(lengths, 512, SPLIT, one, documents, starts, threads)
        results.append((documents, starts))
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)
    rest = lengths % 512
    np.testing.assert_array_equal(
        results[0][0], np.argsort(rest, kind="stable")[np.count_nonzero(rest == 0) :]
    )


def test_a_written_down_case(backend: Any) -> None:
    counts = np.bincount([5, 3, 3, 2], minlength=9)
    layers, runs = backend.pack_pieces(counts, 0, 1, True)
    assert layers.tolist() == [
        [-1, 0, 5, 1, 0, 1], [0, 0, 3, 1, 0, 1], [-1, 0, 3, 1, 1, 1], [2, 0, 2, 1, 0, 1],
    ]  # fmt: skip
    assert runs.tolist() == [[1, 0, 0], [3, 0, 1], [4, 0, 2]]


def test_pieces_of_equal_length_are_placed_one_by_one_or_together(backend: Any) -> None:
    """Three pieces of 2 beside three of 6 in bins of 10, (room, pieces) of each bin; a new bin
    takes several in both cases."""
    counts, alone = np.bincount([6] * 3 + [2] * 3, minlength=11), np.bincount([3] * 7, minlength=11)
    for stacked, expected in ((True, [(0, 3), (2, 2), (4, 1)]), (False, [(2, 2)] * 3)):
        assert sorted(rooms_of(*backend.pack_pieces(counts, 0, 1, stacked), 10)) == expected
        assert sorted(rooms_of(*backend.pack_pieces(alone, 0, 1, stacked), 10)) == [
            (1, 3), (1, 3), (7, 1)
        ]  # fmt: skip


@for_each(("least_room", "expected"), [(2, [(0, 2)]), (3, [(2, 1), (8, 1)])])
def test_a_bin_with_less_than_the_least_room_is_full(
    backend: Any, least_room: int, expected: list[tuple[int, int]]
) -> None:
    layers, runs = backend.pack_pieces(np.bincount([8, 2], minlength=11), 0, least_room, True)
    assert sorted(rooms_of(layers, runs, 10)) == expected


def test_permutations_of_few_are_uniform() -> None:
    """Chi-square of all orders of 2, 3 and 4 documents of a length, over 6,000 keys."""
    keys = np.random.default_rng(5).integers(0, 2**64, (6000, 2), np.uint64)
    native = load("native")
    for n, limit in ((2, 11.0), (3, 20.6), (4, 49.8)):  # quantiles of 0.999
        packed = Packed(native, np.full(n, 5, np.int32), 8, SPLIT)
        orders = Counter(tuple(packed.spans(np.arange(n), key=key)[0].tolist()) for key in keys)
        expected = len(keys) / np.prod(np.arange(1, n + 1))
        assert len(orders) == np.prod(np.arange(1, n + 1))
        assert sum((c - expected) ** 2 / expected for c in orders.values()) < limit


@for_each("n", [37, 1000, 4095])
def test_mates_are_those_of_a_fair_draw(n: int) -> None:
    """Pairs of neighbouring ranks: the difference of their places is as likely as any other."""
    native = load("native")
    packed = Packed(native, np.full(n, 5, np.int32), 8, SPLIT)
    differences = []
    for seed in range(max(8, 40_000 // n)):
        key = np.random.default_rng(seed).integers(0, 2**64, 2, np.uint64)
        place = packed.spans(np.arange(n), key=key)[0]
        assert np.array_equal(np.sort(place), np.arange(n))
        differences.append((np.roll(place, 1) - place) % n)
    found = np.bincount(np.concatenate(differences), minlength=n)[1:]
    expected = found.sum() / (n - 1)
    score = (((found - expected) ** 2 / expected).sum() - (n - 1)) / np.sqrt(2 * (n - 1))
    assert abs(score) < 4.5


@for_each(
    ("change", "message"),
    [
        ({"layers": (0, 0, 1)}, "belong together"),
        ({"layers": (0, 3, 0)}, "belong together"),
        ({"layers": (0, 3, 2**62)}, "belong together"),
        ({"layers": (0, 4, 2**62)}, "belong together"),
        ({"layers": (0, 2, 99)}, "belong together"),
        ({"layers": (2, 2, 5)}, "belong together"),  # above one of 5, in bins of 8
        ({"runs": (0, 0, 99)}, "belong together"),
        ({"runs": (0, 1, -5)}, "belong together"),
        ({"layers": (2, 1, 2**63 - 1)}, "belong together"),
        ({"layers": (1, 4, -(2**63))}, "belong together"),
        ({"runs": (1, 1, 2**63 - 1)}, "belong together"),
        ({"documents": 2**31 - 1}, "belong together"),
        ({"starts": 5}, "belong together"),
        ({"bin": -1}, "bin -1 of"),
        ({"bin": 10**6}, "bin 1000000 of"),
        ({"bin": 9}, "bin 9 of 9"),  # the first behind the last
    ],
)  # fmt: skip
def test_arrays_that_do_not_belong_together(
    compiled: Any, change: dict[str, Any], message: str
) -> None:
    """The reference trusts its arrays."""
    packed = Packed(compiled, np.array([5, 3, 3, 2, 17, 40], np.int32), 8, SPLIT)
    bins = np.arange(packed.num_bins)
    for name, value in change.items():
        if name in ("layers", "runs"):
            getattr(packed, name)[value[0], value[1]] = value[2]
        elif name == "bin":
            bins[0] = value
        elif name == "documents":
            packed.documents[:] = value
        else:
            packed.starts[:] = value
    with pytest.raises(InvalidArgument, match=message):
        packed.spans(bins)


@for_each(
    "call",
    [
        lambda b: b.count_pieces(np.array([3, -1], np.int32), 8, SPLIT),
        lambda b: b.count_pieces(np.array([3], np.int32), 0, SPLIT),
        lambda b: b.count_pieces(np.array([3], np.int32), 2**24 + 1, SPLIT),
        lambda b: b.count_pieces(np.array([3], np.int32), 8, 3),
        lambda b: b.pack_pieces(np.array([1, 1]), 0, 1, True),
        lambda b: b.pack_pieces(np.array([0, -1]), 0, 1, True),
        lambda b: b.pack_pieces(np.array([0, 2**62]), 0, 1, True),
        lambda b: b.pack_pieces(np.array([0, 1]), -1, 1, True),
        lambda b: b.pack_pieces(np.array([0, 1]), 0, 0, True),
        lambda b: b.sort_pieces(
            np.array([3], np.int32), 8, SPLIT, np.zeros(9, np.int64), np.empty(0, np.int32),
            np.empty(2, np.int64),
        ),
        lambda b: b.sort_pieces(
            np.array([3], np.int32), 8, SPLIT, np.bincount([3], minlength=9), np.empty(2, np.int32),
            np.empty(2, np.int64),
        ),
        lambda b: b.sort_pieces(
            np.array([3], np.int32), 8, SPLIT, np.bincount([3], minlength=9), np.empty(1, np.int32),
            np.empty(1, np.int64),
        ),
    ],
)  # fmt: skip
def test_bad_arguments(backend: Any, call: Any) -> None:
    with pytest.raises(InvalidArgument):
        call(backend)
