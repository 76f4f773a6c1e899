"""Paths, URLs, file types, file information and types of file systems; OSError as StorageError.

Keys of objects are used as written, without percent-encoding, as by the stores' own tools. A
``file:`` URL is converted to a plain path. A StorageError names file, action, reason and remedy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megaindex.errors import InvalidArgument, MissingFile, StorageError

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


def path_text(path: object) -> str:
    """Return a path as text.

    Raises:
        InvalidArgument: it is neither text nor an `os.PathLike` of text.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InvalidArgument(
            f"a path must be text or an os.PathLike of text, got a {type(path).__name__}"
        )
    return text


def listed_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return paths as text; one that is given in place of a list is a list of one."""
    if isinstance(paths, (str, os.PathLike)) or not hasattr(paths, "__iter__"):
        return [path_text(paths)]
    return [path_text(path) for path in paths]


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
    # a copy that keeps the modification time has another ctime and inode
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


def sha256_of(path: str) -> tuple[int, str]:
    """Return the size of a local file, and SHA-256 of its content, 64 hex digits.

    Raises:
        StorageError: it is not a regular file, or cannot be read.
    """
    action = "cannot read"
    with as_storage_error(path, action), open(open_regular(path, action), "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
        return file.tell(), digest.hexdigest()


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


# Writing through a mapping is as fast as write() on these; elsewhere it is slow or not coherent.
_LOCAL = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs",
}  # fmt: skip

Progress = Callable[[int], None]
"""Called with the number of bytes copied since the last call."""

_PIECE = 1 << 26  # bytes of one system call; progress and interrupts come between
_BUFFER = 1 << 20
# errors of file systems that cannot copy between these two files
_NOT_HERE = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EXDEV,
}


def is_local(path: str | os.PathLike[str]) -> bool:
    """Return True if an existing directory is on a local file system; False if unknown."""
    return file_system_type(path) in _LOCAL


def file_system_type(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system as in mount(8), such as ext4 or nfs4; empty if unknown."""
    try:
        table = Path("/proc/self/mountinfo").read_text()
        device = os.stat(path).st_dev
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path)
    best, kind = -1, ""
    for line in table.splitlines():
        # id parent major:minor root mount-point options … - type source options
        fields, _, rest = line.partition(" - ")
        _, _, numbers, _, mount_point, *_ = fields.split(" ")
        mount_point = _unescaped(mount_point)
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        # btrfs and overlay give files other device numbers than their mount has
        score = len(mount_point) + (10_000 if numbers == wanted else 0)
        if inside and score > best:
            best, kind = score, rest.split(" ")[0]
    return kind


def look_again(directory: str | os.PathLike[str]) -> None:
    """Refresh a network file system's cache of a directory.

    Such a client caches for up to a minute that a name does not exist; listing the directory makes
    it query the server.
    """
    with contextlib.suppress(OSError):
        os.listdir(directory)


def _unescaped(text: str) -> str:
    """Decode the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def ignore(count: int) -> None:
    """Do nothing: the default `Progress`."""


def copy_range(
    source: int, target: int, offset: int, nbytes: int, progress: Progress = ignore
) -> int:
    """Copy `nbytes` bytes at `offset` of descriptor `source` to the position of `target`.

    copy_file_range shares blocks on file systems that can (Btrfs, XFS) if both positions begin a
    block, so pieces begin at multiples of their size. Where it fails, as between some file systems,
    the bytes are copied through a buffer.

    Returns:
        The number of bytes copied, fewer than `nbytes` only if `source` ends before.

    Raises:
        OSError: reading or writing failed; `target` may hold a part.
    """
    copy = _in_kernel if hasattr(os, "copy_file_range") else _through_buffer
    done = 0
    while done < nbytes:
        begin = offset + done
        # aligned pieces, so that the file system can share blocks
        piece = min(_PIECE - begin % _PIECE, nbytes - done)
        try:
            copied = copy(source, target, begin, piece)
        except OSError as error:
            if copy is _through_buffer or error.errno not in _NOT_HERE:
                raise
            # tried anew through a buffer, at the same place
            copied = 0
        if copied == 0:  # the end of the file, or a file system that cannot copy
            if copy is _through_buffer:
                break
            copy = _through_buffer
            continue
        done += copied
        progress(copied)
    return done


def _in_kernel(source: int, target: int, offset: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes, offset_src=offset)


def _through_buffer(source: int, target: int, offset: int, nbytes: int) -> int:
    data = memoryview(os.pread(source, min(nbytes, _BUFFER), offset))
    written = 0
    while written < len(data):
        written += os.write(target, data[written:])
    return written
