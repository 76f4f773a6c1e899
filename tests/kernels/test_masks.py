"""Loss masks and document bounds of a batch, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument

EOD, PAD = 3, 5
grids = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 4), st.integers(1, 200))


def random_tokens(seed: int, rows: int, width: int, dtype: Any) -> np.ndarray:
    """Few ids, so that ends and pads are among them; rows of a wider array."""
    rng = np.random.default_rng(seed)
    few = 8 if rng.random() < 0.5 else 200
    return rng.integers(0, few, (rows, width + 2)).astype(dtype)[:, 1:-1]


def bounds_of(ends: list[int], width: int) -> list[int]:
    return sorted({0, *(end for end in ends if end < width), width})


@given(grid=grids, dtype=st.sampled_from([np.int64, np.int32]), by_end=st.booleans())
def test_loss_counts_where_there_is_a_label(
    backend: Any, grid: tuple[int, int, int], dtype: Any, by_end: bool
) -> None:
    tokens = random_tokens(*grid, dtype)
    labels = random_tokens(grid[0] + 1, *grid[1:], dtype)
    before = tokens.tolist(), labels.tolist()
    loss_mask = np.full(tokens.shape, 9, np.float32)
    backend.mask_loss(tokens, labels, PAD, EOD if by_end else None, loss_mask)
    for k, (reads, wants) in enumerate(zip(*before, strict=True)):
        for j, (token, label) in enumerate(zip(reads, wants, strict=True)):
            masked = label == PAD or (by_end and token == EOD)
            assert loss_mask[k, j] == (0 if masked else 1)
            assert tokens[k, j] == (0 if token == PAD else token)
            assert labels[k, j] == (0 if label == PAD else label)


def documents(rows: int, width: int, wanted: tuple[bool, bool, bool]) -> list[Any]:
    fields = [
        np.full((rows, width), -9, np.int64),
        np.full((rows, width + 1), -9, np.int32),
        np.full(rows, -9, np.int32),
    ]
    return [field if keep else None for field, keep in zip(fields, wanted, strict=True)]


def check_documents(fields: list[Any], k: int, bounds: list[int], width: int) -> None:
    positions, cu_seqlens, max_seqlen = fields
    sizes = np.diff(bounds).tolist()
    if positions is not None:
        assert positions[k].tolist() == [j for size in sizes for j in range(size)]
    if cu_seqlens is not None:
        assert cu_seqlens[k].tolist() == bounds + [width] * (width + 1 - len(bounds))
    if max_seqlen is not None:
        assert max_seqlen[k] == max(sizes)


@given(
    grid=grids, dtype=st.sampled_from([np.int64, np.int32]), wanted=st.tuples(*[st.booleans()] * 3)
)
def test_documents_end_with_their_token(
    backend: Any, grid: tuple[int, int, int], dtype: Any, wanted: tuple[bool, bool, bool]
) -> None:
    tokens = random_tokens(*grid, dtype)
    rows, width = tokens.shape
    fields = documents(rows, width, wanted)
    backend.documents_by_token(tokens, EOD, *fields)
    for k, row in enumerate(tokens.tolist()):
        ends = [j + 1 for j, token in enumerate(row) if token == EOD]
        check_documents(fields, k, bounds_of(ends, width), width)


@given(grid=grids, wanted=st.tuples(*[st.booleans()] * 3))
def test_documents_end_with_their_run(
    backend: Any, grid: tuple[int, int, int], wanted: tuple[bool, bool, bool]
) -> None:
    seed, rows, width = grid
    rng = np.random.default_rng(seed)
    splits = np.concatenate(([0], np.cumsum(rng.integers(0, 6, rows)))).astype(np.int64)
    length = rng.integers(0, 1 + width // 2, int(splits[-1]))
    fields = documents(rows, width, wanted)
    backend.documents_by_run(length, splits, width, *fields)
    for k in range(rows):
        sizes = [size for size in length[splits[k] : splits[k + 1]].tolist() if size]
        check_documents(fields, k, bounds_of(np.cumsum(sizes[:-1]).tolist(), width), width)


def test_padding_belongs_to_the_last_document_and_the_extra_token_to_none(backend: Any) -> None:
    """Rows of 5: documents of 2, 1 and no tokens; of 5 and the extra one; none."""
    positions, cu_seqlens = np.zeros((3, 5), np.int64), np.zeros((3, 6), np.int32)
    longest = np.zeros(3, np.int32)
    backend.documents_by_run(
        np.array([2, 1, 0, 5, 1]), np.array([0, 3, 5, 5]), 5, positions, cu_seqlens, longest
    )
    assert cu_seqlens.tolist() == [[0, 2, 5, 5, 5, 5], [0, 5, 5, 5, 5, 5], [0, 5, 5, 5, 5, 5]]
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert longest.tolist() == [3, 5, 5]


@for_each(
    ("call", "message"),
    [
        (("mask_loss", "tokens", "labels", 2**40, None, "mask"), "pad_id, eod_id: must fit"),
        (("mask_loss", "tokens", "labels", 0, 2**40, "mask"), "pad_id, eod_id: must fit"),
        (("mask_loss", "tokens", "wide", 0, None, "mask"), "labels: expected int32"),
        (("mask_loss", "tokens", "labels", 0, None, "labels"), "loss_mask: expected float32"),
        (("mask_loss", "flat", "labels", 0, None, "mask"), "tokens: expected a two-dim"),
        (("documents_by_token", "tokens", 2**40, None, None, None), "eod_id: must fit"),
        (("documents_by_token", "tokens", 1, "labels", None, None), "position_ids: expected int64"),
        (("documents_by_token", "tokens", 1, None, "labels", None), "cu_seqlens: expected int32"),
        (("documents_by_run", "one", "splits", 3, None, None, "one"), "max_seqlen: expected a 1-"),
        (("documents_by_run", "one", "rising", 3, None, None, None), "row_splits: must rise"),
        (("documents_by_run", "minus", "splits", 3, None, None, None), "length: must be 0"),
        (
            ("documents_by_run", "one", "splits", -1, None, None, None),
            "row_splits: must have .*; width: must be",
        ),
    ],
)
def test_the_native_core_checks(call: tuple[Any, ...], message: str) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    arrays = {
        "tokens": np.zeros((2, 3), np.int32),
        "labels": np.zeros((2, 3), np.int32),
        "wide": np.zeros((2, 4), np.int32),
        "mask": np.zeros((2, 3), np.float32),
        "flat": np.zeros(3, np.int32),
        "one": np.array([1]),
        "minus": np.array([-1]),
        "splits": np.array([0, 1]),
        "rising": np.array([0, 2]),
    }
    name, *arguments = call
    with pytest.raises(InvalidArgument, match=message):
        getattr(native, name)(*(arrays.get(a, a) if isinstance(a, str) else a for a in arguments))
