"""Runs of tokens: equal to brute force on every backend, and damaged input refused."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.arithmetic import samples_in
from megaindex.errors import InvalidArgument
from megaindex.kernels import load

KEY = np.array([7, 11], np.uint64)
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40)
native_only = pytest.mark.skipif(
    os.environ.get("MEGAINDEX_NO_NATIVE") == "1", reason="without the native core"
)


def unaligned(array: np.ndarray) -> np.ndarray:
    """The same values at an odd address, as the .idx format has them."""
    raw = np.empty(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype) if array.size else array
    view[:] = array
    return view


def token_lists(spans: Any, begin_of: np.ndarray) -> list[list[int]]:
    """Per request, its tokens as numbers counted through all sequences."""
    document, offset, length, splits = spans
    assert all(part.dtype == np.int64 for part in spans)
    assert splits[0] == 0
    assert splits[-1] == document.size == offset.size == length.size
    assert (length > 0).all()
    begins = (begin_of[document] + offset).tolist()
    runs = [list(range(b, b + n)) for b, n in zip(begins, length.tolist(), strict=True)]
    return [list(itertools.chain(*runs[a:b])) for a, b in itertools.pairwise(splits.tolist())]


def assert_equal(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def begins(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


# ---- the three arrays --------------------------------------------------------------------------


def arrays(lengths: np.ndarray, epochs: int, S: int, extra: int, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    documents = rng.permutation(np.tile(np.arange(lengths.size, dtype=np.int32), epochs))
    tokens = int(lengths[documents].sum())
    count = samples_in(tokens, S, extra)
    rows = np.empty((count + 1, 2), np.int32)
    load("reference").cut_samples(lengths, documents, S, extra, count, tokens, rows)
    return rng.permutation(count).astype(np.uint32), rows, documents


@given(
    lengths=LENGTHS,
    epochs=st.integers(1, 4),
    S=st.integers(1, 30),
    extra=st.integers(0, 1),
    seed=st.integers(0, 99),
    wide=st.tuples(st.booleans(), st.booleans()),
    left_out=st.sampled_from([None, 0, 2, 40]),
)
def test_samples_of_arrays_are_stretches_of_the_concatenated_documents(
    backend: Any,
    lengths: list[int],
    epochs: int,
    S: int,
    extra: int,
    seed: int,
    wide: tuple[bool, bool],
    left_out: int | None,
) -> None:
    sizes = np.array(lengths, np.int32)
    shuffle, rows, documents = arrays(sizes, epochs, S, extra, seed)
    if left_out is not None:  # in the order of cutting, with gaps
        shuffle = np.sort(shuffle)[:: left_out + 1].copy()
    stream = [t for d in documents for t in range(begins(sizes)[d], begins(sizes)[d + 1])]
    given_arrays = shuffle.astype(np.int64) if wide[0] else shuffle
    given_rows = rows.astype(np.int64) if wide[1] else rows
    ids = np.random.default_rng(seed).integers(0, max(1, shuffle.size), 3 * shuffle.size)
    ids = ids if left_out is None else np.arange(shuffle.size)
    spans = backend.array_spans(given_arrays, given_rows, documents, unaligned(sizes), extra, ids)
    expected = [stream[S * s : S * s + S + extra] for s in shuffle[ids].tolist()]
    assert token_lists(spans, begins(sizes)) == expected
    assert_equal(spans, load("reference").array_spans(shuffle, rows, documents, sizes, extra, ids))


@for_each("ids", [[0, 2, 1, 3], [0, 1, 1, 3], [3, 2, 1, 0], [1, 2, 3, 4]])
def test_samples_that_seem_to_follow_each_other(backend: Any, ids: list[int]) -> None:
    """By their first and last."""
    lengths = np.random.default_rng(2).integers(1, 9, 50).astype(np.int32)
    _, rows, documents = arrays(lengths, 1, 10, 1, 2)
    shuffle = np.arange(rows.shape[0] - 1, dtype=np.uint32)
    found = backend.array_spans(shuffle, rows, documents, lengths, 1, np.array(ids))
    stream = np.concatenate(
        [np.arange(begins(lengths)[d], begins(lengths)[d + 1]) for d in documents]
    )
    expected = [stream[10 * s : 10 * s + 11].tolist() for s in ids]
    assert token_lists(found, begins(lengths)) == expected


def test_many_samples_of_many_documents(backend: Any) -> None:
    """More than are looked up together, and documents that are asked for late."""
    lengths = np.random.default_rng(1).integers(0, 9, 3000).astype(np.int32)
    shuffle, rows, documents = arrays(lengths, 1, 300, 1, 1)
    stream = np.concatenate(
        [np.arange(begins(lengths)[d], begins(lengths)[d + 1]) for d in documents]
    )
    ids = np.tile(np.arange(shuffle.size), 6)
    found = token_lists(
        backend.array_spans(shuffle, rows, documents, lengths, 1, ids), begins(lengths)
    )
    assert len(found) == ids.size > 200
    for sample, tokens in zip(shuffle[ids].tolist(), found, strict=True):
        assert tokens == stream[300 * sample : 300 * sample + 301].tolist()


@for_each(
    ("name", "value"),
    [
        ("ids", 3), ("ids", -1), ("ids", 2**62), ("shuffle", 3), ("shuffle", 2**32 - 1),
        ("first", -1), ("first", 3), ("last", 7), ("last", 0), ("last", 2**31 - 1),
        ("begin", -1), ("begin", 6), ("end", 7), ("end", -2), ("end", 2**31 - 1),
        ("document", 7), ("document", -1), ("lengths", -3), ("lengths", 0),
    ],
)  # fmt: skip
@for_each("wide", [False, True])
def test_damaged_arrays_are_refused(backend: Any, name: str, value: int, wide: bool) -> None:
    # five documents of five tokens; sample 1 reads 8 tokens from position 1, offset 1
    cell = np.int64 if wide else np.int32
    a = {
        "shuffle": np.array([0, 1, 2], np.uint32),
        "rows": np.array([[0, 0], [1, 1], [2, 4], [3, 4]], cell),
        "documents": np.arange(5, dtype=np.int32),
        "lengths": np.full(5, 5, np.int32),
        "ids": np.array([0, 1]),
    }

    def find() -> Any:
        return backend.array_spans(
            a["shuffle"], a["rows"], a["documents"], a["lengths"], 1, a["ids"]
        )

    assert [part.tolist() for part in find()] == [
        [0, 1, 1, 2], [0, 0, 1, 0], [5, 2, 4, 5], [0, 2, 4]
    ]  # fmt: skip
    cells = {"first": (1, 0), "begin": (1, 1), "last": (2, 0), "end": (2, 1)}
    if name in cells:
        a["rows"][cells[name]] = value
    else:
        a["documents" if name == "document" else name][1] = value
    if name == "first" and value == 3:
        a["ids"] = np.array([1])  # sample 0 reads on to the damaged row
    with pytest.raises(InvalidArgument):
        find()


def test_arrays_without_a_sample_hold_none(backend: Any) -> None:
    rows, nothing = np.zeros((1, 2), np.int32), np.zeros(0, np.uint32)
    lengths = np.array([3], np.int32)
    documents = np.zeros(1, np.int32)
    spans = backend.array_spans(nothing, rows, documents, lengths, 1, np.zeros(0, np.int64))
    assert [part.tolist() for part in spans] == [[], [], [], [0]]
    with pytest.raises(InvalidArgument, match="sample 0 of 0 samples"):
        backend.array_spans(nothing, rows, documents, lengths, 1, np.zeros(1, np.int64))


# ---- windows -----------------------------------------------------------------------------------


@given(
    lengths=LENGTHS.filter(any),
    size=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 999),
    in_order=st.booleans(),
    width=st.integers(1, 60),
)
def test_windows_are_stretches_of_the_file(
    backend: Any, lengths: list[int], size: int, seed: int, in_order: bool, width: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int32)
    first = int(rng.integers(0, np.flatnonzero(sizes)[-1] + 1))
    low, high = int(begins(sizes)[first]), int(begins(sizes)[-1])
    begin = rng.integers(low, high, 50)
    end = np.minimum(begin + rng.integers(1, width + 1, 50), high)
    if in_order:
        begin.sort()
        end = np.minimum(begin + width, high)
    pointers = unaligned(begins(sizes)[:-1] * size)
    args = (pointers, unaligned(sizes), size, first, sizes.size, begin, end)
    spans = backend.window_spans(*args)
    expected = [list(range(b, e)) for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
    assert token_lists(spans, begins(sizes)) == expected
    assert (spans[0] >= first).all()
    assert_equal(spans, load("reference").window_spans(*args))


@for_each("many", [1, 40])
@for_each(
    "pointers",
    [
        [0, 20, 60, 40],
        [0, 20, 38, 60],
        [0, 20, 41, 60],
        [0, 0, 0, 60],
        [0, 20, 44, 64],
        [2, 20, 40, 60],
    ],
)
def test_sequences_that_do_not_follow_each_other_are_refused(
    backend: Any, pointers: list[int], many: int
) -> None:
    lengths = np.full(4, 10, np.int32)
    begin, end = np.zeros(many, np.int64), np.full(many, 40)
    fine = backend.window_spans(np.arange(4) * 20, lengths, 2, 0, 4, begin, end)
    assert fine[2].tolist() == [10] * 4 * many
    with pytest.raises(InvalidArgument, match="the next one does not begin there"):
        backend.window_spans(np.array(pointers), lengths, 2, 0, 4, begin, end)


def test_a_window_beyond_the_last_sequence_is_refused(backend: Any) -> None:
    lengths = np.full(4, 10, np.int32)
    for stop in (3, 4):
        with pytest.raises(InvalidArgument, match="the next one does not begin there"):
            backend.window_spans(
                np.arange(4) * 20, lengths, 2, 0, stop, np.array([5]), np.array([10 * stop + 1])
            )


# ---- passes ------------------------------------------------------------------------------------


@given(
    lengths=LENGTHS.filter(any),
    copies=st.integers(1, 3),
    stride=st.sampled_from([1, 2, 7, 64]),
    width=st.integers(1, 60),
    order=st.sampled_from(["sorted", "side by side", "any"]),
    seed=st.integers(0, 99),
)
def test_stretches_of_a_pass_in_any_order(
    backend: Any, lengths: list[int], copies: int, stride: int, width: int, order: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int32)
    total = copies * int(sizes.sum())
    starts = np.empty(-(-copies * sizes.size // stride) + 1, np.int64)
    load("reference").epoch_starts(KEY, sizes, copies, stride, starts)
    begin = rng.integers(0, total, 90)
    if order == "sorted":
        begin.sort()
    elif order == "side by side":
        begin = np.arange(0, total, width)
    end = np.minimum(begin + width + 1, total)
    args = (KEY, unaligned(sizes), copies, stride, starts, begin, end)
    spans = backend.epoch_spans(*args)
    positions = np.arange(copies * sizes.size)
    passed = load("reference").bijection_apply(KEY, positions.size, positions) % sizes.size
    stream = [t for d in passed for t in range(begins(sizes)[d], begins(sizes)[d + 1])]
    expected = [stream[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
    assert token_lists(spans, begins(sizes)) == expected
    assert_equal(spans, load("reference").epoch_spans(*args))


@functools.cache
def starts_of(sizes: tuple[int, ...], stride: int) -> np.ndarray:
    starts = np.empty(-(-len(sizes) // stride) + 1, np.int64)
    load("reference").epoch_starts(KEY, np.array(sizes, np.int32), 1, stride, starts)
    return starts


@functools.cache
def specified(n: int) -> np.ndarray:
    return load("reference").bijection_apply(KEY, n, np.arange(n))


@pytest.mark.slow_cases("reference")
@for_each(
    ("kept", "swapped"), [(1.0, False), (0.7, False), (0.1, False), (0.01, False), (1.0, True)]
)
@for_each("stride", [7, 64, 300])
def test_successive_stretches_are_those_found_one_by_one(
    backend: Any, stride: int, kept: float, swapped: bool
) -> None:
    """Those that are swapped begin behind the one before the last, but before the last."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(0, 40, 2000).astype(np.int32)
    sizes[::50] *= 9
    starts = starts_of(tuple(sizes.tolist()), stride)
    begin = np.arange(17, starts[-1] - 30, 29)
    begin = begin[rng.random(begin.size) < kept]
    if swapped:
        begin = begin[-602:]
        begin[2:] = begin[2:].reshape(-1, 2)[:, ::-1].reshape(-1)
    args = (KEY, unaligned(sizes), 1, stride, starts)
    spans = backend.epoch_spans(*args, begin, begin + 30)
    for k in range(0, begin.size, 397):
        alone = backend.epoch_spans(*args, begin[k : k + 1], begin[k : k + 1] + 30)
        row = slice(spans[3][k], spans[3][k + 1])
        assert_equal([column[row] for column in spans[:3]], alone[:3])
    assert spans[3].size == begin.size + 1
    np.testing.assert_array_equal(np.add.reduceat(spans[2], spans[3][:-1]), 30)


@for_each("n", [1, 2, 100, 4095, 4096, 4097, 5000])
def test_inverse_ranges_undo_ranges(backend: Any, n: int) -> None:
    there = specified(n)
    for begin, count, dtype in (
        (0, n, np.int32), (n // 3, n - n // 3, np.int64),
        (n // 2, 0, np.int32), (n // 2, 0, np.int64),
    ):  # fmt: skip
        out = np.empty(count, dtype)
        backend.bijection_inverse_range(KEY, n, begin, out)
        np.testing.assert_array_equal(there[out], np.arange(begin, begin + count))


@given(
    lengths=st.lists(st.integers(0, 50), max_size=40),
    item_size=st.sampled_from([1, 2, 4, 8]),
    room=st.integers(-3, 3),
    damage=st.sampled_from(["none", "negative length", "negative", "beyond", "inside", "wraps"]),
    at=st.integers(0, 39),
)
def test_sequences_lie_in_the_bin_or_not(
    backend: Any, lengths: list[int], item_size: int, room: int, damage: str, at: int
) -> None:
    sizes = np.array(lengths, np.int32)
    pointers = begins(sizes).astype(np.int64)[: sizes.size] * item_size
    nbytes = max(0, sum(lengths) * item_size + room)
    fits = all(p + n * item_size <= nbytes for p, n in zip(pointers.tolist(), lengths, strict=True))
    if sizes.size and damage != "none":
        at %= sizes.size
        wrong = {
            "negative": -8,
            "beyond": nbytes + 8,
            "inside": pointers[at] + 1,
            "wraps": 2**63 - 8,
        }
        if damage == "negative length":
            sizes[at] = -1
        else:
            pointers[at] = wrong[damage]
        fits = fits and damage == "inside" and item_size == 1
        fits = fits and pointers[at] + lengths[at] <= nbytes
    expected = sum(lengths) if fits else -1
    arrays = unaligned(pointers), unaligned(sizes)
    assert backend.tokens_within(*arrays, item_size, nbytes) == expected


# ---- the native core ---------------------------------------------------------------------------


@native_only
@for_each("stride", [7, 32, 64])
@for_each("requests", [1, 90])
def test_a_damaged_table_of_a_pass_is_not_read_across_its_rows(stride: int, requests: int) -> None:
    """A page of a cached table that a disk lost; few requests are found one by one."""
    sizes = np.random.default_rng(3).integers(1, 40, 500).astype(np.int32)
    starts = np.empty(-(-sizes.size // stride) + 1, np.int64)
    load("reference").epoch_starts(KEY, sizes, 1, stride, starts)
    begin, end = np.full(requests, starts[1]), np.full(requests, starts[3])
    begin[0], end[0] = begin[0] - 5, end[0] + 5
    whole = load("native").epoch_spans(KEY, sizes, 1, stride, starts, begin, end)
    assert whole[2].sum() == (end - begin).sum()
    for wrong in (-3, 3):
        damaged = starts.copy()
        damaged[2] += wrong
        with pytest.raises(InvalidArgument, match="starts: must be those of these lengths"):
            load("native").epoch_spans(KEY, sizes, 1, stride, damaged, begin, end)


@native_only
def test_the_native_core_refuses_what_it_cannot_use() -> None:
    native, lengths = load("native"), np.array([3, 4], np.int32)
    rows, shuffle = np.array([[0, 0], [1, 1]], np.int32), np.zeros(1, np.uint32)
    documents, ids = np.arange(2, dtype=np.int32), np.zeros(1, np.int64)
    fine: list[Any] = [shuffle, rows, documents, lengths, 1, ids]
    assert native.array_spans(*fine)[2].tolist() == [3, 2]
    for place, wrong, message in (
        (0, shuffle.astype(np.int32), "shuffle_index: expected"),
        (1, rows[:, :1].copy(), "sample_index: expected rows"),
        (1, rows.astype(np.uint32), "sample_index: expected"),
        (2, documents.astype(np.int64), "document_index: expected"),
        (3, lengths[:0], "at least one sequence"),
        (4, 2, "extra"),
        (5, ids.astype(np.int32), "sample_ids: expected"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            native.array_spans(*fine[:place], wrong, *fine[place + 1 :])
    pointers, one = np.array([0, 6]), np.ones(1, np.int64)
    fine = [pointers, lengths, 2, 0, 2, one, 5 * one]
    assert native.window_spans(*fine)[2].tolist() == [2, 2]
    for place, wrong, message in (
        (0, pointers[:1], "must name sequences"),
        (2, 3, "item_size"),
        (3, -1, "must name sequences"),
        (4, 3, "must name sequences"),
        (5, 5 * one, "begin < end"),
        (5, -one, "0 <= begin"),
        (6, np.array([2**62]), "begin < end < "),
        (6, np.array([5, 6]), "must have equal lengths"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            native.window_spans(*fine[:place], wrong, *fine[place + 1 :])
    with pytest.raises(InvalidArgument, match="must be those of these lengths"):
        native.epoch_spans(KEY, lengths, 1, 1, np.array([0, 5, 9]), one, 9 * one)


@native_only
def test_runs_outlive_and_do_not_share_memory() -> None:
    """Columns are used again only when nothing refers to them."""
    native = load("native")
    pointers, lengths = np.arange(3000) * 2, np.ones(3000, np.int32)
    held = []
    for k in range(60):
        begin = np.arange(k, 2000 + k)
        held.append(
            (k, native.window_spans(pointers, lengths, 2, 0, 3000, begin, begin + 1 + k % 5))
        )
        if k % 3 == 0:
            held.pop(k % len(held))
    for k, (sequence, _, length, splits) in held:
        width = 1 + k % 5
        assert (length == 1).all()
        assert splits.tolist() == list(range(0, 2000 * width + 1, width))
        assert sequence[::width].tolist() == list(range(k, 2000 + k))
