"""Batches of tokens, on every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import load

TOKEN_DTYPES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64",
)  # fmt: skip
HELD = {
    "int64": TOKEN_DTYPES[:6] + TOKEN_DTYPES[7:8],
    "int32": ("uint8", "int8", "uint16", "int16", "int32"),
    "float32": TOKEN_DTYPES,
}
PAD = -7
UNTOUCHED = 99


def unaligned(values: np.ndarray) -> np.ndarray:
    """The same values at an odd address, as an .idx has them."""
    return np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1)


def source(rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A few sequences, some of them empty, in any order in the file."""
    lengths = rng.integers(0, 40, rng.integers(1, 8)).astype(np.int32)
    kind = np.dtype(dtype)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64) * kind.itemsize
    order = rng.permutation(lengths.size)
    tokens = rng.integers(0, 120, int(lengths.sum()) + 3).astype(kind)
    if kind.kind == "i":
        tokens *= rng.choice([-1, 1], tokens.size).astype(kind)
    return tokens, unaligned(starts[order]), unaligned(lengths[order])


@dataclass
class Batch:
    """Runs of several sources, and where they go."""

    sources: list[Any]
    runs: list[np.ndarray]
    out: np.ndarray
    labels: np.ndarray | None

    @classmethod
    def random(cls, rng: np.random.Generator, dtypes: list[str], out: str, labels: bool) -> Batch:
        sources = [source(rng, dtype) for dtype in dtypes]
        rows, width = int(rng.integers(0, 5)), int(rng.integers(0, 90))
        per_row = rng.integers(0, 6, rows)
        splits = np.concatenate(([0], np.cumsum(per_row))).astype(np.int64)
        which = rng.integers(0, len(sources), int(splits[-1])).astype(np.int32)
        columns = []
        for number in which.tolist():
            lengths = sources[number][2]
            document = int(rng.integers(0, lengths.size))
            offset = int(rng.integers(0, lengths[document] + 1))
            columns.append((document, offset, int(rng.integers(0, lengths[document] - offset + 1))))
        runs = [which, *np.array(columns, np.int64).reshape(-1, 3).T.copy(), splits]
        # rows of a larger array, which lie apart
        room = np.full((2, rows, width + 3), UNTOUCHED, out)
        return cls(sources, runs, room[0, :, 2 : width + 2], room[1, :, :width] if labels else None)

    def call(self, backend: Any) -> int:
        table = backend.token_table(self.sources)
        return int(backend.gather(table, *self.runs, self.out, self.labels, PAD, 2))


def expected(batch: Batch) -> tuple[list[list[Any]], list[list[Any]]]:
    which, document, offset, length, splits = batch.runs
    rows: tuple[list[list[Any]], list[list[Any]]] = ([], [])
    width = batch.out.shape[1]
    for k in range(splits.size - 1):
        text: list[Any] = []
        for r in range(splits[k], splits[k + 1]):
            tokens, pointers, _ = batch.sources[which[r]]
            begin = int(pointers[document[r]]) // tokens.itemsize + int(offset[r])
            text += tokens[begin : begin + int(length[r])].tolist()
        text += [PAD] * (width + 1)
        rows[0].append(text[:width])
        rows[1].append(text[1 : width + 1])
    return rows


@given(seed=st.integers(0, 2**32 - 1), out=st.sampled_from(sorted(HELD)), labels=st.booleans())
def test_rows_hold_their_runs(backend: Any, seed: int, out: str, labels: bool) -> None:
    rng = np.random.default_rng(seed)
    dtypes = [str(dtype) for dtype in rng.choice(HELD[out], rng.integers(1, 4))]
    batch = Batch.random(rng, dtypes, out, labels)
    tokens, shifted = expected(batch)
    assert batch.call(backend) == -1
    assert batch.out.tolist() == tokens
    if batch.labels is not None:
        assert batch.labels.tolist() == shifted
    assert batch.out.base is not None
    room, width = batch.out.base, batch.out.shape[1]
    beside = room[0, :, :2], room[0, :, width + 2 :], room[1, :, width:]
    assert all((cells == UNTOUCHED).all() for cells in beside)


BREAKAGES = {
    "a source there is not": (0, 9),
    "a negative source": (0, -1),
    "a sequence there is not": (1, 10**12),
    "a negative sequence": (1, -1),
    "a negative offset": (2, -1),
    "an offset beyond the sequence": (2, 2**62),
    "a negative length": (3, -1),
    "a length beyond the sequence": (3, 2**63 - 1),
}


@given(seed=st.integers(0, 2**32 - 1), what=st.sampled_from(sorted(BREAKAGES)))
def test_a_bad_run_is_named_and_nothing_written(backend: Any, seed: int, what: str) -> None:
    rng = np.random.default_rng(seed)
    batch = Batch.random(rng, ["uint16", "int32"], "int64", True)
    runs = batch.runs[1].size
    if runs == 0:
        return
    bad = sorted(rng.choice(runs, min(runs, 2), replace=False).tolist())
    column, value = BREAKAGES[what]
    batch.runs[column][bad] = value
    assert batch.call(backend) == bad[0]
    assert batch.labels is not None
    assert (batch.out == UNTOUCHED).all()
    assert (batch.labels == UNTOUCHED).all()


@for_each(
    ("pointer", "length"),
    [(-2, 3), (1, 3), (2 * 9, 3), (2**62, 3), (-(2**63), 3), (0, -1), (2**63 - 2, 2**31 - 1)],
)
def test_a_sequence_outside_its_file_is_a_bad_run(backend: Any, pointer: int, length: int) -> None:
    """Ten tokens of two bytes."""
    damaged = np.array([0, pointer]), np.array([3, length], np.int32)
    table = backend.token_table([(np.arange(10, dtype=np.uint16), *damaged)])
    out = np.full((1, 4), UNTOUCHED, np.int64)
    ones, splits = np.ones(2, np.int64), np.array([0, 2])
    bad = backend.gather(
        table, np.zeros(2, np.int32), np.array([0, 1]), ones, ones, splits, out, None, PAD
    )
    # a run inside what is there of the sequence is fine, and this sequence has nothing there
    assert bad == 1
    assert (out == UNTOUCHED).all()


def test_the_last_token_of_the_file_can_be_read(backend: Any) -> None:
    table = backend.token_table(
        [(np.arange(10, dtype=np.uint16), np.array([14]), np.array([3], np.int32))]
    )
    out = np.zeros((1, 3), np.int64)
    run = np.zeros(1, np.int32), np.array([0]), np.array([0]), np.array([3]), np.array([0, 1])
    assert backend.gather(table, *run, out, None, PAD) == -1
    assert out.tolist() == [[7, 8, 9]]


def test_an_empty_table_and_empty_sources(backend: Any) -> None:
    none = np.zeros(0, np.int64)
    out = np.zeros((2, 3), np.int64)
    nothing = none.astype(np.int32), none, none, none, np.zeros(3, np.int64)
    for sources in ([], [(np.zeros(0, np.uint16), np.array([0]), np.array([0], np.int32))]):
        out[:] = 0
        assert backend.gather(backend.token_table(sources), *nothing, out, None, PAD) == -1
        assert (out == PAD).all()
    zero = np.zeros(1, np.int64)
    empty_run = zero.astype(np.int32), zero, zero, zero, np.array([0, 1, 1])
    assert backend.gather(backend.token_table(sources), *empty_run, out, None, PAD) == -1


@for_each("out", sorted(HELD))
@for_each("dtype", TOKEN_DTYPES)
def test_an_output_that_could_overflow_is_refused(backend: Any, dtype: str, out: str) -> None:
    table = backend.token_table([(np.ones(4, dtype), np.array([0]), np.array([4], np.int32))])
    rows = np.zeros((1, 4), out)
    run = np.zeros(1, np.int32), np.array([0]), np.array([0]), np.array([4]), np.array([0, 1])
    if dtype in HELD[out]:
        assert backend.gather(table, *run, rows, None, 0) == -1
        assert rows.tolist() == [[1, 1, 1, 1]]
    else:
        with pytest.raises(InvalidArgument, match="does not hold every token"):
            backend.gather(table, *run, rows, None, 0)


def test_threads_change_nothing() -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    tokens = np.random.default_rng(1).integers(0, 60_000, 700_001).astype(np.uint16)
    table = native.token_table([(tokens, np.array([2]), np.array([700_000], np.int32))])
    rows, width = 12, 50_000
    offset = np.arange(rows, dtype=np.int64) * width
    runs = np.zeros(rows, np.int32), np.zeros(rows, np.int64), offset
    length, splits = np.full(rows, width + 1), np.arange(rows + 1)
    results = []
    for threads in (1, 2, 5):
        pair = np.zeros((2, rows, width), np.int64)
        assert native.gather(table, *runs, length, splits, pair[0], pair[1], PAD, threads) == -1
        results.append(pair)
    np.testing.assert_array_equal(results[0][0].ravel(), tokens[1 : rows * width + 1])
    np.testing.assert_array_equal(results[0][1].ravel(), tokens[2 : rows * width + 2])
    assert all(np.array_equal(results[0], other) for other in results[1:])


@for_each(
    ("change", "message"),
    [
        ({"out": np.zeros((2, 4), np.int64)}, r"out: expected int64\(1, 4\)"),
        ({"out": np.zeros((1, 4), np.int16)}, "out: expected int64"),
        ({"out": np.zeros(4, np.int64)}, "two-dimensional"),
        ({"out": np.zeros((1, 8), np.int64)[:, ::2]}, "must be contiguous"),
        ({"out": np.frombuffer(bytes(32), np.int64).reshape(1, 4)}, "read-only"),
        ({"labels": np.zeros((1, 4), np.int32)}, "labels: expected int64"),
        ({"labels": [[0] * 4]}, "expected a numpy array or None"),
        ({"row_splits": np.array([0, 2])}, "row_splits: must rise"),
        ({"row_splits": np.array([1, 1])}, "row_splits: must rise"),
        ({"row_splits": np.zeros(0, np.int64)}, "row_splits: must have at least one entry"),
        ({"source": np.zeros(1, np.int64)}, "source: expected a 1-dimensional int32"),
        ({"length": np.zeros(2, np.int64)}, "length: expected 1 entries"),
        ({"out": np.zeros((1, 4), np.int32), "pad_id": 2**31}, "pad_id: does not fit"),
    ],
)
def test_the_native_core_checks(change: dict[str, Any], message: str) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    table = native.token_table([(np.ones(4, np.uint16), np.array([0]), np.array([4], np.int32))])
    call: dict[str, Any] = {
        "source": np.zeros(1, np.int32),
        "document": np.array([0]),
        "offset": np.array([0]),
        "length": np.array([4]),
        "row_splits": np.array([0, 1]),
        "out": np.zeros((1, 4), np.int64),
        "labels": None,
        "pad_id": 0,
    }
    assert native.gather(table, **call) == -1
    with pytest.raises(InvalidArgument, match=message):
        native.gather(table, **{**call, **change})


def test_the_native_table_checks_and_keeps_its_arrays() -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    pointers, lengths = np.array([0]), np.array([3], np.int32)
    with pytest.raises(InvalidArgument, match="pointers, lengths: must have equal lengths"):
        native.token_table([(np.zeros(3, np.uint16), pointers, np.zeros(2, np.int32))])
    with pytest.raises(InvalidArgument, match="tokens: expected a 1-dimensional"):
        native.token_table([(np.zeros((3, 1), np.uint16), pointers, lengths)])
    with pytest.raises(InvalidArgument, match="contiguous"):
        native.token_table([(np.zeros(6, np.uint16)[::2], pointers, lengths)])
    # nothing but the table holds these arrays
    table = native.token_table([(np.arange(3, dtype=np.uint16), pointers.copy(), lengths.copy())])
    out = np.zeros((1, 3), np.int64)
    run = np.zeros(1, np.int32), np.array([0]), np.array([0]), np.array([3]), np.array([0, 1])
    assert native.gather(table, *run, out, None, 0) == -1
    assert out.tolist() == [[0, 1, 2]]


def test_the_reference_agrees_with_the_definition() -> None:
    """Runs of 5 6 7 and 8, and a row of three cells."""
    table = [(np.array([5, 6, 7, 8], np.uint8), np.array([0, 3]), np.array([3, 1], np.int32))]
    out, labels = np.zeros((1, 3), np.int64), np.zeros((1, 3), np.int64)
    zeros = np.zeros(2, np.int64)
    load("reference").gather(
        table, zeros.astype(np.int32), np.array([0, 1]), zeros, np.array([3, 1]), np.array([0, 2]),
        out, labels, PAD,
    )  # fmt: skip
    assert (out.tolist(), labels.tolist()) == ([[5, 6, 7]], [[6, 7, 8]])
