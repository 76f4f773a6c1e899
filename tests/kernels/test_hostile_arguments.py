"""Arguments that once led the native core outside its arrays, or to an error of no type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megaindex.errors import InvalidArgument
from megaindex.kernels import load

pytest.importorskip("megaindex.kernels._native")
native: Any = load("native")
ONE = np.ones(1)


def test_checkpoints_of_no_dataset() -> None:
    with pytest.raises(InvalidArgument, match="at least one dataset"):
        native.blend_checkpoints(ONE[:0], 100, 10)


@pytest.mark.parametrize("size", [2**63 - 1, 2**62])
def test_checkpoints_that_no_array_can_hold(size: int) -> None:
    """size // stride + 1 rows: one more than 2^63 - 1 is negative."""
    with pytest.raises(InvalidArgument, match="at most 2\\*\\*40 rows"):
        native.blend_checkpoints(ONE, size, 1)


@pytest.mark.parametrize("function", ["token_table", "span_table"])
@pytest.mark.parametrize("sources", [[1], [(ONE,)], [(ONE, ONE, "x")], [None]])
def test_tables_of_what_are_no_arrays(function: str, sources: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected a"):
        getattr(native, function)(sources)
