"""Reader of JSON objects from untrusted files."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

from megaindex.io.paths import open_at_once

_LONGEST = 1 << 28  # bytes; a snapshot of a blend of 32,767 datasets has a tenth of that


class Damaged(ValueError):
    """The file does not contain a JSON object; the reason begins with "it"."""


def read_object(
    path: str | os.PathLike[str], *, longest: int = _LONGEST, follow: bool = True
) -> dict[str, Any]:
    """Return the JSON object in a regular file; arguments and errors are those of `read_regular`.

    Raises:
        Damaged: it does not contain a JSON object.
    """
    return parse_object(read_regular(path, longest=longest, follow=follow))


def read_regular(
    path: str | os.PathLike[str], *, longest: int = _LONGEST, follow: bool = True
) -> bytes:
    """Return the bytes of a regular file, without waiting for a pipe.

    Args:
        longest: maximum size in bytes.
        follow: follow a symbolic link, which otherwise raises `Damaged`.

    Raises:
        OSError: the file does not exist or cannot be read.
        Damaged: it is not a regular file, or too long.
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
            raise Damaged(f"it is not a regular file of at most {longest} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(descriptor)


def is_size(value: object) -> bool:
    """Return True for an integer that can be a number of bytes or entries."""
    return type(value) is int and 0 <= value < 2**63


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a text, or raise `Damaged`."""
    try:
        found = json.loads(text)
    except ValueError as error:  # also for invalid UTF-8, and integers of thousands of digits
        raise Damaged(f"it is not valid JSON: {error}") from error
    except RecursionError:
        raise Damaged("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise Damaged("it is not a JSON object")
    return found
