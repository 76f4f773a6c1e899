"""sample_index on every backend, against megatron-core's compiled helpers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.arithmetic import samples_in
from megaindex.errors import InvalidArgument
from megaindex.kernels import load


def cut(
    backend: Any,
    lengths: np.ndarray,
    documents: np.ndarray,
    S: int,
    *,
    extra: int = 1,
    drop: bool = True,
    dtype: type = np.int32,
    threads: int = 1,
) -> np.ndarray:
    tokens = int(lengths[documents].sum(dtype=np.int64))
    num_samples = samples_in(tokens, S, extra, drop_last_partial=drop)
    out = np.full((num_samples + 1, 2), -7, dtype)
    backend.cut_samples(lengths, documents, S, extra, num_samples, tokens, out, threads)
    return out


@st.composite
def corpora(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    S = draw(st.integers(2, 9))
    near = st.sampled_from([0, 1, S - 1, S, S + 1, 2 * S, 5 * S + 1])
    lengths = draw(st.lists(near | st.integers(0, 40), min_size=1, max_size=12))
    documents = draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=40))
    return np.array(lengths, np.int32), np.array(documents, np.int32), S


@given(corpus=corpora(), extra=st.sampled_from([0, 1]), wide=st.booleans(), drop=st.booleans())
def test_rows_are_megatrons(
    backend: Any,
    megatron_helpers: ModuleType,
    corpus: tuple[np.ndarray, np.ndarray, int],
    extra: int,
    wide: bool,
    drop: bool,
) -> None:
    lengths, documents, S = corpus
    tokens = int(lengths[documents].sum(dtype=np.int64))
    if tokens <= extra:
        return  # the peer reads past its arrays: covered below
    peer = (
        megatron_helpers.build_sample_idx_int64 if wide else megatron_helpers.build_sample_idx_int32
    )
    expected = peer(lengths, documents, S, 1, tokens, drop, extra)
    actual = cut(
        backend, lengths, documents, S, extra=extra, drop=drop,
        dtype=np.int64 if wide else np.int32,
    )  # fmt: skip
    assert actual.dtype == expected.dtype
    if not drop and extra == 1 and expected[-1, 1] == -1:
        # Trailing empty documents: the peer's last row points before one's start, and its own
        # wrapper then fails an assertion. Ours names the last token there is.
        d, offset = actual[-1]
        assert offset == lengths[documents[d]] - 1 >= 0
        assert not lengths[documents[d + 1 :]].any()
        actual, expected = actual[:-1], expected[:-1]
    np.testing.assert_array_equal(actual, expected)


@for_each("lengths", [[1], [5], [0, 0, 9], [9, 0, 0], [4, 0], [4, 0, 0], [3, 0, 4]])
@for_each("extra", [0, 1])
def test_few_documents(backend: Any, lengths: list[int], extra: int) -> None:
    sizes = np.array(lengths, np.int32)
    documents = np.arange(sizes.size, dtype=np.int32)
    for drop in (True, False):
        rows = cut(backend, sizes, documents, 2, extra=extra, drop=drop)
        tokens = [(d, i) for d, n in enumerate(lengths) for i in range(n)]
        for k, (d, offset) in enumerate(rows[1:].tolist(), start=1):
            # the last token of sample k-1, or one past it if none is shared
            owner, position = tokens[min(k * 2 + extra, len(tokens)) - 1]
            at_the_end = (d, offset) == (sizes.size - 1, 0)  # past it, among empty documents
            assert (d, offset) == (owner, position + 1 - extra) or (extra == 0 and at_the_end)


@pytest.mark.slow
@for_each("mean", [3, 700, 60_000])
def test_threads_do_not_change_a_row(mean: int) -> None:
    rng = np.random.default_rng(20260101)
    lengths = rng.integers(0, 2 * mean, 50_000).astype(np.int32)
    epochs = 10 if mean < 1000 else 2
    documents = rng.permutation(np.tile(np.arange(50_000, dtype=np.int32), epochs))
    native = load("native")
    for extra in (0, 1):
        for drop in (True, False):
            one = cut(native, lengths, documents, 2048, extra=extra, drop=drop)
            for threads in (2, 3, 7) if drop == bool(extra) else (3,):
                many = cut(
                    native, lengths, documents, 2048, extra=extra, drop=drop, threads=threads
                )
                np.testing.assert_array_equal(many, one, f"{threads=}, {extra=}, {drop=}")
    numba = cut(load("numba"), lengths, documents, 2048)
    np.testing.assert_array_equal(cut(native, lengths, documents, 2048), numba)


def test_lengths_looked_up_in_short_form_are_the_same(rng: np.random.Generator) -> None:
    """Above a million lengths, each read several times, 16 bits a length are read instead of 32."""
    count = 2**20 + 1
    lengths = rng.integers(0, 9, count).astype(np.int32)
    lengths[rng.integers(0, count, 50)] = [65_534, 65_535, 65_536, 2**24, 70_000] * 10
    documents = rng.integers(0, count, 3 * count).astype(np.int32)
    part = np.concatenate((np.flatnonzero(lengths > 9).astype(np.int32), documents[:9000]))
    expected = cut(load("reference"), lengths, part, 4096)
    np.testing.assert_array_equal(cut(load("numba"), lengths, part, 4096), expected)
    rows = cut(load("numba"), lengths, documents, 4096)
    damaged = lengths.copy()
    damaged[documents[-1]] = -5
    out = np.empty_like(rows)
    for threads in (1, 2, 3):
        found = cut(load("native"), lengths, documents, 4096, threads=threads)
        np.testing.assert_array_equal(found, rows, f"{threads=}")
        with pytest.raises(InvalidArgument, match="a length is negative"):
            load("native").cut_samples(
                damaged, documents, 4096, 1, len(rows) - 1, 4096 * len(rows), out, threads
            )


@for_each("threads", [1, 2, 5])
def test_more_tokens_than_counted_are_cut_from_the_front(threads: int) -> None:
    """Megatron is told tokens_per_epoch; documents beyond that are left alone."""
    lengths = np.full(400_000, 10, np.int32)
    documents = np.arange(400_000, dtype=np.int32)
    out = np.empty((101, 2), np.int32)
    load("native").cut_samples(lengths, documents, 8, 1, 100, 801, out, threads)
    expected = np.empty_like(out)
    load("reference").cut_samples(lengths, documents[:1000], 8, 1, 100, 801, expected)
    np.testing.assert_array_equal(out, expected)


@for_each("threads", [1, 2, 3, 5])
@for_each("beyond", [1, 8_000])
def test_fewer_tokens_than_counted_are_cut_from_the_front(threads: int, beyond: int) -> None:
    """Or refused, if the samples need the others: ends that do not meet are not left so."""
    lengths = np.full(400_000, 10, np.int32)
    documents, total = np.arange(400_000, dtype=np.int32), 4_000_000 + beyond
    native, out = load("native"), np.empty((101, 2), np.int32)
    native.cut_samples(lengths, documents, 8, 1, 100, total, out, threads)
    expected = np.empty_like(out)
    load("reference").cut_samples(lengths, documents[:1000], 8, 1, 100, 801, expected)
    np.testing.assert_array_equal(out, expected)
    out = np.empty((samples_in(total, 8) + 1, 2), np.int32)
    with pytest.raises(InvalidArgument, match="fewer tokens than"):
        native.cut_samples(lengths, documents, 8, 1, len(out) - 1, total, out, threads)


def test_huge_documents_are_cut_by_arithmetic(backend: Any, megatron_helpers: ModuleType) -> None:
    lengths = np.array([2**31 - 1, 3, 2**31 - 1], np.int32)
    documents = np.array([0, 1, 2], np.int32)
    rows = cut(backend, lengths, documents, 2**24 + 1, dtype=np.int64)
    tokens = int(lengths.sum(dtype=np.int64))
    expected = megatron_helpers.build_sample_idx_int64(
        lengths, documents, 2**24 + 1, 1, tokens, True, 1
    )
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.not_quick
def test_the_partial_count_is_exact_where_float32_is_not(
    backend: Any, megatron_helpers: ModuleType
) -> None:
    tokens, S = 16_777_218, 2048
    lengths = np.full(2, tokens // 2, np.int32)
    documents = np.arange(2, dtype=np.int32)
    rows = cut(backend, lengths, documents, S, drop=False)
    assert rows.shape[0] - 1 == 8193 == -(-(tokens - 1) // S)
    assert rows[-1].tolist() == [1, tokens // 2 - 1]
    peer = megatron_helpers.build_sample_idx_int32(lengths, documents, S, 1, tokens, False, 1)
    assert peer.shape[0] - 1 == 8192  # the last token is never served


def test_what_does_not_fit_is_refused(backend: Any) -> None:
    out = np.empty((3, 2), np.int32)
    lengths = np.array([4, 4], np.int32)
    with pytest.raises(InvalidArgument, match="names a sequence that has no length"):
        backend.cut_samples(lengths, np.array([0, 2], np.int32), 3, 1, 2, 8, out)
    with pytest.raises(InvalidArgument, match="names a sequence that has no length"):
        backend.cut_samples(lengths, np.array([-1, 0], np.int32), 3, 1, 2, 8, out)
    with pytest.raises(InvalidArgument, match="a length is negative"):
        backend.cut_samples(-lengths, np.array([0, 1], np.int32), 3, 1, 2, 8, out)
    with pytest.raises(InvalidArgument, match="fewer tokens than"):
        backend.cut_samples(lengths, np.array([0], np.int32), 3, 1, 2, 8, out)
