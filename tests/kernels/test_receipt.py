"""Hashes of samples: equal on every backend, and none equal to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import active, load

KEYS = np.array([[1, 2], [2**64 - 1, 5]], np.uint64)


def arguments(generator: np.random.Generator, samples: int) -> list[Any]:
    """Positions, source, document, offset, length and row_splits, with values of any size."""
    most = int(generator.integers(2, 6))  # 2: one run each
    splits = np.concatenate(([0], np.cumsum(generator.integers(1, most, samples)))).astype(np.int64)
    runs = int(splits[-1])
    wide = [generator.integers(0, 2 ** int(generator.integers(1, 63)), runs) for _ in range(3)]
    positions = generator.integers(0, 2**62, samples)
    sources = generator.integers(0, int(generator.integers(1, 3)), runs).astype(np.int32)
    return [positions, sources, *wide, splits]


def hashes(backend: Any, spans: list[Any]) -> np.ndarray:
    count = spans[0].size
    sums = np.zeros((count, 2), np.uint64)
    backend.receipt_add(*spans, KEYS, np.arange(count), sums)
    return sums


@given(seed=st.integers(0, 2**32 - 1), samples=st.integers(0, 40), blocks=st.integers(1, 4))
def test_every_backend_adds_the_same(backend: Any, seed: int, samples: int, blocks: int) -> None:
    generator = np.random.default_rng(seed)
    spans = arguments(generator, samples)
    numbers = generator.integers(0, blocks, samples)
    ours = generator.integers(0, 2**64, (blocks, 2), dtype=np.uint64)
    expected = ours.copy()
    backend.receipt_add(*spans, KEYS, numbers, ours)
    load("reference").receipt_add(*spans, KEYS, numbers, expected)
    np.testing.assert_array_equal(ours, expected)

    start = np.zeros((blocks, 2), np.uint64)
    backend.receipt_add(*spans, KEYS, numbers, start)
    total = [0] * blocks
    for block, (high, low) in zip(numbers.tolist(), hashes(backend, spans).tolist(), strict=True):
        total[block] = (total[block] + (high << 64 | low)) % 2**128
    assert [high << 64 | low for high, low in start.tolist()] == total


def test_hashes_are_those_written_down(backend: Any) -> None:
    """A change of the hash would make every stored receipt worthless."""
    splits = np.array([0, 1, 3])
    spans = [np.array([0, 7]), np.array([0, 1, 0], np.int32), np.array([5, 5, 6])]
    spans += [np.array([0, 3, 0]), np.array([9, 2, 7]), splits]
    assert [f"{high:016x}{low:016x}" for high, low in hashes(backend, spans).tolist()] == [
        "45f14ea6a35b57d55b21a10b9370ad21",
        "328594df9e037990c381df03e4546760",
    ]


def test_every_field_counts() -> None:
    """20,000 neighbours in position, source, document, offset and length: no hash twice."""
    backend = active()
    axis = np.arange(10)
    grid = np.stack(np.meshgrid(axis, axis, axis, axis, axis[:2]), axis=-1).reshape(-1, 5)
    position, document, offset, length, source = np.ascontiguousarray(grid.T)
    splits = np.arange(len(grid) + 1)
    spans = [position, source.astype(np.int32), document, offset, length, splits]
    found = hashes(backend, spans)
    assert len(np.unique(found[:, 0])) == len(np.unique(found[:, 1])) == len(grid)
    bits = np.unpackbits(found.view(np.uint8))  # about half of the bits are set
    assert abs(bits.mean() - 0.5) < 0.002


def test_the_order_of_runs_counts(backend: Any) -> None:
    spans = [np.array([3, 3]), np.zeros(4, np.int32), np.array([1, 2, 2, 1])]
    spans += [np.zeros(4, np.int64), np.array([4, 4, 4, 4]), np.array([0, 2, 4])]
    one, other = hashes(backend, spans).tolist()
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_one_bit_of_input_moves_half_of_the_output() -> None:
    """Avalanche: over random samples, each output bit flips with a probability near one half."""
    backend, generator = active(), np.random.default_rng(2)
    samples = 4000
    ones = np.arange(samples + 1)
    fields = [generator.integers(0, 2**31, samples) for _ in range(4)]
    for field in range(4):
        for bit in (0, 7, 20):
            changed = [f.copy() for f in fields]
            changed[field] ^= 1 << bit
            pairs = []
            for position, *runs in (fields, changed):
                source = np.zeros(samples, np.int32)
                pairs.append(hashes(backend, [position, source, *runs, ones]))
            flips = np.unpackbits((pairs[0] ^ pairs[1]).view(np.uint8).reshape(samples, 16), axis=1)
            assert abs(flips.mean(axis=0) - 0.5).max() < 0.06  # 7 standard deviations of one bit


@for_each(
    ("change", "message"),
    [
        ({1: np.array([2], np.int32)}, "must lie inside"),
        ({5: np.array([0, 2])}, "must lie inside"),
        ({7: np.array([1])}, "must lie inside"),
        ({2: np.array([1, 2])}, "expected 2 entries"),
        ({3: np.array([1.0])}, "offset: expected a 1-dimensional int64"),
    ],
)
def test_the_native_core_checks(change: dict[int, Any], message: str) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    one = np.array([1])
    call: list[Any] = [one, np.array([0], np.int32), one, one, one, np.array([0, 1]), KEYS]
    call += [np.array([0]), np.zeros((1, 2), np.uint64)]
    native.receipt_add(*call)
    for at, value in change.items():
        call[at] = value
    with pytest.raises(InvalidArgument, match=message):
        native.receipt_add(*call)
