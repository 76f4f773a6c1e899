"""Keys of rows: equal on every backend, of input tokens alone, and without the pass in content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import active, load
from megaindex.keys.row_content import content

CONTENTS = np.array([[1, 2], [2**64 - 1, 5]], np.uint64)


def keys_of(backend: Any, spans: list[Any], width: int, exposures: Any) -> list[np.ndarray]:
    """Exposure, source, key and high word of rows: source, document, offset, length and splits."""
    rows = len(exposures)
    positions, numbers = 100 + np.arange(rows), np.arange(rows) * 3 + 1
    passes = np.append(np.array(exposures, np.int64), 9)
    starts = np.append(numbers, 3 * rows + 1)
    samples, keys, high = (np.full(rows, 7) for _ in range(3))
    sources, found = (np.full(rows, 7, np.int32) for _ in range(2))
    given = [positions, numbers, *spans, width, CONTENTS, starts, passes, samples, sources, found]
    alone = np.full(rows, 7)
    backend.row_keys(*given, alone, np.empty(0, np.int64))
    backend.row_keys(*given, keys, high)
    np.testing.assert_array_equal(alone, keys)
    np.testing.assert_array_equal(samples, np.where(found < 0, -1, positions))
    return [found, sources, keys, high]


def one_run_each(*columns: Any) -> list[Any]:
    document, offset, length = (np.array(column) for column in columns)
    zeros = np.zeros(document.size, np.int32)
    return [zeros, document, offset, length, np.arange(document.size + 1)]


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 40))
def test_every_backend_writes_the_same(backend: Any, seed: int, rows: int) -> None:
    generator = np.random.default_rng(seed)
    splits = np.concatenate(([0], np.cumsum(generator.integers(0, 5, rows)))).astype(np.int64)
    runs = int(splits[-1])
    wide = [generator.integers(0, 2 ** int(generator.integers(1, 63)), runs) for _ in range(3)]
    wide[2][generator.random(runs) < 0.2] = 0
    sources = generator.integers(0, 2, runs).astype(np.int32)
    width = int(generator.integers(0, 2 ** int(generator.integers(1, 63))))
    spans = [sources, *wide, splits]
    exposures = generator.integers(0, 2**31, rows).tolist()
    ours = keys_of(backend, spans, width, exposures)
    for mine, theirs in zip(ours, keys_of(load("reference"), spans, width, exposures), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype


def test_keys_are_those_written_down(backend: Any) -> None:
    """Stores of joined arrays hold them."""
    spans = [np.array([0, 1, 0], np.int32), np.array([5, 5, 6]), np.array([0, 3, 0])]
    spans += [np.array([9, 2, 7]), np.array([0, 1, 3])]
    _, sources, keys, high = keys_of(backend, spans, 8, [0, 3])
    assert sources.tolist() == [0, 1]
    assert keys.tolist() == KEYS
    assert high.tolist() == HIGH


KEYS = [1691923769284850273, 4576418894235983095]
HIGH = [3692511818181849499, 1414300975076698257]


def test_a_row_ends_with_its_last_input_token(backend: Any) -> None:
    """Of runs of 5 and 4 tokens, 8 are input; a run that only has the label is left out."""
    two = [np.zeros(2, np.int32), np.array([3, 4]), np.array([0, 0])]
    splits = np.array([0, 2])
    rows = [
        keys_of(backend, [*two, np.array(lengths), splits], 8, [0])[2:]
        for lengths in ((5, 4), (5, 3), (8, 1), (5, 2))
    ]
    assert rows[0] == rows[1]
    assert rows[2] == keys_of(backend, one_run_each([3], [0], [8]), 8, [0])[2:]
    assert rows[1] != rows[3]


def test_rows_without_input_are_padding(backend: Any) -> None:
    spans = [np.ones(2, np.int32), np.array([3, 3]), np.array([0, 0]), np.array([0, 4])]
    exposures, sources, keys, high = keys_of(backend, [*spans, np.array([0, 0, 1, 2])], 8, [5] * 3)
    assert exposures.tolist() == [-1, -1, 5]
    assert sources.tolist() == [-1, -1, 1]
    assert keys.tolist()[:2] == [0, 0] != high.tolist()[2:]
    assert high.tolist()[:2] == [0, 0]
    assert content(keys, exposures, high).tolist()[:2] == [[0, 0]] * 2


def test_every_field_counts() -> None:
    """20,000 neighbours in document, offset, length and exposure: no key twice."""
    axis = np.arange(1, 13)
    grid = np.stack(np.meshgrid(axis, axis, axis, axis), axis=-1).reshape(-1, 4)
    *columns, exposure = np.ascontiguousarray(grid.T)
    _, _, keys, high = keys_of(active(), one_run_each(*columns), 99, exposure)
    assert np.unique(keys).size == len(grid)
    assert np.unique(high).size == len(grid) // axis.size  # which has no exposure
    bits = np.unpackbits(np.stack((keys, high)).view(np.uint8))  # about half of them are set
    assert abs(bits.mean() - 0.5) < 0.002


def test_content_is_the_same_in_every_pass() -> None:
    generator = np.random.default_rng(2)
    spans = one_run_each(*generator.integers(1, 2**31, (3, 1000)))
    exposures = generator.integers(1, 2**31, 1000)
    passes, _, keys, high = keys_of(active(), spans, 2**31, exposures)
    first, _, once, _ = keys_of(active(), spans, 2**31, np.zeros(1000))
    assert (keys != once).all()
    expected = content(once, first)
    np.testing.assert_array_equal(content(keys, passes), expected)
    np.testing.assert_array_equal(content(keys.astype(np.uint64), passes), expected)
    wide = content(keys, passes, high)
    np.testing.assert_array_equal(wide, np.stack((expected, high), -1))
    assert wide.dtype == expected.dtype == np.int64
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(each) for each in (keys, passes, high)]
    np.testing.assert_array_equal(content(*tensors).numpy(), wide)
    assert int(content(int(keys[0]), int(passes[0]))) == expected[0]


def test_content_refuses_what_is_no_key() -> None:
    with pytest.raises(InvalidArgument, match="key must hold integers"):
        content([0.5], [0])
    with pytest.raises(InvalidArgument, match="exposure must hold integers"):
        content([1], [0.5])
    assert content([], []).tolist() == []
    torch = pytest.importorskip("torch")
    key = torch.tensor([5])
    assert torch.equal(content(key, [0]), content(key, torch.tensor([0])))
    for fields, name in (((key * 1.0, key), "key"), ((key, key * 1.0), "exposure")):
        with pytest.raises(InvalidArgument, match=f"{name} must hold integers"):
            content(*fields)


def test_the_pass_is_that_of_the_last_start_up_to_a_number(backend: Any) -> None:
    numbers = np.array([-1, 0, 4, 5, 6, 9, 99])
    spans = one_run_each(*np.ones((3, 7), np.int64))
    samples, keys = np.empty(7, np.int64), np.empty(7, np.int64)
    sources, found = np.empty(7, np.int32), np.empty(7, np.int32)
    starts, passes = np.array([0, 5, 5, 9]), np.array([3, 8, 1, 2])
    given = [numbers, numbers, *spans, 8, CONTENTS, starts, passes, samples, sources, found, keys]
    backend.row_keys(*given, np.empty(0, np.int64))
    assert found.tolist()[1:] == [3, 3, 1, 1, 2, 2]


@for_each(
    ("change", "message"),
    [
        ({2: np.array([2], np.int32)}, "must lie inside"),
        ({6: np.array([0, 2])}, "must lie inside"),
        ({11: np.zeros(2, np.int64)}, "one entry for each row"),
        ({14: np.zeros(2, np.int64)}, "one entry for each row"),
        ({15: np.zeros(2, np.int64)}, "one entry for each row"),
        ({14: np.zeros(0, np.int64)}, "one entry for each row"),
        ({3: np.array([1, 2])}, "expected 2 entries"),
        ({1: np.array([1, 2])}, "expected 1 entries"),
        ({10: np.array([1, 2])}, "expected 1 entries"),
        ({8: np.array([[1]], np.uint64)}, "expected two words"),
        ({9: np.zeros(0, np.int64), 10: np.zeros(0, np.int64)}, "starts: must have an entry"),
    ],
)
def test_the_native_core_checks(change: dict[int, Any], message: str) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    one, row = np.array([1]), np.zeros(1, np.int32)
    call: list[Any] = [one, one, row, one, one, one, np.array([0, 1]), 8, CONTENTS, one, one]
    call += [one.copy(), row.copy(), row.copy(), one.copy(), one.copy()]
    native.row_keys(*call)
    for place, value in change.items():
        call[place] = value
    with pytest.raises(InvalidArgument, match=message):
        native.row_keys(*call)
