"""Paths and URLs as text, file types and file information.

Keys are taken as they are written, without percent-encoding, as the stores' own tools take them.

A ``file:`` URL is another way to write a plain path, and becomes that here.
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
# with one slash: what pathlib makes of a URL
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
    """A file, or an object of a store."""

    path: str
    """Or URL."""
    nbytes: int
    version: str = ""
    """The version tag of its store; of a file, the time when it was last written to."""


class ObjectLocation(NamedTuple):
    """The bucket and the key of an object."""

    store: str
    """As ``s3://bucket``: what one client is made for."""
    key: str


def is_remote(path: str) -> bool:
    """Return whether a path is a URL, so that an object store has what it names."""
    return ":" in path and _URL.match(path) is not None


def place_of(url: str) -> ObjectLocation:
    """Return the parts of a URL.

    Raises:
        InvalidArgument: it is of an unknown kind, or holds what might be a secret, which the
            message does not repeat.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidArgument(
            f"{without_secrets(url)}: a URL has two slashes after its colon; pass it as a string, "
            "as pathlib drops one of them"
        )
    host, _, key = rest.partition("/")
    if any(sign in host for sign in "@:") or "?" in rest:
        what = "a query, as signed URLs do" if "?" in rest else "credentials or a port"
        raise InvalidArgument(
            f"{without_secrets(url)}: the URL holds {what}; leave that out: access comes from the "
            "environment, as docs/objects.md says"
        )
    if scheme.lower() not in SCHEMES:
        raise InvalidArgument(f"{url}: {_other_scheme(scheme.lower())}")
    if not key or not host:
        raise InvalidArgument(f"{url}: must name a bucket and a key in it, as s3://bucket/corpus")
    if _NO_KEY.search(key):
        raise InvalidArgument(
            f"{url!r}: a key with an empty part, '.', '..' or a control character cannot be asked "
            "for; copy the object to another key"
        )
    return ObjectLocation(f"{scheme.lower()}://{host}", key)


def folder_of(url: str) -> ObjectLocation:
    """The parts of a URL whose key begins those of others; the key is empty for a whole bucket.

    Raises:
        InvalidArgument: as `place_of`.
    """
    store, key = place_of(f"{url.removesuffix('/')}/any")
    return ObjectLocation(store, key.removesuffix("any").removesuffix("/"))


def names_folder(url: str) -> bool:
    """Whether a URL ends in a slash, or names a bucket alone, so that it can be no object."""
    return url.endswith("/") or "/" not in url.partition("://")[2]


def _other_scheme(scheme: str) -> str:
    ours = _OTHER_NAMES.get(scheme)
    if ours is not None:
        example = "az://container/key" if ours == "az" else f"{ours}://bucket/key"
        return f"{scheme}:// is not a scheme here; write the same place as {example}"
    known = ", ".join(f"{each}://" for each in SCHEMES)
    return f"corpora are read from {known} and from files; copy it to one of them"


def without_secrets(url: str) -> str:
    """For messages: neither what is before an @ nor what is after a question mark. Secret keys may
    hold slashes, so that the host may seem to end before the @."""
    scheme, slashes, rest = re.split(r"(:/+)", url.partition("?")[0], maxsplit=1)
    if any(sign in rest.partition("/")[0] for sign in "@:"):
        rest = "…@" + rest.rpartition("@")[2] if "@" in rest else "…"
    return scheme + slashes + rest


def plain(path: str) -> str:
    """Return a path without the scheme ``file:``; any other as it is. Nothing is percent-decoded.

    Raises:
        InvalidArgument: the URL names a file of another machine.
    """
    found = _FILE_URL.match(path) if ":" in path else None
    if found is None:
        return path
    local = path[found.end() :]
    if local.startswith("//"):
        raise InvalidArgument(
            f"{without_secrets(path)}: names another machine; write file:///path for a file here"
        )
    return local


def absolute(path: str) -> str:
    """Return a path that means the same place from any directory."""
    return path if is_remote(path) else os.path.abspath(plain(path))


def inside(folder: Path, path: str) -> str:
    """A path that is written relative to a folder; absolute ones and URLs stay as they are."""
    return path if is_remote(path) else str(folder / plain(path))


def refuse_zero_byte(path: str) -> None:
    """InvalidArgument for what no file system takes as a path."""
    if "\0" in path:
        raise InvalidArgument(f"{path!r}: holds a zero byte, as no path does; check the path")


def check_local(path: str, remedy: str) -> None:
    """InvalidArgument for a URL where only files will do, or for what cannot be a path."""
    refuse_zero_byte(path)
    if plain(path) != path:
        raise InvalidArgument(f"{path}: is a URL; write the path alone, {plain(path)}")
    if is_remote(path):
        place_of(path)  # refuses URLs that must not be repeated
        raise InvalidArgument(f"{path}: lies in an object store; {remedy}")


def file_stamp(path: str) -> list[int]:
    """Return size, times and inode of a file, which change with its content; [] for no file.

    What is written or replaced gets another time of change (ctime), which no program sets at will.
    """
    try:
        status = os.stat(plain(path))
    except (OSError, ValueError):
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def version_of(status: os.stat_result) -> str:
    """Of a file. Not its inode, which differs between machines, and which some mounted object
    stores give anew; whoever keeps a file open compares that too."""
    return version_at(status.st_mtime_ns)


def version_at(modified: int) -> str:
    """Return the version of a file that was last written to at that time, in nanoseconds."""
    seconds, fraction = divmod(modified, 10**9)
    return f"of {seconds}.{fraction:09}"


def kind_of(mode: int) -> str:
    """Return the type of a file of that `st_mode`, with its article."""
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
    """Return a descriptor of the regular file at `path`, to read from; `action` is for messages.

    Raises:
        MissingFile: the file does not exist.
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
        StorageError: it is not a regular file, or cannot be looked at.
    """
    with as_storage_error(path, action):
        check_regular(path, os.stat(path))
