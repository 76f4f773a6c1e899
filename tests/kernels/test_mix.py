"""Draws from streams whose weights change."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import one_in
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.index.mixing import row_of_weights
from megaindex.kernels.reference.blending import UNIT

ROWS = st.integers(1, 5).flatmap(
    lambda n: st.lists(
        st.tuples(
            st.lists(st.sampled_from((0, 1, 2, 7, 10**9)), min_size=n, max_size=n).filter(any),
            st.integers(1, 40),
        ),
        min_size=1,
        max_size=5,
    )
)  # fmt: skip


def table(backend: Any, shares: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    deficits, counts = np.zeros((2, len(shares) + 1, shares.shape[1]), np.int64)
    backend.mix_table(shares, lengths, deficits, counts)
    return deficits, counts


def walk(shares: np.ndarray, lengths: list[int], more: int) -> list[tuple[int, int]]:
    """Draw by draw: the stream that reaches a half of its next draw first."""
    owed = [Fraction(0)] * shares.shape[1]
    drawn = [0] * shares.shape[1]
    found = []
    for row, length in zip(shares.tolist(), [*lengths[:-1], lengths[-1] + more], strict=True):
        for _ in range(length):
            times = [((Fraction(1, 2) - o) / w, i)
                     for i, (o, w) in enumerate(zip(owed, row, strict=True)) if w]  # fmt: skip
            best = min(times)[1]
            owed[best] -= 1
            found.append((best, drawn[best]))
            drawn[best] += 1
        owed = [o + Fraction(w * length, UNIT) for o, w in zip(owed, row, strict=True)]
    return found


@one_in(2)
@given(rows=ROWS, begin=st.integers(0, 60))
def test_draws_are_those_of_a_walk(
    backend: Any, rows: list[tuple[list[int], int]], begin: int
) -> None:
    shares = np.array([row_of_weights([Fraction(w) for w in weights]) for weights, _ in rows])
    lengths = [length for _, length in rows]
    deficits, counts = table(backend, shares, np.array(lengths))
    expected = walk(shares, lengths, 70)
    end = sum(lengths)
    for stream in range(shares.shape[1]):
        assert counts[-1, stream] == sum(drawn == stream for drawn, _ in expected[:end])
    owed = (shares.astype(object) * np.array(lengths)[:, None]).sum(axis=0) - counts[-1] * UNIT
    assert deficits[-1].tolist() == owed.tolist()
    starts = np.cumsum([0, *lengths[:-1]])
    streams, ordinals = np.empty(60, np.int16), np.empty(60, np.int64)
    begin = min(begin, end)
    backend.mix_fill(shares, starts, deficits[:-1], counts[:-1], begin, streams, ordinals, 2)
    assert (
        list(zip(streams.tolist(), ordinals.tolist(), strict=True)) == expected[begin : begin + 60]
    )


@one_in(2)
@given(rows=ROWS)
def test_counts_stay_near_the_weights(backend: Any, rows: list[tuple[list[int], int]]) -> None:
    """Half a sample of two streams; of more, those without a weight leave theirs to the others."""
    shares = np.array([row_of_weights([Fraction(w) for w in weights]) for weights, _ in rows])
    deficits, _ = table(backend, shares, np.array([length for _, length in rows]))
    streams = shares.shape[1]
    assert (np.abs(deficits) <= (streams if streams > 2 else 0.5) * UNIT).all()
    assert (deficits.sum(axis=1) == 0).all()


@one_in(2)
@given(rows=ROWS)
def test_counts_of_unchanged_weights_have_a_bound(
    backend: Any, rows: list[tuple[list[int], int]]
) -> None:
    """Half a sample, and half a sample for each stream times the share: that of docs."""
    for weights, length in rows:
        row = row_of_weights([Fraction(w) for w in weights])
        (_, found), _ = table(backend, row[None], np.array([length]))
        streams = np.count_nonzero(row)
        bound = UNIT + row.astype(np.int64) * streams
        assert (2 * np.abs(found) <= bound).all()
        assert streams != 2 or (np.abs(found) <= UNIT // 2).all()


def test_equal_weights_go_on_as_if_nothing_changed(backend: Any) -> None:
    row = row_of_weights([Fraction(5), Fraction(3), Fraction(1)])
    deficits, counts = table(backend, np.tile(row, (100, 1)), np.full(100, 7))
    whole, total = table(backend, row[None], np.array([700]))
    assert deficits[-1].tolist() == whole[-1].tolist()
    assert counts[-1].tolist() == total[-1].tolist()


def test_small_weights_add_up_over_short_segments(backend: Any) -> None:
    """Draws that began anew with each change would never draw the second stream."""
    row = row_of_weights([Fraction(999), Fraction(1)])
    _, counts = table(backend, np.tile(row, (1000, 1)), np.full(1000, 8))
    assert counts[-1].tolist() == [7992, 8]


def test_positions_far_behind(backend: Any) -> None:
    row = row_of_weights([Fraction(2), Fraction(1)])
    deficits, counts = table(backend, row[None], np.array([2**60]))
    assert int(counts[-1].sum()) == 2**60
    assert abs(int(counts[-1, 0]) - 2**60 * int(row[0]) // UNIT) <= 1
    streams, ordinals = np.empty(4, np.int16), np.empty(4, np.int64)
    zero = np.zeros(1, np.int64)
    backend.mix_fill(row[None], zero, deficits[:1], counts[:1], 2**60 - 4, streams, ordinals)
    assert ordinals.max() < counts[-1].max()


def test_long_ranges_are_drawn_as_short_ones(backend: Any) -> None:
    row = row_of_weights([Fraction(weight) for weight in (5, 1, 3, 1, 7)])
    zero = np.zeros((1, 5), np.int64)
    streams, ordinals = np.empty(9000, np.int16), np.empty(9000, np.int64)
    backend.mix_fill(row[None], zero[0, :1], zero, zero, 1, streams, ordinals)
    for begin in range(0, 9000, 100):
        part = np.empty(100, np.int16), np.empty(100, np.int64)
        backend.mix_fill(row[None], zero[0, :1], zero, zero, 1 + begin, *part)
        np.testing.assert_array_equal(streams[begin : begin + 100], part[0])
        np.testing.assert_array_equal(ordinals[begin : begin + 100], part[1])


@for_each("change", ["sum", "deficit", "length", "begin", "starts"])
def test_tables_out_of_range_are_refused(backend: Any, change: str) -> None:
    shares = np.full((2, 2), UNIT // 2, np.uint32)
    deficits, counts = np.zeros((2, 3, 2), np.int64)
    lengths, starts, begin = np.array([3, 3]), np.array([0, 3]), 0
    if change == "sum":
        shares[0, 0] += 1
    elif change == "deficit":
        deficits[0, 0] = 2**49
    elif change == "length":
        lengths[1] = 2**60 + 1
    elif change == "begin":
        begin = 2**60
    else:
        starts[1] = 0
    out = np.empty(4, np.int16), np.empty(4, np.int64)
    if change in ("begin", "starts"):
        with pytest.raises(InvalidArgument):
            backend.mix_fill(shares, starts, deficits[:2], counts[:2], begin, *out)
        return
    with pytest.raises(InvalidArgument):
        backend.mix_table(shares, lengths, deficits, counts)
