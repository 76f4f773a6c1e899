"""Numbers on both sides of a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from megaindex.errors import MegaIndexError


def check_bounds(
    make: Callable[[Any], object], inside: Iterable[Any], outside: Iterable[Any], says: str
) -> None:
    """Check that a function takes the values inside of its bounds and refuses those outside.

    Args:
        says: pattern of the message, the same for all values outside.
    """
    for value in inside:
        make(value)
    for value in outside:
        with pytest.raises(MegaIndexError, match=says):
            make(value)
