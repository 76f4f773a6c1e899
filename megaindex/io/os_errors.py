"""Turn an OSError into a StorageError that names the file, what was tried, and what helps."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from megaindex.errors import MissingFile, StorageError

_WRITING = ("cannot write", "cannot create", "cannot publish", "cannot replace")
"""Beginnings of the actions that need a directory to be there."""
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; check the path",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "a symbolic link leads in a circle, or stands where none may be; remove it",
    errno.EISDIR: "a directory stands where a file should; check the path",
    errno.EACCES: "check the permissions of the file and of its directory",
    errno.EPERM: "check the permissions of the file and of its directory",
    errno.EROFS: "the file system is mounted read-only; choose a writable directory",
    errno.ENOSPC: "free some space or choose another file system",
    errno.EDQUOT: "free some of your quota or choose another file system",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another file system",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the whole machine is out of file handles; close some processes",
    errno.ENOMEM: "raise vm.max_map_count or the limit on virtual memory (ulimit -v)",
}


@contextlib.contextmanager
def as_storage_error(path: str, action: str) -> Iterator[None]:
    """Raise what goes wrong inside as a StorageError: `action` ("cannot …") failed for `path`.

    A StorageError from within passes unchanged: it already names the file it struck.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path, action) from error


def storage_error(error: OSError, path: str, action: str) -> StorageError:
    """The typed form of `error`; its `errno` is kept. A file that is not there is a MissingFile."""
    kind = MissingFile if error.errno == errno.ENOENT else StorageError
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedy = _REMEDIES.get(error.errno or 0, "check the device and the file system, then try again")
    if error.errno == errno.ENOENT and action.startswith(_WRITING):
        remedy += "; directories are not created for you"
    typed = kind(f"{path}: {action}: {reason}; {remedy}")
    typed.errno = error.errno
    return typed
