"""Which file system a path is on."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

# Writing through a mapping is as good as write() here; elsewhere it is slow or not coherent.
_LOCAL = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs",
}  # fmt: skip


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether an existing directory is on a local file system; False where it cannot be told."""
    return file_system_type(path) in _LOCAL


def file_system_type(path: str | os.PathLike[str]) -> str:
    """Name of the file system as in mount(8), such as ext4 or nfs4; empty where unknown."""
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
    """Let a network file system notice what other machines have made in a directory.

    Such a client remembers for up to a minute that a name was not there; opening the directory to
    list it makes it ask the server.
    """
    with contextlib.suppress(OSError):
        os.listdir(directory)


def _unescaped(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
