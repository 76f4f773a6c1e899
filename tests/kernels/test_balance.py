"""Rows assigned by their work, on every backend."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.kernels import load


def assigned(
    backend: Any, work: Any, rows: int, ranks: int, size: int, served: int = 0, rows_served: int = 0
) -> I64:
    """Numbers of samples by round, rank and row."""
    out = np.full(rows, -7)
    backend.balance_rows(np.array(work, np.int64), served, rows_served, ranks, size, out)
    return out.reshape(-1, ranks, size)


def samples_of(rounds: I64) -> list[int]:
    return [number for number in rounds.ravel().tolist() if number >= 0]


@given(
    lengths=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=9), width=st.integers(0, 20)
)
def test_squared_lengths_are_those_of_the_input_tokens(
    backend: Any, lengths: list[list[int]], width: int
) -> None:
    flat = np.array([each for row in lengths for each in row], np.int64)
    splits = np.cumsum([0, *map(len, lengths)]).astype(np.int64)
    out = np.full(len(lengths), -7)
    backend.squared_lengths(flat, splits, width, out)
    expected = []
    for row in lengths:
        documents = [k for k, length in enumerate(row) for _ in range(length)][:width]
        expected.append(sum(n**2 for n in Counter(documents).values()))
    assert out.tolist() == expected


def test_written_down_cases(backend: Any) -> None:
    assert assigned(backend, [5, 1, 9, 7], 4, 2, 1).tolist() == [[[2], [3]], [[1], [0]]]
    # 9 to rank 0, 7 and 5 to rank 1, which has 7 < 9, and 1 to what is left
    assert assigned(backend, [5, 1, 9, 7], 4, 2, 2).tolist() == [[[2, 1], [3, 0]]]
    # equal work goes by number, to the first rank first
    assert assigned(backend, [3, 3, 3, 3], 4, 2, 1).tolist() == [[[0], [1]], [[2], [3]]]
    # 5 samples in 8 rows: the first micro batch has two, on the rank with the least work
    rounds = assigned(backend, [1, 2, 9, 3, 3], 8, 2, 2)
    assert rounds.tolist() == [[[2, -1], [3, 4]], [[0, -1], [1, -1]]]
    assert assigned(backend, [], 4, 2, 2).tolist() == [[[-1, -1], [-1, -1]]]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    ranks, size = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rows = ranks * size * draw(st.integers(0, 5))
    number = st.integers(0, 6) | st.integers(0, 2**55)
    return draw(st.lists(number, max_size=rows)), rows, ranks, size


@given(step=steps(), cut=st.integers(0, 5))
def test_every_backend_assigns_as_the_reference(
    backend: Any, step: tuple[list[int], int, int, int], cut: int
) -> None:
    work, rows, ranks, size = step
    rounds = assigned(backend, work, rows, ranks, size)
    np.testing.assert_array_equal(rounds, assigned(load("reference"), work, rows, ranks, size))
    rest = rounds[cut:]
    served = samples_of(rounds[:cut])
    again = assigned(
        backend, work, rest.size, ranks, size, len(served), rows - rest.size
    )  # the rounds after a cut do not depend on it
    np.testing.assert_array_equal(again, rest)


@given(step=steps())
def test_every_sample_once_in_rounds_of_falling_work(
    backend: Any, step: tuple[list[int], int, int, int]
) -> None:
    work, rows, ranks, size = step
    rounds = assigned(backend, work, rows, ranks, size)
    order = sorted(range(len(work)), key=lambda k: (-work[k], k))
    served = 0
    for numbers in rounds:
        mine = samples_of(numbers)
        assert sorted(mine) == sorted(order[served : served + len(mine)])
        served += len(mine)
    assert served == len(work)
    held = (rounds >= 0).sum(2).ravel()
    assert held.size == 0 or held.max() - held.min() <= 1
    assert sorted(held.reshape(-1, ranks).sum(1), reverse=True) == [
        *held.reshape(-1, ranks).sum(1)
    ]  # padding comes last


@given(step=steps())
def test_no_rank_is_far_ahead(backend: Any, step: tuple[list[int], int, int, int]) -> None:
    """With one row a micro batch, the ranks differ at most by the largest sample of a round."""
    work, rows, ranks, _ = step
    rows -= rows % ranks
    rounds = assigned(backend, work[:rows], rows, ranks, 1)
    loads = np.zeros(ranks, object)
    for numbers in rounds[:, :, 0]:
        done = [int(work[k]) if k >= 0 else 0 for k in numbers]
        loads += done
        assert max(loads) - min(loads) <= max(work[:rows], default=0)


@for_each(
    ("change", "message"),
    [
        ({"work": np.ones(4, np.int32)}, "work: expected"),
        ({"work": np.array([1, -1, 1, 1])}, "work: must be >= 0"),
        ({"work": np.array([2**62, 2**62, 0, 0])}, "sum below"),
        ({"work": np.ones(5, np.int64)}, "no more samples"),
        ({"served": 1}, "no more samples"),
        ({"served": -1}, "no more samples"),
        ({"rows_served": 3}, "multiples of"),
        ({"ranks": 0}, "from 1"),
        ({"ranks": 3}, "multiples of"),
        ({"micro_batch_size": 0}, "from 1"),
        ({"out": np.empty(4, np.int32)}, "out: expected"),
    ],
)
def test_the_native_core_checks(change: dict[str, Any], message: str) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    call: dict[str, Any] = {
        "work": np.ones(4, np.int64), "served": 0, "rows_served": 0, "ranks": 2,
        "micro_batch_size": 1, "out": np.empty(4, np.int64),
    }  # fmt: skip
    native.balance_rows(**call)
    with pytest.raises(InvalidArgument, match=message):
        native.balance_rows(**{**call, **change})


def test_the_native_core_checks_runs() -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    out = np.empty(2, np.int64)
    native.squared_lengths(np.ones(3, np.int64), np.array([0, 1, 3]), 8, out)
    assert out.tolist() == [1, 2]
    for lengths, splits, width in [
        ([1, -1, 1], [0, 1, 3], 8),
        ([1, 1, 1], [0, 2, 1], 8),
        ([1, 1, 1], [0, 1, 2], 8),
        ([1, 1, 1], [0, 1], 8),
        ([1, 1, 1], [0, 1, 3], 2**31),
    ]:
        with pytest.raises(InvalidArgument):
            native.squared_lengths(np.array(lengths), np.array(splits), width, out)
