"""Conversion of tokens: values are stored exactly or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import InvalidArgument


def written(path: Path, tokens: Any, dtype: Any, **options: Any) -> list[Any]:
    """The tokens of a corpus of one document, read back."""
    with IndexedDatasetWriter(path / "w", dtype, overwrite=True, **options) as writer:
        writer.add_document(tokens)
    result: list[Any] = IndexedDataset(path / "w", **options)[0].tolist()
    return result


@for_each(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], dtype=np.uint64),
        np.array([1, 2, 3], dtype=">i4"),
        np.array([1.0, 2.0, 3.0]),
        np.arange(6)[1:4],
        np.array([1, 0, 2, 0, 3])[::2],
        np.array([3, 2, 1], dtype=np.uint16)[::-1],
        np.array([3, 2, 1], dtype=np.uint8)[::-1],
    ],
)
@for_each("dtype", [np.uint8, np.uint16, np.int32, "int64", np.float32])
def test_any_array_like(tmp_path: Path, tokens: Any, dtype: Any) -> None:
    assert written(tmp_path, tokens, dtype) == [1, 2, 3]


@for_each(
    ("dtype", "values"),
    [
        (np.uint8, [0, 255]),
        (np.int8, [-128, 127]),
        (np.uint16, [0, 65535]),
        (np.int32, [-(2**31), 2**31 - 1]),
        (np.int64, [-(2**63), 2**63 - 1]),
        (np.int64, np.array([-(2.0**63), 2.0**62])),
        (np.uint8, np.array([0.0, 255.0], dtype=np.float16)),
        (np.float32, [-(2**24), 2**24]),
        (np.float32, np.array([2**24], dtype=np.uint64)),
        (np.float32, [0.5, float("inf")]),
        (np.float64, [-(2**53), 2**53]),
    ],
)
def test_extremes_that_fit(tmp_path: Path, dtype: Any, values: Any) -> None:
    assert written(tmp_path, values, dtype) == np.asarray(values).tolist()


@for_each(
    ("dtype", "values", "first_bad"),
    [
        (np.uint8, [0, 256], "tokens[1]=256: does not fit uint8, which holds 0..255"),
        (np.uint8, [-1], "tokens[0]=-1"),
        (np.int8, [5, 128], "tokens[1]=128"),
        (np.uint16, np.array([65535, 65536, 70000]), "tokens[1]=65536"),
        (np.int32, [2**31], "tokens[0]=2147483648"),
        (np.int64, [2**63], "tokens[0]=9223372036854775808"),
        (np.int64, np.array([1.0, 2.0**63]), "tokens[1]="),
        (np.int32, [1.0, 2.5], "tokens[1]=2.5"),
        (np.int32, [float("nan")], "tokens[0]=nan"),
        (np.int32, [float("inf")], "tokens[0]=inf"),
        (np.int32, np.array([-(2.0**31) - 1]), "tokens[0]=-2147483649.0"),
        (np.float32, [1, 2**24 + 1], "tokens[1]=16777217: does not fit float32"),
        (np.float32, [-(2**24) - 1], "tokens[0]=-16777217"),
        (np.float32, np.array([2**63], dtype=np.uint64), "tokens[0]="),
        (np.float32, [1e39], "tokens[0]=1e+39"),
        (np.float64, [2**53 + 1], "tokens[0]=9007199254740993"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, dtype: Any, values: Any, first_bad: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        written(tmp_path, values, dtype)
    assert first_bad in str(caught.value)
    assert "choose a wider dtype" in str(caught.value)


def test_a_misfit_beyond_the_first_chunk_is_numbered_from_the_beginning(tmp_path: Path) -> None:
    tokens = np.zeros((1 << 18) + 10, dtype=np.int32)
    tokens[(1 << 18) + 7] = 300
    with pytest.raises(InvalidArgument, match=rf"tokens\[{(1 << 18) + 7}\]=300"):
        written(tmp_path, tokens, np.uint8)


@for_each(
    ("tokens", "rule"),
    [
        ([[1, 2], [3, 4]], r"one-dimensional, got shape \(2, 2\)"),
        (7, r"one-dimensional, got shape \(\)"),
        ([[1], [2, 3]], "must be an array of numbers"),
        (["a"], "must be numbers"),
        ([True, False], "must be numbers that fit int32, got bool"),
        ([1j], "must be numbers"),
        ([2**70], "must be numbers"),
        ([None], "must be numbers"),
    ],
)
def test_tokens_of_the_wrong_kind(tmp_path: Path, tokens: Any, rule: str) -> None:
    with pytest.raises(InvalidArgument, match=f"tokens .*{rule}"):
        written(tmp_path, tokens, np.int32)


def test_paddlenlp_types(tmp_path: Path) -> None:
    assert written(tmp_path, [2**64 - 1], np.uint64, dialect="paddlenlp") == [2**64 - 1]
    assert written(tmp_path, [2**32 - 1], np.uint32, dialect="paddlenlp") == [2**32 - 1]
