"""JSON objects in files that anybody may have damaged or put there."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

from megaindex.io.paths import open_at_once

_LONGEST = 1 << 28  # bytes; a snapshot of a blend of 32,767 datasets has a tenth of that


class Damaged(ValueError):
    """The file does not contain a JSON object; the text says why, and goes on "it …"."""


def read_object(
    path: str | os.PathLike[str], *, longest: int = _LONGEST, follow: bool = True
) -> dict[str, Any]:
    """Return the JSON object in a regular file; nothing else is waited for, or read to its end.

    Args:
        longest: bytes that it may have.
        follow: a symbolic link, which is `Damaged` else.

    Raises:
        OSError: it is not there, or cannot be read.
        Damaged: it holds no JSON object.
    """
    try:
        descriptor = open_at_once(path, follow=follow)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise Damaged("it is a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > longest:
            raise Damaged(f"it is no regular file of at most {longest} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return parse_object(file.read(status.st_size))
    finally:
        os.close(descriptor)


def is_size(value: object) -> bool:
    """Whether a value is a whole number that arrays and files may have of bytes or entries."""
    return type(value) is int and 0 <= value < 2**63


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that is written there, or `Damaged`."""
    try:
        found = json.loads(text)
    except ValueError as error:  # of no UTF-8, and of integers of thousands of digits too
        raise Damaged(f"it is no JSON: {error}") from error
    except RecursionError:  # [[[[…
        raise Damaged("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise Damaged("it is no JSON object")
    return found
