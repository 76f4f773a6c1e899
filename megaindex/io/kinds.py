"""What stands at a path that should be a file: pipes and devices are refused, not waited for."""

from __future__ import annotations

import os
import stat

from megaindex.errors import StorageError
from megaindex.io.failures import as_storage_error

_KINDS = (
    (stat.S_ISREG, "a file"),
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


def open_regular(path: str) -> int:
    """A descriptor of the regular file at `path`, to read from.

    Raises:
        MissingFile: there is none.
        StorageError: it is something else, or cannot be opened.
    """
    with as_storage_error(path, "cannot open"):
        # opening a pipe that nobody writes would wait
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            check_regular(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor
