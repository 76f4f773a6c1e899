"""What a file or an object was found to be."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """A file, or an object of a store."""

    path: str
    """Or URL."""
    nbytes: int
    version: str = ""
    """What its store knows the content by; a file has none, and is watched in other ways."""
