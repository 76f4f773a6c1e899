"""What a file or an object was found to be."""

from __future__ import annotations

import os
from typing import NamedTuple


class Facts(NamedTuple):
    """A file, or an object of a store."""

    path: str
    """Or URL."""
    nbytes: int
    version: str = ""
    """What its store knows the content by; of a file, when it was last written to."""


def version_of(status: os.stat_result) -> str:
    """Of a file. Not its inode, which differs between machines, and which some mounted object
    stores give anew; whoever keeps a file open compares that too."""
    seconds, fraction = divmod(status.st_mtime_ns, 10**9)
    return f"of {seconds}.{fraction:09}"
