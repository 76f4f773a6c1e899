"""What checkpoints hold, read field by field: each is checked before any of them is used.

A checkpoint passes through JSON, torch's pickles and hands. What is wrong in it is a FormatError
that names the field, the rule and the value, however long or deep that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.plain import check_integer, shown
from megaindex.kernels.sizes import INT64_MAX

_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True)
class Stored:
    """A mapping of a checkpoint, and what it is to be: ``the state of a sampler``."""

    what: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise self.wrong("it must be a mapping", self.values)
        for key in self.values:
            if not isinstance(key, str):
                raise self.wrong("its keys must be text", key)

    def wrong(self, rule: str, value: object) -> FormatError:
        """To be raised: the rule that a value breaks."""
        return FormatError(
            f"not {self.what}: {rule}, got {shown(value)}; take it from an intact checkpoint"
        )

    def field(self, name: str, rule: str) -> Any:
        """Any value that is there."""
        if name not in self.values:
            raise FormatError(
                f"not {self.what}: it has no {name}, which {rule}; take it from an intact "
                "checkpoint"
            )
        return self.values[name]

    def checked(self, name: str, rule: str, is_right: Callable[[Any], bool]) -> Any:
        """A value that keeps the rule, as ``is_right`` knows it."""
        value = self.field(name, rule)
        if not is_right(value):
            raise self.wrong(f"{name} {rule}", value)
        return value

    def check_version(self, reads: int) -> None:
        version = self.field("version", f"must be {reads}")
        if type(version) is not int or version != reads:
            raise FormatError(
                f"not {self.what}: it has version {shown(version)}, this release reads {reads}; "
                "use the release that wrote it, or take it from an intact checkpoint"
            )

    def whole(self, name: str, *, least: int = 0, most: int = INT64_MAX) -> int:
        """A whole number in these bounds; truth values are none.

        Integers of NumPy are: pickled states may hold those that a sampler was once given.
        """
        rule = f"must be a whole number from {least} to {most}"
        value = self.field(name, rule)
        try:
            number = check_integer(name, value)
        except InvalidArgument:
            number = least - 1
        if isinstance(value, bool) or not least <= number <= most:
            raise self.wrong(f"{name} {rule}", value)
        return number

    def text(self, name: str) -> str:
        return str(self.checked(name, "must be text", lambda value: isinstance(value, str)))

    def hashed(self, name: str) -> str:
        """32 hex digits."""
        return str(self.checked(name, "must be 32 hex digits", _is_hash))

    def flag(self, name: str) -> bool:
        rule = "must be true or false"
        return bool(self.checked(name, rule, lambda value: isinstance(value, bool)))

    def part(self, name: str, what: str) -> Stored:
        """A mapping inside this one."""
        rule = "must be a mapping"
        return Stored(what, self.checked(name, rule, lambda value: isinstance(value, Mapping)))


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)


def differ(theirs: object, ours: object) -> bool:
    """Whether what a checkpoint holds is something else than what is there now."""
    try:
        return bool(theirs != ours)
    except (ValueError, RuntimeError):  # of arrays, and of what has no end
        return True
