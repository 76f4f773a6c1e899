"""Decisions drawn from the bytes a fuzzer mutates: equal bytes, equal decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# Where arithmetic of some width ends, and what becomes negative in it.
EXTREMES = (
    *(-1, -2, -(2**31), -(2**63)),
    *(2**k + d for k in (7, 8, 15, 16, 31, 32, 62, 63, 64) for d in (-1, 0, 1)),
)


class Choices:
    """Reads decisions from the front; when the bytes run out every decision is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        return self.byte() % count

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def seldom(self) -> bool:
        """True for about one byte in sixteen; most of an input stays as it should be."""
        return self.byte() >= 240

    def integer(self, usual: int) -> int:
        """Mostly 0 ... usual, now and then an extreme."""
        return self.one_of(EXTREMES) if self.seldom() else self.below(usual + 1)

    def rest(self) -> bytes:
        return self._data[self._at :]
