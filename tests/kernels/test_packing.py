"""Whole documents packed until the next would not fit, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaindex.errors import InvalidArgument
from megaindex.kernels import load
from megaindex.kernels.reference.bijection import TABLE_BELOW
from megaindex.kernels.reference.packing import missing_bin, permuted_rank

INT32_MAX = 2**31 - 1


@given(
    lengths=st.lists(st.integers(0, 12) | st.sampled_from([0, INT32_MAX]), max_size=40),
    capacity=st.integers(1, 20),
    tokens=st.integers(0, 25),
    room=st.integers(0, 30),
)
def test_every_backend_packs_as_the_reference(
    backend: Any, lengths: list[int], capacity: int, tokens: int, room: int
) -> None:
    sizes = np.array(lengths, np.int32)
    ours, theirs = np.full(room, -7), np.full(room, -7)
    answer = backend.pack_documents(sizes, capacity, tokens, ours)
    expected = load("reference").pack_documents(sizes, capacity, tokens, theirs)
    assert answer == expected
    begun = expected[0]
    np.testing.assert_array_equal(ours[:begun], theirs[:begun])


def test_a_written_down_case(backend: Any) -> None:
    begins = np.empty(8, np.int64)
    assert backend.pack_documents(np.array([3, 4, 9, 1], np.int32), 8, 0, begins) == (3, 1)
    assert begins[:3].tolist() == [0, 2, 3]
    # one token in the open sample: two documents still fit into it
    assert backend.pack_documents(np.array([3, 4, 9, 1], np.int32), 8, 1, begins) == (2, 1)
    assert begins[:2].tolist() == [2, 3]


def test_two_passes_are_one(backend: Any) -> None:
    lengths = np.random.default_rng(3).integers(0, 30, 200).astype(np.int32)
    whole = np.empty(200, np.int64)
    samples, tokens = backend.pack_documents(lengths, 64, 0, whole)
    head, tail = np.empty(200, np.int64), np.empty(200, np.int64)
    first, left = backend.pack_documents(lengths[:77].copy(), 64, 0, head)
    second, end = backend.pack_documents(lengths[77:].copy(), 64, left, tail)
    assert (first + second, end) == (samples, tokens)
    np.testing.assert_array_equal(whole[:samples], [*head[:first], *(tail[:second] + 77)])


def test_the_native_core_checks() -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    begins = np.empty(3, np.int64)
    for lengths, capacity, tokens, out in [
        (np.ones(3, np.int64), 4, 0, begins),
        (np.ones(3, np.int32), 0, 0, begins),
        (np.ones(3, np.int32), 4, -1, begins),
        (np.ones(3, np.int32), 4, 0, begins.astype(np.int32)),
        (np.ones((3, 1), np.int32), 4, 0, begins),
    ]:
        with pytest.raises(InvalidArgument):
            native.pack_documents(lengths, capacity, tokens, out)


def test_the_bin_that_is_missing_is_named() -> None:
    runs = np.array([[0, 0, 0], [0, 0, 5]])
    for bins, named in (([0, 4, 5], 5), ([0, -1, 5], -1)):
        assert str(missing_bin(runs, np.array(bins))) == f"bins: bin {named} of 5"


@pytest.mark.parametrize("n", [1, 2, 97, TABLE_BELOW - 1, TABLE_BELOW, TABLE_BELOW + 1])
def test_the_place_of_a_piece_leads_back_to_its_rank(n: int) -> None:
    key = np.array([3, 5], np.uint64)
    for rank in {*range(min(n, 5)), n // 2, n - 1}:
        place = permuted_rank(key, 9, n, rank)
        assert permuted_rank(key, 9, n, place, back=True) == rank
