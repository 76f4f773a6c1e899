"""What stands at a path that should be a file: pipes and devices are refused, not waited for."""

from __future__ import annotations

import os
import stat

from megaindex.errors import StorageError
from megaindex.io.failures import as_storage_error

_A_FILE = "a file"
_KINDS = (
    (stat.S_ISREG, _A_FILE),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """What a file of that `st_mode` is, with its article."""
    return next((kind for is_one, kind in _KINDS if is_one(mode)), "no file")


def check_regular(path: str, status: os.stat_result) -> None:
    """StorageError unless that is the status of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(
            f"{path}: is {kind_of(status.st_mode)}, not a regular file; check the path"
        )


def open_at_once(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor to read from, of whatever is there: a pipe that nobody writes is not waited for.

    Raises:
        OSError: nothing is there, it cannot be opened, or, unless ``follow``, it is a symbolic link
            (ELOOP).
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    return os.open(path, flags)


def open_regular(path: str, action: str = "cannot open") -> int:
    """A descriptor of the regular file at `path`, to read from; `action` is for messages.

    Raises:
        MissingFile: there is none.
        StorageError: it is something else, or cannot be opened.
    """
    with as_storage_error(path, action):
        descriptor = open_at_once(path)
        try:
            check_regular(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def odd_kind(path: str) -> str:
    """What is at `path` in the place of a file, with its article, where links lead to; empty for a
    file.

    Raises:
        MissingFile: nothing is.
        StorageError: it cannot be looked at.
    """
    with as_storage_error(path, "cannot look at it"):
        kind = kind_of(os.stat(path).st_mode)
    return "" if kind == _A_FILE else kind


def check_file(path: str, action: str = "cannot open") -> None:
    """Before a library opens it by name, which would wait for a pipe; `action` is for messages.

    Raises:
        MissingFile: there is nothing at `path`.
        StorageError: it is no regular file, or cannot be looked at.
    """
    with as_storage_error(path, action):
        check_regular(path, os.stat(path))
