"""Paths of files and URLs of objects, as text.

A ``file:`` URL is another way to write a plain path, and becomes that here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megaindex.errors import InvalidArgument
from megaindex.io.objects.urls import is_remote as is_remote
from megaindex.io.objects.urls import names_folder as names_folder
from megaindex.io.objects.urls import place_of, without_secrets

_FILE_URL = re.compile(r"file:(//)?(?=/)", re.IGNORECASE)  # pathlib drops two of the slashes


def plain(path: str) -> str:
    """A path without the scheme ``file:``; any other as it is. Nothing is percent-decoded.

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
    """The same place from any directory."""
    return path if is_remote(path) else os.path.abspath(plain(path))


def inside(folder: Path, path: str) -> str:
    """A path that is written relative to a folder; absolute ones and URLs stay as they are."""
    return path if is_remote(path) else str(folder / plain(path))


def refuse_zero_byte(path: str) -> None:
    """InvalidArgument for what no file system takes as a path."""
    if "\0" in path:
        raise InvalidArgument(f"{path!r}: holds a zero byte, as no path does; check the path")


def check_local(path: str, remedy: str) -> None:
    """InvalidArgument for a URL where only files will do, or for what is no path at all."""
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
