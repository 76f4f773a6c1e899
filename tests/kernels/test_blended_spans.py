"""Spans of blends, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each
from support.random_arrays import index_arrays

from megaindex.errors import InvalidArgument
from megaindex.kernels import load


@given(
    seed=st.integers(0, 2**32 - 1), sources=st.integers(1, 6), count=st.integers(0, 30),
    extra=st.integers(0, 1),
)  # fmt: skip
def test_each_sample_is_its_sources(
    backend: Any, seed: int, sources: int, count: int, extra: int
) -> None:
    rng = np.random.default_rng(seed)
    indices = [index_arrays(rng, extra) for _ in range(sources)]
    which = rng.integers(0, sources, count)
    samples = np.array([rng.integers(0, indices[k][0].size) for k in which.tolist()], np.int64)
    runs = backend.blended_spans(backend.span_table(indices), which, samples)
    assert [column.dtype for column in runs] == [np.int32, *[np.int64] * 4]
    expected: list[tuple[int, ...]] = []
    splits = [0]
    for source, sample in zip(which.tolist(), samples.tolist(), strict=True):
        *alone, _ = load("reference").array_spans(*indices[source], np.array([sample]))
        expected += [(source, *run) for run in zip(*(c.tolist() for c in alone), strict=True)]
        splits.append(len(expected))
    assert list(zip(*(column.tolist() for column in runs[:4]), strict=True)) == expected
    assert runs[4].tolist() == splits


@for_each(
    ("which", "sample", "message"),
    [
        (1, 0, "which: source 1 of 1 sources"),
        (-1, 0, "which: source -1 of 1 sources"),
        (0, 10**6, "sample_ids: sample 1000000 of"),
        (0, -1, "sample_ids: sample -1 of"),
    ],
)
def test_what_is_not_there_is_refused(backend: Any, which: int, sample: int, message: str) -> None:
    table = backend.span_table([index_arrays(np.random.default_rng(1), 1)])
    with pytest.raises(InvalidArgument, match=message):
        backend.blended_spans(table, np.array([0, which]), np.array([0, sample]))


def test_the_native_table_keeps_its_arrays() -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    rng = np.random.default_rng(2)
    shuffle, rows, documents, lengths, extra = index_arrays(rng, 1)
    table = native.span_table(
        [(shuffle.copy(), rows.copy(), documents.copy(), lengths.copy(), extra)]
    )
    expected = load("reference").array_spans(
        shuffle, rows, documents, lengths, extra, np.array([0])
    )
    runs = native.blended_spans(table, np.array([0]), np.array([0]))
    for ours, theirs in zip(runs[1:], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(InvalidArgument, match="expected rows of position and offset"):
        native.span_table([(shuffle, rows.reshape(1, -1), documents, lengths, extra)])
