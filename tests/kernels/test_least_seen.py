"""Samples in the order of least-seen tokens, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import load


@given(seed=st.integers(0, 2**32 - 1), samples=st.integers(0, 40), segments=st.integers(1, 60))
def test_every_backend_gives_the_order_of_the_reference(
    backend: Any, seed: int, samples: int, segments: int
) -> None:
    generator = np.random.default_rng(seed)
    splits = np.concatenate(([0], np.cumsum(generator.integers(1, 4, samples)))).astype(np.int64)
    begins = generator.integers(0, segments, int(splits[-1]))
    ends = np.minimum(begins + generator.integers(0, 6, begins.size), segments)
    widths = generator.integers(1, 9, segments)
    counts = generator.integers(0, 3, segments)
    count = int(generator.integers(0, samples + 1))
    ours, theirs = counts.copy(), counts.copy()
    order = backend.least_seen(begins, ends, splits, widths, ours, count)
    expected = load("reference").least_seen(begins, ends, splits, widths, theirs, count)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(ours, theirs)
    assert len(set(order.tolist())) == count


def test_a_written_down_case(backend: Any) -> None:
    """Segments of 10, 5 and 1 tokens, seen 0, 0 and 7 times; samples cover 01, 0, 1, 2."""
    begins, ends = np.array([0, 0, 1, 2]), np.array([2, 1, 2, 3])
    counts = np.array([0, 0, 7])
    order = backend.least_seen(
        begins, ends, np.arange(5), np.array([10, 5, 1]), counts, 4
    )  # scores 0 0 0 7; after sample 0: 10 5 7
    assert order.tolist() == [0, 2, 3, 1]
    assert counts.tolist() == [2, 2, 8]


@for_each(
    ("change", "message"),
    [
        ({1: np.array([4])}, "must lie inside"),
        ({2: np.array([0, 2])}, "must lie inside"),
        ({4: np.zeros(2, np.int64)}, "one entry for each segment"),
        ({5: 2}, "num_samples: must be from 0"),
        ({0: np.array([1, 2])}, "expected 1 entries|expected 2 entries"),
    ],
)
def test_the_native_core_checks(change: dict[int, Any], message: str) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    call: list[Any] = [np.array([0]), np.array([3]), np.array([0, 1]), np.ones(3, np.int64)]
    call += [np.zeros(3, np.int64), 1]
    assert native.least_seen(*call).tolist() == [0]
    for at, value in change.items():
        call[at] = value
    with pytest.raises(InvalidArgument, match=message):
        native.least_seen(*call)
