"""Copy a range of one open file to the end of another: in the kernel where that is possible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

Progress = Callable[[int], None]
"""Told how many more bytes are done."""

_PIECE = 1 << 26  # bytes asked of the kernel at once: progress and Ctrl-C come between pieces
_BUFFER = 1 << 20
# What says "not between these two files", as different file systems say it.
_NOT_HERE = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EXDEV,
}


def ignore(count: int) -> None:
    """A `Progress` for callers without one."""


def copy_range(
    source: int, target: int, offset: int, nbytes: int, progress: Progress = ignore
) -> int:
    """Copy `nbytes` bytes at `offset` of the descriptor `source` to the position of `target`.

    copy_file_range shares blocks instead of copying them where the file system can (Btrfs, XFS)
    and both positions begin a block; pieces therefore begin at multiples of their size. Where it
    does not work, as between some file systems, the bytes go through one buffer.

    Returns:
        The bytes copied: fewer than asked only where `source` ends before.

    Raises:
        OSError: reading or writing failed; `target` then holds a part.
    """
    copy = _in_kernel
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
        if copied == 0:  # the end of the file; but some file systems say so without reading
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
