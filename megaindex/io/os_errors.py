"""Conversion of OSError to StorageError, with file, action, reason and remedy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from megaindex.errors import MissingFile, StorageError

_WRITING = ("cannot write", "cannot create", "cannot publish", "cannot replace")
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; check the path",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "a symbolic link is circular, or is not allowed here; remove it",
    errno.EISDIR: "a file is expected, not a directory; check the path",
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
    """Convert an OSError raised inside: `action` ("cannot …") failed for `path`.

    A StorageError passes unchanged, as it names its file already.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, path, action) from error


def storage_error(error: OSError, path: str, action: str) -> StorageError:
    """Return `error` as a StorageError, or MissingFile for ENOENT, with its errno."""
    kind = MissingFile if error.errno == errno.ENOENT else StorageError
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedy = _REMEDIES.get(error.errno or 0, "check the device and the file system, then try again")
    if error.errno == errno.ENOENT and action.startswith(_WRITING):
        remedy += "; missing directories are not created"
    typed = kind(f"{path}: {action}: {reason}; {remedy}")
    typed.errno = error.errno
    return typed
