"""Types of file systems, and copies of ranges between files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

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
        piece = min(_PIECE - begin % _PIECE, nbytes - done)
        try:
            copied = copy(source, target, begin, piece)
        except OSError as error:
            if copy is _through_buffer or error.errno not in _NOT_HERE:
                raise
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
