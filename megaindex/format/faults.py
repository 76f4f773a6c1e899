"""A rule of a format, broken: readers raise it, `megaindex verify` lists it."""

from __future__ import annotations

from dataclasses import dataclass

from megaindex.errors import FormatError

RESTORE = "restore the file or write the pair again"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One place where a file breaks one rule."""

    rule: str
    """Short name of the rule, the same for every file: "header-size"."""
    where: str
    """"byte 0", "sequence 3", "document bound 7"."""
    found: str
    expected: str
    text: str
    """All of it in a sentence."""
    remedy: str = RESTORE

    def error(self, path: str) -> FormatError:
        """What a reader raises who may not go on."""
        return FormatError(f"{path}: {self.text}; {self.remedy}")
