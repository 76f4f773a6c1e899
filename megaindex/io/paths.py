"""Paths and URLs as text, file types and file information.

Keys of objects are used as written, without percent-encoding, as by the stores' own tools. A
``file:`` URL is converted to a plain path.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from megaindex.errors import InvalidArgument, StorageError
from megaindex.io.os_errors import as_storage_error

SCHEMES = ("s3", "gs", "az")
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"} | dict.fromkeys(
    ("abfs", "abfss", "adl", "azure", "wasb", "wasbs"), "az"
)
# one slash matches URLs that pathlib has normalised
_URL = re.compile(rf"(?!file:)(?:[a-z][a-z0-9+.-]+://|({'|'.join(SCHEMES)}):/)", re.IGNORECASE)
_NO_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")
_FILE_URL = re.compile(r"file:(//)?(?=/)", re.IGNORECASE)  # pathlib drops two of the slashes
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


class FileInfo(NamedTuple):
    """Path or URL, size and version of a file or an object."""

    path: str
    nbytes: int
    version: str = ""
    """The store's version tag of an object; the modification time of a file."""


class ObjectLocation(NamedTuple):
    """Bucket and key of an object."""

    store: str
    """Such as ``s3://bucket``; each has one client."""
    key: str


def is_remote(path: str) -> bool:
    """Return True if a path is the URL of an object."""
    return ":" in path and _URL.match(path) is not None


def place_of(url: str) -> ObjectLocation:
    """Return bucket and key of a URL.

    Raises:
        InvalidArgument: the scheme is unknown, the key is invalid, or the URL may hold a secret,
            which the message omits.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidArgument(
            f"{without_secrets(url)}: a URL must have two slashes after its colon; pass it as a "
            "string, as pathlib drops one of them"
        )
    host, _, key = rest.partition("/")
    if any(sign in host for sign in "@:") or "?" in rest:
        part = "a query, as in signed URLs" if "?" in rest else "credentials or a port"
        raise InvalidArgument(
            f"{without_secrets(url)}: the URL must not hold {part}; access is set in the "
            "environment, see docs/objects.md"
        )
    if scheme.lower() not in SCHEMES:
        raise InvalidArgument(f"{url}: {_other_scheme(scheme.lower())}")
    if not key or not host:
        raise InvalidArgument(f"{url}: must name a bucket and a key in it, as s3://bucket/corpus")
    if _NO_KEY.search(key):
        raise InvalidArgument(
            f"{url!r}: a key must not have an empty part, '.', '..' or a control character; copy "
            "the object to another key"
        )
    return ObjectLocation(f"{scheme.lower()}://{host}", key)


def folder_of(url: str) -> ObjectLocation:
    """Return bucket and key prefix of a URL, empty for a whole bucket; raises as `place_of`."""
    store, key = place_of(f"{url.removesuffix('/')}/any")
    return ObjectLocation(store, key.removesuffix("any").removesuffix("/"))


def names_folder(url: str) -> bool:
    """Return True if a URL ends in a slash or names a bucket alone."""
    return url.endswith("/") or "/" not in url.partition("://")[2]


def _other_scheme(scheme: str) -> str:
    ours = _OTHER_NAMES.get(scheme)
    if ours is not None:
        example = "az://container/key" if ours == "az" else f"{ours}://bucket/key"
        return f"unsupported scheme {scheme}://; write the same location as {example}"
    known = ", ".join(f"{each}://" for each in SCHEMES)
    return f"the scheme must be one of {known}, got {scheme}://; copy the corpus to one of them"


def without_secrets(url: str) -> str:
    """Return a URL for messages, without the parts before an @ and after a question mark."""
    scheme, slashes, rest = re.split(r"(:/+)", url.partition("?")[0], maxsplit=1)
    if any(sign in rest.partition("/")[0] for sign in "@:"):  # secret keys may hold slashes
        rest = "…@" + rest.rpartition("@")[2] if "@" in rest else "…"
    return scheme + slashes + rest


def plain(path: str) -> str:
    """Return a path without the scheme ``file:``, without percent-decoding.

    Raises:
        InvalidArgument: the URL names another host.
    """
    found = _FILE_URL.match(path) if ":" in path else None
    if found is None:
        return path
    local = path[found.end() :]
    if local.startswith("//"):
        raise InvalidArgument(
            f"{without_secrets(path)}: must not name a host; write file:///path for a file of this "
            "machine"
        )
    return local


def absolute(path: str) -> str:
    """Return the absolute path; a URL unchanged."""
    return path if is_remote(path) else os.path.abspath(plain(path))


def inside(folder: Path, path: str) -> str:
    """Return a path relative to a folder; an absolute path or URL unchanged."""
    return path if is_remote(path) else str(folder / plain(path))


def refuse_zero_byte(path: str) -> None:
    """Raise InvalidArgument for a path with a zero byte."""
    if "\0" in path:
        raise InvalidArgument(f"{path!r}: must not hold a zero byte; check the path")


def check_local(path: str, remedy: str) -> None:
    """Raise InvalidArgument for a URL, or a path with a zero byte."""
    refuse_zero_byte(path)
    if plain(path) != path:
        raise InvalidArgument(f"{path}: is a URL; write the path alone, {plain(path)}")
    if is_remote(path):
        place_of(path)  # refuses URLs with secrets, which messages must not repeat
        raise InvalidArgument(f"{path}: lies in an object store; {remedy}")


def file_stamp(path: str) -> list[int]:
    """Return size, times and inode of a file, which change with its content; [] if it is missing.

    Writing or replacing a file changes its ctime, which programs cannot set.
    """
    try:
        status = os.stat(plain(path))
    except (OSError, ValueError):
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def version_of(status: os.stat_result) -> str:
    """Return the version of a file: its modification time, since inodes differ between machines
    and change on some mounted object stores."""
    return version_at(status.st_mtime_ns)


def version_at(modified: int) -> str:
    """Return the version of a file that was modified at this time, in nanoseconds."""
    seconds, fraction = divmod(modified, 10**9)
    return f"of {seconds}.{fraction:09}"


def kind_of(mode: int) -> str:
    """Return the type of a file of an `st_mode`, with its article."""
    return next((kind for is_one, kind in _KINDS if is_one(mode)), "no file")


def check_regular(path: str, status: os.stat_result) -> None:
    """Raise StorageError unless a status is that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(
            f"{path}: is {kind_of(status.st_mode)}, not a regular file; check the path"
        )


def open_at_once(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Return a descriptor for reading, of a file of any type, without waiting for a pipe.

    Raises:
        OSError: it does not exist, cannot be opened, or, unless ``follow``, is a symbolic link
            (ELOOP).
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    return os.open(path, flags)


def open_regular(path: str, action: str = "cannot open") -> int:
    """Return a descriptor for reading a regular file; `action` is for messages.

    Raises:
        MissingFile: the file does not exist.
        StorageError: it is not a regular file, or cannot be opened.
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
    """Return the type at `path`, with its article, after links; empty for a regular file.

    Raises:
        MissingFile: it does not exist.
        StorageError: its status cannot be read.
    """
    with as_storage_error(path, "cannot read its status"):
        kind = kind_of(os.stat(path).st_mode)
    return "" if kind == _A_FILE else kind


def check_file(path: str, action: str = "cannot open") -> None:
    """Check a path before a library opens it, which would wait for a pipe.

    Raises:
        MissingFile: it does not exist.
        StorageError: it is not a regular file, or its status cannot be read.
    """
    with as_storage_error(path, action):
        check_regular(path, os.stat(path))
