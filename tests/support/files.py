"""Open files of this process, and folders that it may not enter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_NOBODY = 65534


def open_below(folder: str | Path) -> list[str]:
    """Paths of open files that lie in a folder, one for each descriptor."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{folder}/")]


@contextlib.contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Inside ``with`` nobody may enter or list the folder; root, whom that does not bind, becomes
    another user until its end."""
    as_root = os.geteuid() == 0
    if as_root:
        try:
            os.seteuid(_NOBODY)
        except OSError:  # a container may forbid it, or not know that user
            pytest.skip("this root may not become another user")
        os.seteuid(0)
    folder.chmod(0)
    if as_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if as_root:
            os.seteuid(0)
        folder.chmod(0o755)
